"""The table of docs/systems.md: who publishes each preset, where it is used, and what was measured with it here."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rlplus.tools.compare.outcomes import Results
from rlplus.tools.convert.trl_arguments import LOSSES
from rlplus.tools.convert.verl_overrides import MODES
from rlplus.train.algorithm import ALGORITHMS

ROOT = Path(__file__).parent.parent
# The rows of the RL-PLUS paper's tables and figures, ablations and estimators too.
PAPER = {
    "simplerl": "SimpleRL", "ppo": "ORZ", "prime": "PRIME", "dr-grpo": "Oat", "dapo": "DAPO", "luffy": "LUFFY",
    "relift": "ReLIFT", "sft": "SFT, SFT+GRPO", "grpo-official": "GRPO, SFT+GRPO", "grpo-sft": "GRPO w/ SFT loss",
    "rlplus": "RL-PLUS, by its text", "rlplus-official": "RL-PLUS, by its scripts",
    "rlplus-no-eba": "− EBA", "rlplus-no-mis": "− MIS", "rlplus-proxy": "p / p_old", "rlplus-omega": "p / p_ω",
    "rlplus-bayes": "p / p_ω by its estimate",
}  # fmt: skip
HERE = {
    "rlplus": "`rlplus init`",
    "grpo": "`rlplus init`",
    "pope": "`examples/guide_hard_problems.py`",
}
CONVERTED = {"TRL": {preset for preset, _ in LOSSES.values()}, "verl": {"ppo", *MODES.values()}}
# The page of each file of results.
PAGES = {
    "experiments/compare/results/one-rate*.json": ("one learning rate", "paper-study.md#at-one-learning-rate"),
    "experiments/compare/results/paper-[nrf]*.json": (
        *("own learning rates", "paper-study.md#all-methods-each-at-its-own-learning-rate"),
    ),
    "experiments/compare/results/demonstrations.json": ("demonstrations", "paper-study.md#few-and-many-demonstrations"),
    "experiments/compare/results/variants.json": ("two other weights", "paper-study.md#two-other-weights"),
    "experiments/compare/results/prefixes.json": ("prefixes", "paper-study.md#demonstrated-prefixes"),
    "experiments/compare/results/form.json": ("two forms", "which-method.md#the-form-alone"),
    "experiments/compare/results/form-rates.json": ("two forms, own rates", "which-method.md#each-at-its-own-rate"),
    "experiments/compare/results/words.json": ("words", "paper-study.md#word-problems-and-a-larger-model"),
    "experiments/compare/results/updates.json": ("updates", "what-decides.md#how-many-updates-a-step"),
    "experiments/compare/results/paper-sizes.json": ("sizes", "what-decides.md#how-large-the-model"),
    "experiments/compare/results/distillation.json": ("self-distillation", "distillation.md#does-it-teach"),
    "experiments/compare/results/segments.json": ("segments", "decisions/034-overlap-and-segments.md"),
    "experiments/compare/results/sampled.json": ("sampled pass", "pytorch.md#does-the-noise-change-training"),
    "experiments/real/results/cpu.json": ("pretrained", "pretrained.md#what-has-run"),
}


def part(table: Callable[..., str], source: Callable[[str], str]) -> str:
    """table: of a heading and rows, in Markdown; source: the publication of a preset."""
    results = measured()
    rows = (
        (
            f"`{name}`",
            source(name),
            "; ".join(used(name)) or "its publication alone",
            ", ".join(f"[{title}]({link})" for title, link in results[name]) or "not measured",
        )
        for name in ALGORITHMS
    )
    return table(("preset", "published by", "used by", "measured here"), rows)


def used(name: str) -> list[str]:
    """Rows of the RL-PLUS paper, and the programs and files that write the preset into a configuration."""
    row = PAPER.get(name.replace("-official-", "-"))
    found = [f"RL-PLUS paper: {row}"] if row else []
    found += [HERE[name]] if name in HERE else []
    trainers = [trainer for trainer, presets in CONVERTED.items() if name in presets]
    return found + ([f"`rlplus convert` of {' and '.join(trainers)}"] if trainers else [])


def measured() -> dict[str, dict[tuple[str, str], None]]:
    """The pages of results by the presets whose loss was trained as it is."""
    found: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for pattern, page in PAGES.items():
        for path in sorted(ROOT.glob(pattern)):
            results = Results.load(path)
            methods = results.comparison.methods
            for name in {one.method for one in results.outcomes} & methods.keys():
                if not any(
                    key.startswith(("algorithm.objective.", "data.behavior")) for key in methods[name].overrides
                ):
                    found[methods[name].preset][page] = None
    return found
