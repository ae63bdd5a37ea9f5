"""The figures of docs/what-decides.md: for each question its levels side by side, from committed results."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.paper_figure import Part, draw
from rlplus.tools.compare.outcomes import Results


@dataclass(frozen=True)
class Question:
    """A study in a file of results, in some of its settings."""

    results: str
    study: str
    settings: tuple[str, ...]


FEW_AND_MANY = ("few exact", "many exact", "few noisy", "many noisy")
EXACT_AND_NOISY = ("few exact", "few noisy", "many exact", "many noisy")
QUESTIONS = {
    "scarcity": Question("demonstrations", "Demonstrations", FEW_AND_MANY),
    "noise": Question("demonstrations", "Demonstrations", EXACT_AND_NOISY),
    "updates": Question(
        "updates", "Updates a step", ("one update a step", "two updates a step", "four updates a step")
    ),
    "sizes": Question("paper-sizes", "Model sizes", ("narrow", "noisy", "wide")),
    "gamma": Question("paper-noisy", "Exploration exponent", ("noisy",)),
}


def parts_of(question: Question, folder: Path) -> dict[str, Part]:
    """The results and the study of each setting."""
    results = Results.load(folder / f"{question.results}.json")
    study = results.comparison.studies[question.study]
    return {setting: (results, {question.study: study}) for setting in question.settings}


def figures(root: Path) -> Iterator[tuple[Path, str]]:
    """The path and the SVG of each figure."""
    for name, question in QUESTIONS.items():
        parts = parts_of(question, root / "experiments/compare/results")
        yield root / f"docs/{name}.svg", draw(parts, "RL-PLUS")
