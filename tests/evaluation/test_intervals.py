"""pass@k against enumeration; intervals: their coverage, and where they are exact; pairs of seeds."""

import itertools
import random
from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch
from counted_evaluations import evaluation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlplus.train.evaluation.estimates import Estimate, _draw, _of_own_problems, bootstrap, pass_at_k
from rlplus.train.evaluation.results import paired_difference, pooled_pass_at, seeds_below


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
        assert pass_at_k(n, c, k) == float(share)


def test_pass_at_k_with_many_samples() -> None:
    # 1 - prod_{i=n-c+1}^{n} (1 - k/i), in fractions
    for n, c, k in [(1024, 1, 1), (1024, 1, 512), (2000, 3, 1), (2000, 1999, 2), (4096, 700, 64)]:
        product = Fraction(1)
        for i in range(n - c + 1, n + 1):
            product *= 1 - Fraction(k, i)
        assert pass_at_k(n, c, k) == float(1 - product)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_mean_is_the_mean_over_problems_and_the_interval_is_reproducible() -> None:
    one = evaluation([0, 2, 8, 5])
    estimate = one.pass_at(4)
    assert estimate.mean == pytest.approx(sum(pass_at_k(8, c, 4) for c in (0, 2, 8, 5)) / 4, abs=1e-15)
    assert estimate.low < estimate.mean < estimate.high
    assert one.pass_at(4) == estimate


def binomial_tail(problems: int, least: int, share: Fraction) -> Fraction:
    """Probability of at least `least` successes in `problems` trials."""
    terms = (comb(problems, c) * share**c * (1 - share) ** (problems - c) for c in range(least, problems + 1))
    return sum(terms, Fraction(0))


@pytest.mark.parametrize("problems", [1, 5, 30])
def test_all_or_none_solved_has_the_exact_binomial_interval(problems: int) -> None:
    solved, unsolved = evaluation([8] * problems), evaluation([0] * problems)
    for k in (1, 4):
        low, high = solved.pass_at(k).low, unsolved.pass_at(k).high
        assert (solved.pass_at(k), unsolved.pass_at(k)) == (Estimate(1.0, low, 1.0), Estimate(0.0, 0.0, high))
        # The limit is where the tail that was seen has a probability of 2.5%.
        assert float(binomial_tail(problems, problems, Fraction(low))) == pytest.approx(0.025, rel=1e-12)
        assert float(1 - binomial_tail(problems, 1, Fraction(high))) == pytest.approx(0.025, rel=1e-12)
    assert pooled_pass_at([solved] * 3, 1) == solved.pass_at(1)  # more seeds are not more problems
    up = paired_difference([unsolved], [solved], 1)  # differences are -1 to 1: twice as wide
    assert (up.mean, up.high) == (1.0, 1.0)
    assert up.low == pytest.approx(1 - 2 * (1 - solved.pass_at(1).low), abs=1e-15)
    assert paired_difference([solved], [solved], 1).low == -paired_difference([solved], [solved], 1).high < 0


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=6), min_size=1, max_size=3), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_the_mean_is_within_the_interval_and_the_interval_within_the_possible(correct: list[list[int]], k: int) -> None:
    seeds = [evaluation(each) for each in correct]
    estimate = pooled_pass_at(seeds, k)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    other = paired_difference(seeds, [evaluation([8 - c for c in each]) for each in correct], k)
    assert -1 <= other.low <= other.mean <= other.high <= 1


@pytest.mark.parametrize("at_once", [1, 7, 640, 10**6])
def test_intervals_do_not_depend_on_the_indices_held_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """The bootstrap goes in parts above 2,097 problems, and keeps no weights; here also below."""
    seeds = [evaluation([0, 1, 5]), evaluation([8, 2, 4, 1, 7])]
    whole, values = pooled_pass_at(seeds, 4), [seed.values(4) for seed in seeds]
    means = _of_own_problems(values)  # two seeds have Student's t limits
    monkeypatch.setattr("rlplus.train.evaluation.estimates._INDICES_AT_ONCE", at_once)
    monkeypatch.setattr("rlplus.train.evaluation.estimates._WEIGHTS_KEPT", 0)
    apart = pooled_pass_at(seeds, 4)
    assert (apart.low, apart.high) == pytest.approx((whole.low, whole.high), abs=1e-15)
    assert apart.mean == whole.mean
    assert np.allclose(_of_own_problems(values), means, rtol=0, atol=1e-15)


def test_interval_of_more_problems_than_the_bootstrap_holds_at_once() -> None:
    one = evaluation([0, 8] * 1500)
    estimate = one.pass_at(1)
    error = 1.96 * 0.5 / 3000**0.5
    assert estimate.low == pytest.approx(0.5 - error, abs=0.1 * error)
    assert estimate.high == pytest.approx(0.5 + error, abs=0.1 * error)


@pytest.mark.parametrize("same_problems", [True, False])
def test_limits_are_those_of_all_resamples(same_problems: bool) -> None:
    """Three seeds of one mean, hence no spread of Student's t; every resample of seeds and of problems is enumerated.

    A seed's problems are drawn whatever seeds are drawn: once for all seeds, or in each place of each replicate.
    """
    values = torch.tensor([[0.0, 0.1, 1.0], [1.0, 0.0, 0.1], [0.1, 1.0, 0.0]], dtype=torch.float64)
    draws = torch.tensor([*itertools.product(range(3), repeat=3)])
    if same_problems:
        means = values[draws[:, None, :, None], draws[None, :, None, :]].mean((2, 3)).flatten()
    else:  # one seed's mean has one distribution in each of the three places, since the seeds' values are alike
        own = values[0][draws].mean(1)
        means = (own[:, None, None] + own[:, None] + own).flatten() / 3
    estimate = bootstrap(list(values.numpy()), same_problems=same_problems)
    ranks = [
        ((means < limit - 1e-9).double().mean(), (means <= limit + 1e-9).double().mean())
        for limit in (estimate.low, estimate.high)
    ]
    error = 4 * (0.025 * 0.975 / 2000) ** 0.5  # four standard errors of a share of 2,000 replicates
    for (below, upto), share in zip(ranks, (0.025, 0.975), strict=True):
        assert below - error <= share <= upto + error


def test_resamples_are_those_of_torch() -> None:
    """Intervals computed with torch, as by rlplus 0.2.0, are the same."""
    ours, theirs = np.random.RandomState(0), torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 30, 1000, 3000):
        assert np.array_equal(_draw(size, (3, size), ours), torch.randint(size, (3, size), generator=theirs))


def test_coverage_of_three_seeds_that_differ_widely() -> None:
    """Seeds spread four times the standard error over problems: resampled seeds alone cover the truth in about 77%."""
    generator = torch.Generator().manual_seed(5)
    trials, inside = 200, 0
    for _ in range(trials):
        levels = 0.5 + 0.2 * torch.randn(3, generator=generator, dtype=torch.float64)
        estimate = pooled_pass_at([evaluation(share(25, level, generator), n=1) for level in levels], 1)
        inside += estimate.low <= 0.5 <= estimate.high
    assert 0.90 <= inside / trials <= 0.985


def share(problems: int, level: Tensor, generator: torch.Generator) -> tuple[int, ...]:
    """One sample of each problem, right with probability `level`."""
    return tuple(int(draw < level) for draw in torch.rand(problems, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.7062), (3, 4.30265), (5, 2.77645), (10, 2.26216)])
def test_the_interval_over_seeds_is_at_least_that_of_students_t(seeds: int, quantile: float) -> None:
    """Quantiles from a printed table; every problem of a seed has the same value, so only seeds vary."""
    runs = [evaluation([50 + seed % 2] * 4, n=100) for seed in range(seeds)]
    values = torch.tensor([run.pass_at(1).mean for run in runs], dtype=torch.float64)
    estimate, half = pooled_pass_at(runs, 1), quantile * (values.std() / seeds**0.5).item()
    assert (estimate.low, estimate.high) == pytest.approx((estimate.mean - half, estimate.mean + half), abs=2e-4 * half)
    assert pooled_pass_at([evaluation([1] * 4), evaluation([7] * 4)], 1) == Estimate(0.5, 0.0, 1.0)  # not beyond


def test_pooled_mean_weighs_seeds_equally_and_one_seed_is_the_plain_interval() -> None:
    one, two = evaluation([8, 8, 8, 0]), evaluation([0, 0])
    assert pooled_pass_at([one, two], 1).mean == pytest.approx((0.75 + 0.0) / 2)
    assert pooled_pass_at([one], 1) == one.pass_at(1)
    with pytest.raises(ValueError, match="at least one"):
        pooled_pass_at([], 1)


def test_paired_difference_uses_the_pairing() -> None:
    generator = random.Random(2)
    base = [generator.randint(0, 7) for _ in range(50)]
    first, second = evaluation(base), evaluation([c + 1 for c in base])
    difference = paired_difference([first], [second], 1)
    assert difference.mean == pytest.approx(1 / 8)
    assert (difference.low, difference.high) == pytest.approx((1 / 8, 1 / 8))
    assert paired_difference([second], [first], 1).mean == pytest.approx(-1 / 8)


def test_paired_difference_refuses_other_problems() -> None:
    first, second = evaluation([1, 2]), evaluation([1, 2], problems=(0, 7), name="other")
    with pytest.raises(ValueError, match=r"same problems.*'other'"):
        paired_difference([first], [second], 1)
    with pytest.raises(ValueError, match="2 and 1"):
        paired_difference([first, first], [first], 1)


def test_seeds_below_counts_the_seeds_on_which_less_is_solved() -> None:
    base = [evaluation([8, 2, 0]), evaluation([1, 1, 1]), evaluation([0, 4, 4])]
    other = [evaluation([7, 0, 0]), evaluation([8, 0, 0]), evaluation([4, 0, 8])]
    assert [seeds_below(base, other, k) for k in (1, 8)] == [1, 2]
    for permuted in itertools.permutations([1, 2, 3, 4]):  # whose sums in floats differ
        assert seeds_below([evaluation([1, 2, 3, 4])], [evaluation(permuted)], 3) == 0
    with pytest.raises(ValueError, match="3 and 2"):
        seeds_below(base, other[:2], 1)
