"""The tables and the figure of docs/which-method.md: methods by the form of the demonstrations."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from statistics import fmean

from docs.paper_figure import STYLE
from experiments import form as registered
from experiments.form import pass_at_1
from experiments.significance import exact_interval, finds_the_skill, permutation_p, right_samples
from experiments.toy.familiarity import FAMILIARITY
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.report.tables import interval, percent
from rlplus.train.evaluation.results import Evaluation, join, paired_difference

Table = Callable[[tuple[str, ...], Iterator[tuple[str, ...]]], str]

RESULTS = Path(__file__).parent.parent / "experiments/compare/results"
METHODS = {"GRPO": "GRPO", "SFT": "SFT", "SFT+GRPO": "SFT+GRPO", "p/p_ω": "omega", "RL-PLUS": "RL-PLUS"}  # other names
CONTRAST = {"own form": ("one-rate-more", "rare"), "without the first number": ("updates", "one update a step")}
FAMILIAR = "actor/prob_external"
OWN, OTHER = "in the base model's own form", "in another form"


@dataclass(frozen=True)
class Runs:
    """A setting of a file of results. undemonstrated: the setting that has its runs without demonstrations.

    finds: whether the task has a skill that a run finds or does not.
    """

    file: str
    setting: str
    demonstrations: str
    rate: str
    undemonstrated: str = ""
    finds: bool = True

    def of(self, method: str) -> dict[int, Outcome]:
        """A method's runs by seed; none if it was not run there."""
        results = loaded(self.file)
        setting = self.undemonstrated if method == "GRPO" and self.undemonstrated else self.setting
        return results.of(setting, method) or results.of(setting, METHODS[method])

    def paired(self, first: str, second: str) -> tuple[list[Outcome], list[Outcome]]:
        """The runs of two methods on the seeds that both have."""
        one, other = self.of(first), self.of(second)
        seeds = sorted(one.keys() & other.keys())
        return [one[seed] for seed in seeds], [other[seed] for seed in seeds]


SHORTENED, _ = registered.RUNS[registered.OTHER]
EACH, ONE = "its own, searched on", "1e-3 for all"
FORMS = {
    OWN: (
        Runs("distillation", "exact", "4,096, exact", f"{EACH} two seeds"),
        Runs("distillation", "noisy", "4,096, noisy", f"{EACH} two seeds", undemonstrated="exact"),
        Runs("one-rate", "rare", "4,096, noisy (`rare`)", ONE),
        Runs("one-rate", "noisy", "4,096, noisy (`noisy`)", ONE),
        Runs("paper-rare", "rare", "4,096, noisy (`rare`)", f"{EACH} one seed"),
        Runs("paper-noisy", "noisy", "4,096, noisy (`noisy`)", f"{EACH} one seed"),
        Runs("paper-sizes", "narrow", "4,096, noisy, narrower model", f"{EACH} one seed"),
        Runs("paper-sizes", "wide", "4,096, noisy, wider model", f"{EACH} one seed"),
        Runs("segments", "demo", "4,096, exact (the demo)", ONE),
        Runs("form", "own", "4,096, noisy (fixed before)", ONE),
        Runs("form", "own and exact", "4,096, exact (fixed before)", ONE, undemonstrated="own"),
    ),
    OTHER: (
        Runs("demonstrations", "few exact", "64, exact, shortened", f"{EACH} three seeds"),
        Runs("demonstrations", "few noisy", "64, noisy, shortened", f"{EACH} three seeds"),
        Runs("demonstrations", "many exact", "4,096, exact, shortened", f"{EACH} three seeds"),
        Runs("demonstrations", "many noisy", "4,096, noisy, shortened", f"{EACH} three seeds"),
        Runs("updates", "one update a step", "4,096, noisy, shortened", ONE),
        Runs("updates", "two updates a step", "the same, two updates a step", "5e-4 for all"),
        Runs("updates", "four updates a step", "the same, four updates a step", "2.5e-4 for all"),
        Runs("one-rate", "foreign", "4,096, exact, reversed (`foreign`)", ONE),
        Runs("paper-foreign", "foreign", "4,096, exact, reversed (`foreign`)", f"{EACH} one seed"),
        Runs("words", "words", "word problems in other words", f"{EACH} one seed", finds=False),
        Runs("form", SHORTENED, "4,096, noisy, shortened (fixed before)", ONE, undemonstrated="own"),
        Runs("form", f"{SHORTENED} and exact", "4,096, exact, shortened (fixed before)", ONE, undemonstrated="own"),
        Runs("form", "reversed", "4,096, noisy, reversed (fixed before)", ONE, undemonstrated="own"),
        Runs("form", "reversed and exact", "4,096, exact, reversed (fixed before)", ONE, undemonstrated="own"),
    ),
}
DRAWN = (*FORMS[OWN][:4], *FORMS[OWN][-2:], *FORMS[OTHER][:5], FORMS[OTHER][7], *FORMS[OTHER][-4:])


@dataclass(frozen=True)
class Choice:
    """A reader's case: what to take, and the runs that say so, of these methods."""

    case: str
    take: str
    runs: Runs
    methods: tuple[str, ...]


CHOICES = (
    Choice("in the model's own form, exact", "`sft`", FORMS[OWN][0], ("SFT", "RL-PLUS", "GRPO")),
    Choice(
        "in its own form, with errors on the way",
        "`rlplus-official` or `rlplus-official-omega`",
        FORMS[OWN][-2],
        ("RL-PLUS", "p/p_ω", "SFT+GRPO", "SFT", "GRPO"),
    ),
    Choice("the same, each method at its own rate", "the same", FORMS[OWN][1], ("RL-PLUS", "SFT", "GRPO")),
    Choice(
        "in another form, few, exact",
        "none of them: `grpo-official`",
        FORMS[OTHER][0],
        ("GRPO", "p/p_ω", "RL-PLUS", "SFT+GRPO"),
    ),
    Choice("few, noisy", "the same", FORMS[OTHER][1], ("GRPO", "p/p_ω", "RL-PLUS", "SFT+GRPO")),
    Choice(
        "in another form, many, exact",
        "`grpo-official`; `sft`, then GRPO, if nothing else is to be kept",
        FORMS[OTHER][2],
        ("GRPO", "p/p_ω", "RL-PLUS", "SFT+GRPO"),
    ),
    Choice("many, noisy", "the same", FORMS[OTHER][3], ("GRPO", "p/p_ω", "RL-PLUS", "SFT+GRPO")),
    Choice(
        "in other words, for a task that GRPO learns by itself",
        "`grpo-official`",
        FORMS[OTHER][9],
        ("GRPO", "p/p_ω", "RL-PLUS", "SFT+GRPO"),
    ),
)


@cache
def loaded(file: str) -> Results:
    return Results.load(RESULTS / f"{file}.json")


def found(outcomes: Sequence[Outcome]) -> int:
    return sum(finds_the_skill(one) for one in outcomes)


def decision(table: Table) -> str:
    """The method for each case, and in how many runs each found the skill, with its exact interval."""
    header = ("your demonstrations", "take", "runs", "pass@1, %; runs that find the skill (95 %)")
    return table(header, ((c.case, c.take, evidence(c.runs), results_of(c)) for c in CHOICES))


def evidence(runs: Runs) -> str:
    seeds = len(runs.of("RL-PLUS"))
    return f"{runs.demonstrations}; {seeds} seeds"


def results_of(choice: Choice) -> str:
    return "; ".join(f"{method} {one_result(choice.runs, method)}" for method in choice.methods)


def one_result(runs: Runs, method: str) -> str:
    outcomes = list(runs.of(method).values())
    mean = percent(fmean(map(pass_at_1, outcomes)))
    if not runs.finds:
        return mean
    count = found(outcomes)
    low, high = exact_interval(count, len(outcomes))
    return f"{mean}, {count} of {len(outcomes)} ({100 * low:.0f} to {100 * high:.0f} %)"


def beside_grpo(table: Table) -> str:
    """Every comparison of RL-PLUS with GRPO: pass@1, runs that find the skill, and the paired difference."""
    header = ("demonstrations", "rate", "seeds", "p of a token", *METHODS, "RL-PLUS − GRPO (95 %)", "p")
    return table(header, comparison_rows(len(header)))


def comparison_rows(columns: int) -> Iterator[tuple[str, ...]]:
    for form, every in FORMS.items():
        yield (f"**{form}**", *[""] * (columns - 1))
        for runs in every:
            grpo, ours = runs.paired("GRPO", "RL-PLUS")
            difference = interval(paired_difference(joined(grpo), joined(ours), 1), "+")
            p = permutation_p([right_samples(b) - right_samples(a) for a, b in zip(grpo, ours, strict=True)])
            cells = (short_result(runs, method) for method in METHODS)
            seen = (runs.demonstrations, runs.rate, str(len(ours)), f"{familiarity(ours):.2f}")
            yield (*seen, *cells, f"{difference.text} ({difference.detail})", "< .0001" if p < 1e-4 else f"{p:.4f}")


def joined(outcomes: Sequence[Outcome]) -> list[Evaluation]:
    """The evaluation of each run on all problems."""
    return [join(list(one.results.values()), seed=one.seed) for one in outcomes]


def short_result(runs: Runs, method: str) -> str:
    outcomes = list(runs.of(method).values())
    if len(outcomes) < len(runs.of("RL-PLUS")):  # none, or not on all seeds of the row
        return ""
    mean = percent(fmean(map(pass_at_1, outcomes)))
    return f"{mean}; {found(outcomes)}" if runs.finds else mean


def familiarity(outcomes: Sequence[Outcome]) -> float:
    """The mean probability of demonstrated tokens over the first few steps, as they are kept, and the seeds."""
    return fmean(one.curves[FAMILIAR][1][0] for one in outcomes)


def contrast(table: Table) -> str:
    """RL-PLUS with demonstrations in the base model's own form and in a shortened one, from the same base models."""
    seeds = loaded(CONTRAST["own form"][0]).of(CONTRAST["own form"][1], "RL-PLUS")
    header = ("RL-PLUS, pass@1 in %", *(f"seed {seed}" for seed in seeds), "mean", "find the skill")
    return table(header, map(contrast_row, CONTRAST))


def contrast_row(form: str) -> tuple[str, ...]:
    file, setting = CONTRAST[form]
    outcomes = list(loaded(file).of(setting, "RL-PLUS").values())
    shares = [pass_at_1(one) for one in outcomes]
    return (form, *map(percent, shares), percent(fmean(shares)), str(found(outcomes)))


def form_runs(table: Table, part: str = "first", file: str = "form") -> str:
    """The runs of a part of the comparison of forms that was fixed before them."""
    return table(registered.RUN_HEADER, iter(registered.run_rows(loaded(file), part)))


def form_tests(table: Table, part: str = "first", file: str = "form") -> str:
    """The differences of a part of the same comparison, and their tests."""
    return table(registered.TESTED_HEADER, iter(registered.difference_rows(loaded(file), part)))


def form_search(table: Table) -> str:
    """Mean pass@1 of each rate that was tried on seeds of its own, the chosen one bold."""
    searched = loaded("form-rates").rates
    tried = {name: searched[setting][method] for name, (setting, method) in registered.RUNS.items()}
    rates = sorted({float(rate) for scores in tried.values() for rate in scores})

    def cell(scores: dict[str, float], rate: float) -> str:
        score = scores.get(f"{rate:g}")
        text = "" if score is None else percent(score)
        return f"**{text}**" if score == max(scores.values()) else text

    rows = ((name, *(cell(scores, rate) for rate in rates)) for name, scores in tried.items())
    return table(("runs", *(f"{rate:g}" for rate in rates)), rows)


def forms(table: Table) -> str:
    """Mean logprob and mean probability of a demonstrated token under base models, by form."""
    rows = json.loads(FAMILIARITY.read_text(encoding="utf-8"))
    shares = sorted({row["share"] for row in rows})
    header = ("form", *(f"scratchpads in {100 * one:.0f} %: {what}" for one in shares for what in ("logprob", "p")))

    def mean(form: str, share: float, key: str) -> str:
        return f"{fmean(row[key] for row in rows if (row['form'], row['share']) == (form, share)):.2f}".replace(
            "-", "−"
        )

    return table(
        header,
        (
            (form, *(mean(form, one, key) for one in shares for key in ("logprob", "p")))
            for form in dict.fromkeys(row["form"] for row in rows)
        ),
    )


# ---- the figure

LABELS, PANEL, LINE, TOP = 300, 420, 40, 58
OFFSETS = {"GRPO": (-7, "method"), "RL-PLUS": (9, "method ours")}
ADDED = ".seed { fill-opacity: .35; stroke: none; }"


def figure(root: Path) -> tuple[Path, str]:
    """The path and the SVG: each seed's pass@1 with GRPO and with RL-PLUS, and their means, by form."""
    lines = list(drawn())
    height, width = TOP + LINE * (len(DRAWN) + len(FORMS)), LABELS + PANEL + 24
    return root / "docs/which-method.svg", (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 8}" role="img" '
        f'aria-label="pass@1 of each seed with GRPO and RL-PLUS, by the form of the demonstrations">\n'
        f"<style>{STYLE}{ADDED}</style>\n"
        f'<rect width="{width}" height="{height + 8}" fill="#ffffff"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def drawn() -> Iterator[str]:
    bottom = TOP + LINE * (len(DRAWN) + len(FORMS))
    for (name, (_, kind)), left in zip(OFFSETS.items(), (LABELS, LABELS + 110), strict=True):
        yield f'<g class="{kind}"><circle cx="{left + 4}" cy="14" r="4"/></g><text x="{left + 14}" y="18">{name}</text>'
    for mark in (0, 25, 50, 75, 100):
        x = LABELS + PANEL * mark / 100
        yield f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{TOP - 14}" y2="{bottom}"/>'
        yield f'<text class="small" x="{x:g}" y="{TOP - 20}" text-anchor="middle">{mark}</text>'
    y = TOP + 8
    for form, every in FORMS.items():
        yield f'<text class="head" x="4" y="{y + 4}">{form[0].upper() + form[1:]}</text>'
        y += LINE
        for runs in (runs for runs in every if runs in DRAWN):
            title = runs.demonstrations.replace("`", "")
            yield f'<text x="4" y="{y}">{escape(title)}</text>'
            yield f'<text class="small" x="4" y="{y + 14}">rate {runs.rate}</text>'
            for method, (offset, kind) in OFFSETS.items():
                yield points(runs, method, y + offset, kind)
            y += LINE


def points(runs: Runs, method: str, y: int, kind: str) -> str:
    """A method's seeds, pale, and their mean as a line."""
    shares = [pass_at_1(one) for one in runs.of(method).values()]
    seeds = "".join(f'<circle class="seed" cx="{LABELS + PANEL * each:.1f}" cy="{y}" r="4"/>' for each in shares)
    x = LABELS + PANEL * fmean(shares)
    title = escape(f"{runs.file}, {runs.setting}, {method}: {100 * fmean(shares):.1f} %")
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 7}" y2="{y + 7}"/>'
    return f'<g class="{kind}"><title>{title}</title>{seeds}{line}</g>'
