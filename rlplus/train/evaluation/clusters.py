"""Whether the results of few seeds fall into two groups, as where a run finds a skill or does not.

Intervals over few such seeds are too narrow, and differences seem clear that are not: decision 049, docs/comparing.md.
"""

from collections.abc import Sequence
from statistics import fmean

FEW_SEEDS = 20  # two outcomes mislead below it
LEAST_GAP = 0.1  # the gap of the groups
MOST_WITHIN = 0.1  # share of the sum of squares that the groups leave


def two_groups(values: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """The lower and the higher values, if they are two groups; None otherwise.

    The best division (the least sum of squares about the groups' means) leaves at most MOST_WITHIN of the sum of
    squares about the mean of all, and its groups are at least LEAST_GAP apart.
    """
    ordered = sorted(values)
    divisions = [(ordered[:i], ordered[i:]) for i in range(1, len(ordered))]
    if not divisions:
        return None
    low, high = min(divisions, key=lambda groups: sum(map(_squares, groups)))
    apart = high[0] - low[-1] >= LEAST_GAP and _squares(low) + _squares(high) <= MOST_WITHIN * _squares(ordered)
    return (low, high) if apart else None


def unseen(seeds: int) -> str:
    """A sentence on the outcomes that so many seeds may have missed."""
    share = 1 - 0.05 ** (1 / seeds)
    return f"An outcome that {share:.0%} of all seeds have is missing among {seeds} with probability 5%."


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def misleading(seeds: Sequence[float]) -> bool:
    """Whether these are the means of few seeds in two groups."""
    return len(seeds) < FEW_SEEDS and two_groups(seeds) is not None


def note_of(names: Sequence[str], seeds: int) -> str:
    """A sentence for readers of intervals over so many seeds, of which these methods' fall into two groups."""
    return (
        f"Two outcomes: the {seeds} seeds of {', '.join(names)} fall into two groups. With fewer than {FEW_SEEDS} "
        "seeds the intervals of such means are too narrow, and a method whose seeds agree may have an outcome that "
        "none of them shows: no difference is bold where this is so. Read the seeds."
    )
