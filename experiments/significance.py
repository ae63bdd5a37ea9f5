"""Which differences of a comparison on the toy task are more than chance: `python -m experiments.significance RESULTS`.

For each setting the methods' mean pass@1, the share of seeds that find the skill, and the difference from the reference
with a permutation test over the seeds, corrected by Holm for all differences of the study. Pass@1 is over all problems,
or, with --set, over those of a test set.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import comb
from pathlib import Path

import numpy as np

from rlplus.tools.compare.config import BASE, Study
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.report.tables import percent
from rlplus.train.evaluation.results import Evaluation

TRAINED = "trained"  # the test set of problems like those trained on; every second one is hard
FOUND = 0.5  # a run whose pass@1 on its hard problems is at least this has found the skill
LEVEL = 0.05  # a difference whose corrected p is below it is significant
TAIL = 0.025  # probability at either end of an interval
MOST_SEEDS = 20  # all patterns of their signs are counted


@dataclass(frozen=True)
class Row:
    """A method in a setting, over the seeds. pass_at_1 and found: shares. p: by Holm; None where not tested."""

    setting: str
    method: str
    pass_at_1: float
    found: float
    difference: float
    p: float | None


def rows_of(results: Results, title: str, only: str | None = None) -> list[Row]:
    """The methods of a study in each setting, after the base. only: a test set; None = all problems.

    ValueError if a method has not finished on all seeds, or without such a test set.
    """
    study = results.comparison.studies[title]
    rows: list[Row] = []
    raw: list[float | None] = []
    for setting in study.settings:
        runs = {method: _finished(results, study, setting, method) for method in dict.fromkeys((BASE, *study.methods))}
        against = np.array([right_samples(one, only) for one in runs[study.compared_with]])
        for method, outcomes in runs.items():
            right = np.array([right_samples(one, only) for one in outcomes])
            samples = sum(sum(one.n) for one in counted(outcomes[0], only))
            found = float(np.mean([finds_the_skill(one) for one in outcomes]))
            mean, difference = right.mean() / samples, (right - against).mean() / samples
            rows.append(Row(setting, method, mean, found, difference, None))
            raw.append(None if method in (BASE, study.compared_with) else permutation_p(right - against))
    corrected = iter(holm([p for p in raw if p is not None]))
    return [row if p is None else replace(row, p=next(corrected)) for row, p in zip(rows, raw, strict=True)]


def _finished(results: Results, study: Study, setting: str, method: str) -> list[Outcome]:
    """The method's runs, one per seed of the study."""
    outcomes = results.of(setting, method, study.seed_numbers)
    if missing := [seed for seed in study.seed_numbers if seed not in outcomes]:
        raise ValueError(f"want all seeds of {method} in {setting}; there are none of {missing}")
    return [outcomes[seed] for seed in study.seed_numbers]


def counted(outcome: Outcome, only: str | None = None) -> list[Evaluation]:
    """The evaluation on a test set, or on all."""
    if only is None:
        return [*outcome.results.values()]
    if only not in outcome.results:
        raise ValueError(f"want one of the test sets {', '.join(outcome.results)}; got {only}")
    return [outcome.results[only]]


def right_samples(outcome: Outcome, only: str | None = None) -> int:
    """The number of right samples on a test set, or on all."""
    return sum(sum(one.correct) for one in counted(outcome, only))


def finds_the_skill(outcome: Outcome) -> bool:
    """Whether the run solves the hard problems that are like those trained on, in `trained` or the only test set."""
    trained = outcome.results[TRAINED] if len(outcome.results) > 1 else next(iter(outcome.results.values()))
    return sum(trained.correct[1::2]) >= FOUND * sum(trained.n[1::2])


def exact_interval(found: int, runs: int) -> tuple[float, float]:
    """The exact 95 % interval of a probability, from so many successes (Clopper and Pearson 1934)."""
    if not 0 <= found <= runs or not runs:
        raise ValueError(f"want 0 <= found <= runs, and a run; got {found} of {runs}")
    low = 0.0 if found == 0 else _bisected(lambda p: _at_least(found, runs, p) < TAIL)
    high = 1.0 if found == runs else _bisected(lambda p: 1 - _at_least(found + 1, runs, p) > TAIL)
    return low, high


def _at_least(found: int, runs: int, p: float) -> float:
    """The probability of at least so many successes."""
    return sum(comb(runs, i) * p**i * (1 - p) ** (runs - i) for i in range(found, runs + 1))


def _bisected(below: Callable[[float], bool]) -> float:
    """Where a condition on [0, 1] that holds at first ceases to hold."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


def permutation_p(differences: Sequence[int] | np.ndarray) -> float:
    """Two-sided p of paired differences, (seeds,): the share of all patterns of signs whose sum is as far from 0."""
    if len(differences) > MOST_SEEDS:
        raise ValueError(f"want at most {MOST_SEEDS} seeds; got {len(differences)}")
    sums = np.zeros(1, dtype=np.int64)
    for each in differences:
        sums = np.concatenate((sums + each, sums - each))
    return float(np.mean(np.abs(sums) >= abs(int(np.sum(differences)))))


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for their number, in the given order (Holm 1979, the step-down method)."""
    order = np.argsort(p, kind="stable")
    scaled = accumulate(((len(p) - place) * p[i] for place, i in enumerate(order)), max)
    corrected = dict(zip(order.tolist(), scaled, strict=True))
    return [min(1.0, corrected[i]) for i in range(len(p))]


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of a Markdown table, in percent and points."""
    lines = ["| setting | method | pass@1 | finds the skill | difference | p |", "|---|---|---|---|---|---|"]
    for row in rows:
        p = "" if row.p is None else f"{row.p:.4f}"
        numbers = (percent(row.pass_at_1), f"{100 * row.found:.0f} %", percent(row.difference, "+"))
        cells = (row.setting, row.method, *numbers, p)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table of each study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of `rlplus compare`")
    parser.add_argument("--set", metavar="NAME", help="a test set, such as subtraction; without, all problems")
    args = parser.parse_args()
    results = Results.load(args.results)
    for title, study in results.comparison.studies.items():
        print(f"{title}, compared with {study.compared_with}, {study.seeds} seeds, {args.set or 'all problems'}:\n")
        print("\n".join(table(rows_of(results, title, args.set))))


if __name__ == "__main__":
    main()
