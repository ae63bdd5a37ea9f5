"""Writes the parts of the manual that are derived: keys, presets, measurements, theory. `make docs` runs it.

Each part stands between two comments, <!-- begin NAME --> and <!-- end NAME -->; a test compares them with the code.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench import output
from docs import (
    api_page,
    community_page,
    compatibility_page,
    decision_pages,
    first_step,
    loss_figure,
    models_page,
    paper_figure,
    preset_uses,
    question_figures,
    sampled_figure,
    what_fits,
    which_method,
)
from docs.configuration_keys import keys, table
from experiments import significance
from experiments.theory import __main__ as theory
from rlplus.loss.objective.surrogates import EXTERNAL
from rlplus.tools.compare.config import BASE, Study, load_comparison
from rlplus.tools.compare.outcomes import Results
from rlplus.tools.compare.page import Tested, tested_in
from rlplus.tools.report.tables import interval, percent
from rlplus.train.algorithm import ALGORITHMS, Algorithm
from rlplus.train.config.benchmarks import BENCHMARKS

ROOT = Path(__file__).parent.parent

# The publication of each preset. An ablation belongs to the preset that its name begins with.
SOURCES = {
    "gkd": "[GKD](https://arxiv.org/abs/2306.13649)",
    "opd": "[Thinking Machines](https://thinkingmachines.ai/blog/on-policy-distillation/)",
    "opsd": "[OPSD](https://arxiv.org/abs/2601.18734)",
    "sdft": "[SDFT](https://arxiv.org/abs/2601.19897)",
    "sdpo": "[SDPO](https://arxiv.org/abs/2601.20802)",
    "rlplus": "[RL-PLUS](https://arxiv.org/abs/2508.00222)",
    "rlplus-official": "the RL-PLUS authors' scripts",
    "luffy": "[LUFFY](https://arxiv.org/abs/2504.14945)",
    "exgrpo": "[ExGRPO](https://arxiv.org/abs/2510.02245)",
    "grpo": "[DeepSeekMath](https://arxiv.org/abs/2402.03300)",
    "grpo-official": "LUFFY's scripts; the GRPO row of the RL-PLUS paper",
    "grpo-sft": 'LUFFY\'s scripts; the "GRPO w/ SFT loss" row',
    "relift": "[ReLIFT](https://arxiv.org/abs/2506.07527)",
    "hpt": "[HPT](https://arxiv.org/abs/2509.04419)",
    "superrl": "[SuperRL](https://arxiv.org/abs/2506.01096)",
    "uft": "[UFT](https://arxiv.org/abs/2505.16984)",
    "prefix-rft": "[Prefix-RFT](https://arxiv.org/abs/2507.01679)",
    "srft": "[SRFT](https://arxiv.org/abs/2506.19767)",
    "chord": "[CHORD](https://arxiv.org/abs/2508.11408)",
    "bread": "[BREAD](https://arxiv.org/abs/2506.17211)",
    "pope": "[POPE](https://arxiv.org/abs/2601.18779)",
    "dr-grpo": "[Dr.GRPO](https://arxiv.org/abs/2503.20783), Oat-Zero",
    "dapo": "[DAPO](https://arxiv.org/abs/2503.14476); the dual clip is in the code only",
    "simplerl": "[SimpleRL-Zoo](https://arxiv.org/abs/2503.18892)",
    "ppo": "[Open-Reasoner-Zero](https://arxiv.org/abs/2503.24290)",
    "prime": "[PRIME](https://arxiv.org/abs/2502.01456)",
    "gspo": "[GSPO](https://arxiv.org/abs/2507.18071)",
    "cispo": "[MiniMax-M1](https://arxiv.org/abs/2506.13585), [ScaleRL](https://arxiv.org/abs/2510.13786)",
    "sapo": "[SAPO](https://arxiv.org/abs/2511.20347)",
    "dppo": "[DPPO](https://arxiv.org/abs/2602.04879)",
    "sft": "maximum likelihood",
    "dft": "[DFT](https://arxiv.org/abs/2508.05629)",
}
PAPER = "paper-*.json"  # results of experiments/compare/paper.yaml
DIVISORS = {"token": "tokens", "sequence": "S · own length", "constant": "S · L", "official": "8 · L"}


# ---- presets


def presets() -> str:
    header = ("preset", "sampled tokens", "demonstrated tokens", "advantage", "divided by", "and", "source")
    rows = (
        (f"`{name}`", sampled(a), demonstrated(a), advantage(a), divisor(a), "; ".join(extras(a)), source(name))
        for name, a in ALGORITHMS.items()
    )
    return table(header, rows)


def source(name: str) -> str:
    """The preset's publication. KeyError for a preset without an entry in `SOURCES`."""
    if name in SOURCES:
        return SOURCES[name]
    base = max((known for known in SOURCES if name.startswith(f"{known}-")), key=len)
    return f"ablation of `{base}`"


def sampled(algorithm: Algorithm) -> str:
    o = algorithm.objective
    if not algorithm.generates or algorithm.recipe.own_loss:
        return ""
    ratio = "r of the sequence" if algorithm.ratio_level == "sequence" else "r"
    high = "" if o.clip_high == o.clip_low else f" and {o.clip_high:g}"
    dual = "" if o.dual_clip is None else f", dual clip {o.dual_clip:g}"
    return {
        "ratio": ratio,
        "reinforce": "log p",
        "clip": f"{ratio}, clipped at {o.clip_low:g}{high}{dual}",
        "cispo": f"sg(min(r, {1 + o.clip_high:g})) · log p",
        "sapo": f"soft gate, τ {o.tau_pos:g} and {o.tau_neg:g}",
        "dppo": f"sg(min(r, {o.ratio_cap:g})) · log p, while p moves by at most {o.clip_low:g}",
    }[o.internal]


def demonstrated(algorithm: Algorithm) -> str:
    o = algorithm.objective
    if not algorithm.demonstrates:
        return ""
    if not algorithm.recipe.trains_demonstrations:
        return "none"
    surrogate = {
        "mis": "MIS",
        "proxy": "p / p_old",
        "omega": "p / p_ω",
        "bayes": "2 p / (p_old + 1)",
        "shaped": f"w / (w + {o.kappa:g}), w = p / p_ω",
        "nll": "log p",
        "dft": "sg(p) · log p",
    }[o.external]
    factor = "" if o.external_coef == 1 else f"{o.external_coef:g} · "
    weight = f" · (1 − p)^{o.gamma:g}" if o.gamma else ""
    place = {"group": "", "apart": ", outside the group's statistics", "only": ""}[algorithm.demonstrations]
    beside = ", and log p" if algorithm.recipe.weighs_tokens else ""
    return f"{factor}{surrogate}{weight}{place}{beside}"


def advantage(algorithm: Algorithm) -> str:
    weighted = algorithm.generates or EXTERNAL[algorithm.objective.external].weighted
    if algorithm.recipe.own_loss or not weighted:
        return "none"
    if algorithm.recipe.own_advantages:
        return "per token, by the recipe"
    own = "(R − mean) / std" if algorithm.normalize_std else "R − mean"
    return f"±1; {own} of demonstrations" if algorithm.recipe.weighs_tokens else own


def divisor(algorithm: Algorithm) -> str:
    own, shown = DIVISORS[algorithm.reduction], DIVISORS[algorithm.external_reduction or algorithm.reduction]
    return f"{own}; {shown} of the demonstrations" if algorithm.demonstrations_apart else own


def extras(algorithm: Algorithm) -> Iterator[str]:
    o, refill, shaping = algorithm.objective, algorithm.refill, algorithm.shaping
    if o.entropy_coef:
        yield f"+ {o.entropy_coef:g} · entropy"
    if o.kl_coef:
        yield f"− {o.kl_coef:g} · KL ({o.kl_estimator})"
    if (name := algorithm.recipe.name) != "plain":
        yield f"recipe `{name}`" + (f", whose loss is `{loss}`" if (loss := algorithm.recipe.own_loss) else "")
    if algorithm.external_top_entropy < 1:
        yield f"the {algorithm.external_top_entropy:.0%} of demonstrated tokens with the highest entropy"
    if refill is not None:
        rest = f"; other groups after {refill.max_draws} draws" if refill.fill else ""
        yield f"refill, mean reward within {refill.low:g} and {refill.high:g}{rest}"
    if shaping is not None:
        yield f"a wrong answer is worth {shaping.wrong:g}, penalty on the last {shaping.overlong:.0%} of L"
    if algorithm.skip_grad_norm:
        yield f"skips updates of gradient norm > {algorithm.skip_grad_norm:g}"


# ---- benchmarks and measurements


def benchmarks() -> str:
    header = ("name", "grader", "source", "other names in files")
    rows = ((f"`{name}`", b.grader, f"`{b.source}`", ", ".join(b.aliases)) for name, b in BENCHMARKS.items())
    return table(header, rows)


def measurements() -> str:
    return output.manual_part(output.load(ROOT / "bench/results")).strip()


def peers() -> str:
    """A few methods on a GPU."""
    return output.gpu_table(output.load(ROOT / "bench/results")["gpu"]).strip()


def compared(files: str) -> dict[tuple[str, int], tuple[Results, dict[str, Study]]]:
    """A comparison's results, and its studies with so many seeds, by setting and number of seeds."""
    found: dict[tuple[str, int], tuple[Results, dict[str, Study]]] = {}
    order = list(load_comparison(ROOT / "experiments/compare/paper.yaml").settings)
    for path in sorted((ROOT / "experiments/compare/results").glob(files)):
        results = Results.load(path)
        studies = results.comparison.studies
        for setting in dict.fromkeys(one.setting for one in results.outcomes):
            for name, study in studies.items():
                if setting in study.settings and len(tested_in(results, study, setting).methods) > 1:
                    first, named = found.setdefault((setting, study.seeds), (results, {}))
                    if first is results:
                        named[name] = study
                    elif name not in named:
                        raise ValueError(f"want all studies of {setting} in one file; {path} has another: {name}")
    return dict(sorted(found.items(), key=lambda item: (-item[0][1], order.index(item[0][0]))))


def comparisons() -> str:
    """Each method's share of each test set solved, by setting and number of seeds."""
    parts = (
        f"`{setting}`, {seeds} seeds:\n\n{setting_table(results, studies, setting)}"
        for (setting, seeds), (results, studies) in compared(PAPER).items()
    )
    return "\n\n".join(parts)


def word_problems() -> str:
    results = Results.load(ROOT / "experiments/compare/results/words.json")
    return setting_table(results, results.comparison.studies, "words")


def tested_by_permutation(name: str, title: str) -> str:
    """pass@1, runs that find the skill, and the difference from the reference, bold if significant, by setting."""
    results = Results.load(ROOT / f"experiments/compare/results/{name}.json")
    study = results.comparison.studies[title]
    cells: dict[str, list[str]] = {}
    for row in significance.rows_of(results, title):
        mean = f"{percent(row.pass_at_1)}; {round(row.found * study.seeds)}"
        if row.p is not None:  # it was tested
            points = percent(row.difference, "+")
            mean += f"; **{points}**" if row.p < significance.LEVEL else f"; {points}"
        cells.setdefault(row.method, []).append(mean)
    return table(("method", *study.settings), ((method, *each) for method, each in cells.items()))


def two_outcomes(results: Results, studies: dict[str, Study], setting: str) -> bool:
    """Whether the few seeds of a method have two outcomes: then no difference of the setting is bold."""
    return any(tested_in(results, study, setting).in_groups(1) for study in studies.values())


def setting_table(results: Results, studies: dict[str, Study], setting: str) -> str:
    """% solved by each method that has finished on all seeds, in the order of the studies, and its difference."""
    rows: dict[str, tuple[str, ...]] = {}
    apart = two_outcomes(results, studies, setting)
    header: tuple[str, ...] = ()
    for name, study in studies.items():
        tested = tested_in(results, study, setting)
        first, *others = tested.sets
        ks = sorted({k for one in tested.of(BASE, first) for k in one.k})
        columns = [*((first, k) for k in ks), *((other, ks[0]) for other in others), (None, ks[0])]
        header = ("method", *(f"{which or 'all'}, pass@{k}" for which, k in columns), "difference")
        new = [method for method in tested.methods if method not in rows]
        rows |= {name: (block(name, studies), *("" for _ in header[1:]))} if new and len(studies) > 1 else {}
        for method in new:
            means = (percent(tested.estimate(method, k, which).mean) for which, k in columns)
            rows[method] = (method, *means, difference(tested, study.compared_with, method, apart))
    return table(header, iter(rows.values()))


def most_repeated(files: str) -> dict[str, tuple[Results, dict[str, Study]]]:
    """The part of `compared` that has the most seeds."""
    parts = compared(files)
    most = max(seeds for _, seeds in parts)
    return {setting: part for (setting, seeds), part in parts.items() if seeds == most}


def settings_beside(files: str) -> str:
    """pass@1 on all problems and the difference from the reference, in each setting with the most seeds."""
    columns = most_repeated(files)
    apart = {setting: two_outcomes(results, studies, setting) for setting, (results, studies) in columns.items()}
    names = dict.fromkeys(name for _, studies in columns.values() for name in studies)
    rows: dict[str, list[str]] = {}
    for name in names:
        each = {
            setting: (tested_in(results, studies[name], setting), studies[name].compared_with)
            for setting, (results, studies) in columns.items()
            if name in studies
        }
        finished = dict.fromkeys(method for tested, _ in each.values() for method in tested.methods)
        new = [method for method in finished if method not in rows]
        title = block(name, next(studies for _, studies in columns.values() if name in studies))
        rows |= {title: [""] * len(columns)} if new and len(names) > 1 else {}
        rows |= {
            method: [mean_and_difference(*each[s], method, apart[s]) if s in each else "" for s in columns]
            for method in new
        }
    return table(("method", *columns), ((name, *cells) for name, cells in rows.items()))


def block(name: str, studies: dict[str, Study]) -> str:
    """The title of a study's rows, with its reference if the first study has another."""
    usual = next(iter(studies.values())).compared_with
    reference = studies[name].compared_with
    return f"**{name}**" if reference == usual else f"**{name}**, compared with: {reference}"


def mean_and_difference(tested: Tested, reference: str, method: str, apart: bool) -> str:
    if method not in tested.methods:
        return ""
    mean, from_reference = percent(tested.mean(method)), difference(tested, reference, method, apart)
    return f"{mean}; {from_reference}" if from_reference else mean


def difference(tested: Tested, reference: str, method: str, apart: bool) -> str:
    """The difference from the reference, in points of pass@1 on all problems; bold if its interval excludes 0.

    apart: whether few seeds of the setting have two outcomes; then nothing is bold.
    """
    if method == reference or reference not in tested.methods:
        return ""
    estimate = tested.difference(reference, method, 1)
    cell = interval(estimate, "+")
    text = f"{cell.text} ({cell.detail})"
    clear = (estimate.low > 0 or estimate.high < 0) and not apart
    return f"**{text}**" if clear else text


# ---- the example in one file


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/kernels.md": {"measurements": measurements, "peers": peers},
    "docs/api.md": {name: partial(api_page.section, name, ROOT) for name in api_page.SECTIONS},
    "docs/index.md": {"step": first_step.code},
    "docs/pytorch.md": {
        "update-noise": partial(sampled_figure.update, table, ROOT),
        "noisy-training": partial(sampled_figure.training, table, ROOT),
    },
    "docs/systems.md": {"presets": presets, "preset-uses": partial(preset_uses.part, table, source)},
    "docs/configuration.md": {"keys": keys},
    "docs/evaluation.md": {"benchmarks": benchmarks},
    "docs/decisions/index.md": {"decisions": partial(decision_pages.index, table)},
    "docs/community.md": {"community": partial(community_page.part, table)},
    "docs/compatibility.md": {"newest": partial(compatibility_page.frameworks, table)},
    "docs/models.md": {"families": partial(models_page.families, table)},
    "docs/paper-study.md": {
        "settings": partial(settings_beside, PAPER),
        "one-rate": partial(settings_beside, "one-rate.json"),
        "one-rate-more": partial(settings_beside, "one-rate-more.json"),
        "comparisons": comparisons,
        "words": word_problems,
        "demonstrations": partial(tested_by_permutation, "demonstrations", "Demonstrations"),
        "variants": partial(tested_by_permutation, "variants", "Against p/p_ω"),
        "prefixes": partial(tested_by_permutation, "prefixes", "Against GRPO"),
    },
    "docs/which-method.md": {
        "which-method": partial(which_method.decision, table),
        "beside-grpo": partial(which_method.beside_grpo, table),
        "contrast": partial(which_method.contrast, table),
        "form-runs": partial(which_method.form_runs, table),
        "form-tests": partial(which_method.form_tests, table),
        "form-cells": partial(which_method.form_runs, table, "cells"),
        "form-cell-tests": partial(which_method.form_tests, table, "cells"),
        "form-methods": partial(which_method.form_runs, table, "methods"),
        "form-method-tests": partial(which_method.form_tests, table, "methods"),
        "form-search": partial(which_method.form_search, table),
        "form-own-rates": partial(which_method.form_runs, table, "first", "form-rates"),
        "form-own-rate-tests": partial(which_method.form_tests, table, "first", "form-rates"),
        "form-responses": partial(which_method.form_runs, table, "responses"),
        "form-response-tests": partial(which_method.form_tests, table, "responses"),
        "form-rates": partial(which_method.form_runs, table, "rates"),
        "forms": partial(which_method.forms, table),
    },
    "docs/theory.md": {name: partial(theory.table, rows) for name, rows in theory.TABLES.items()},
}
# Parts that take minutes, written with --plan.
PLANNED: dict[str, dict[str, Callable[[], str]]] = {
    "docs/what-fits.md": {name: partial(what_fits.table, name) for name in what_fits.TUNINGS},
}


def with_part(text: str, name: str, part: str) -> str:
    """The page with the text between a part's marks replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"want a page with one {begin} and one {end}")
    return f"{text[: text.index(begin)]}{begin}\n\n{part}\n\n{text[text.index(end) :]}"


def pages(derived: dict[str, dict[str, Callable[[], str]]] = PARTS) -> Iterator[tuple[Path, str]]:
    """The files that are derived, or have derived parts, with what they should contain."""
    for name, parts in derived.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for part, make in parts.items():
            text = with_part(text, part, make())
        yield ROOT / name, text
    yield ROOT / "docs/paper.svg", paper_figure.draw(most_repeated(PAPER), "RL-PLUS")
    yield loss_figure.figure(ROOT)
    yield sampled_figure.figure(ROOT)
    yield from question_figures.figures(ROOT)
    yield which_method.figure(ROOT)


if __name__ == "__main__":
    for path, text in pages(PARTS | PLANNED if "--plan" in sys.argv else PARTS):
        path.write_text(text, encoding="utf-8")
