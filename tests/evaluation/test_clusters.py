"""Seeds with two outcomes: what counts as two groups, and by how much intervals miss them."""

import random
from itertools import combinations
from statistics import fmean, pvariance

import numpy as np
import pytest

from rlplus.train.evaluation.clusters import FEW_SEEDS, misleading, two_groups, unseen
from rlplus.train.evaluation.estimates import bootstrap


def best_division(values: list[float]) -> tuple[list[float], list[float]]:
    """The two groups with the least variance within, among all divisions, the lower mean first."""

    def within(chosen: tuple[int, ...]) -> float:
        groups = [[v for i, v in enumerate(values) if (i in chosen) == side] for side in (True, False)]
        return sum(len(group) * pvariance(group) for group in groups)

    places = range(len(values))
    chosen = min((c for n in range(1, len(values)) for c in combinations(places, n)), key=within)
    groups = [sorted(v for i, v in enumerate(values) if (i in chosen) == side) for side in (True, False)]
    first, second = sorted(groups, key=fmean)
    return first, second


@pytest.mark.parametrize("seed", range(40))
def test_the_groups_are_the_best_division_where_it_explains_nine_tenths_and_they_are_ten_points_apart(
    seed: int,
) -> None:
    draw = random.Random(seed)
    values = [draw.choice((0.3, 0.7)) + draw.gauss(0, 0.05) for _ in range(draw.randint(2, 7))]
    low, high = best_division(values)
    left = len(low) * pvariance(low) + len(high) * pvariance(high)
    apart = left <= 0.1 * len(values) * pvariance(values) and min(high) - max(low) >= 0.1
    assert two_groups(values) == ((low, high) if apart else None)


def test_the_seeds_of_the_study_that_find_a_skill_or_not_are_two_groups_and_a_spread_is_none() -> None:
    assert two_groups([0.78, 0.28, 0.38, 0.36, 0.28]) == ([0.28, 0.28, 0.36, 0.38], [0.78])
    assert two_groups([0.50, 0.59, 0.54, 0.65, 0.96, 0.80, 0.66, 0.86, 0.88, 0.66]) is None
    assert two_groups([0.5, 0.55]) is None, "five points"
    assert two_groups([0.5]) is None
    assert two_groups([0.5] * 4) is None


def test_many_seeds_of_two_outcomes_do_not_mislead() -> None:
    seeds = [0.2] * 4 + [0.8] * (FEW_SEEDS - 4)
    assert two_groups(seeds) is not None
    assert not misleading(seeds)
    assert misleading(seeds[1:])


@pytest.mark.parametrize(("seeds", "covered"), [(3, 0.488), (5, 0.672)])
def test_an_interval_over_a_few_seeds_misses_the_mean_when_none_of_them_collapsed(seeds: int, covered: float) -> None:
    """One in five seeds has .2 in place of .8; 1 - .8^seeds of the trials have one that does."""
    draw, trials = np.random.default_rng(seeds), 200

    def values() -> np.ndarray:
        return draw.binomial(32, 0.2 if draw.random() < 0.2 else 0.8, 100) / 32

    estimates = [bootstrap([values() for _ in range(seeds)]) for _ in range(trials)]
    share = fmean(one.low <= 0.68 <= one.high for one in estimates)
    assert abs(share - covered) < 4 * (covered * (1 - covered) / trials) ** 0.5


@pytest.mark.parametrize("seeds", [2, 5, 10])
def test_the_sentence_has_the_share_that_all_seeds_miss_with_five_percent(seeds: int) -> None:
    share = float(unseen(seeds).split()[3].rstrip("%")) / 100
    assert (1 - share - 0.005) ** seeds < 0.05 < (1 - share + 0.005) ** seeds
