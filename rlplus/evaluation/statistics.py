"""pass@k of one problem, means over problems and seeds, and their 95% intervals."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

_REPLICATES = 2000
_TAIL = 0.025  # of a 95% interval, at either end
_INDICES_AT_ONCE = 1 << 22  # bootstrap indices held at a time (32 MB)
_WEIGHTS_KEPT = 1 << 22  # at most so many weights of resampled problems are kept for further means (32 MB)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is right, from c right ones among n.

    1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, eq. 1), in integers and therefore exact until the one
    division. ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"want 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


@dataclass(frozen=True)
class Estimate:
    """A mean with the limits of its 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(seeds: Sequence[Tensor], least: float = 0.0, *, same_problems: bool = False) -> Estimate:
    """95% interval of the mean over seeds of the means over problems; each value is in [least, 1].

    Percentiles over resampled seeds and, within each, resampled problems; with same_problems, where every seed has the
    same ones in the same order, these are resampled once for all seeds. A few seeds, resampled, vary less than seeds
    do: the interval includes that of Student's t over the seeds' means.

    Where all problems are solved, or none is (or no difference is seen), resampling shows no spread. The interval is
    then exact (Clopper and Pearson 1934): n of n problems are like these, so at least a share of 0.025^(1/n) of all
    are, and the others can be anything in [least, 1]. n is the number of problems of one seed, since further seeds add
    no problems.
    """
    if not seeds:
        raise ValueError("want at least one evaluation, got none")
    value = seeds[0][0].item()
    if value in (-1, 0, 1) and all((values == value).all() for values in seeds):
        unlike = 1 - _TAIL ** (1 / min(map(len, seeds)))
        return Estimate(value, value - unlike * (value - least), value + unlike * (1 - value))
    means = (_of_same_problems if same_problems else _of_own_problems)(seeds)
    means = means.clamp(least, 1)  # rounding may put a mean an ulp beyond
    low, high = means.quantile(torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist()
    by_seed = torch.stack([values.mean() for values in seeds])
    mean = by_seed.mean().item()
    spread = 0.0 if len(seeds) == 1 else (by_seed.std() / len(seeds) ** 0.5).item() * _student(len(seeds) - 1)
    return Estimate(mean, max(least, min(low, mean - spread)), min(1.0, max(high, mean + spread)))


@lru_cache
def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, which is sqrt(freedom) tan(x) with x of a density ~ cos(x)^(freedom - 1)."""
    angle = torch.linspace(0, math.pi / 2, 100_001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(angle.cos() ** (freedom - 1), angle)
    after = int(torch.searchsorted(mass, (1 - 2 * _TAIL) * mass[-1]))
    return math.sqrt(freedom) * math.tan(angle[after + 1].item())


def _of_own_problems(seeds: Sequence[Tensor]) -> Tensor:
    """Means (replicates,) over resampled seeds and, in each, resampled problems of its own."""
    sizes = tuple(map(len, seeds))
    if _REPLICATES * sum(sizes) <= _WEIGHTS_KEPT:
        return _weights(sizes) @ torch.cat(list(seeds))
    means = torch.empty(_REPLICATES, len(seeds), dtype=torch.float64)
    for seed, places, problems in _resamples(sizes):
        means[places[:, 0], places[:, 1]] = seeds[seed][problems].mean(1)
    return means.mean(1)


@lru_cache(maxsize=4)  # a report asks for many means over the same problems
def _weights(sizes: tuple[int, ...]) -> Tensor:
    """(replicates, problems of all seeds): the weight of each value in each replicate's mean."""
    first = [0, *accumulate(sizes)]
    weights = torch.zeros(_REPLICATES, first[-1], dtype=torch.float64)
    for seed, places, problems in _resamples(sizes):
        share = torch.tensor(1 / (sizes[seed] * len(sizes)), dtype=torch.float64)
        weights.index_put_((places[:, :1], first[seed] + problems), share, accumulate=True)
    return weights


def _resamples(sizes: tuple[int, ...]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Resamples, by seed: the seed, its places (n, 2) as (replicate, draw), and the problems (n, size) there."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(sizes), (_REPLICATES, len(sizes)), generator=generator)
    for seed, size in enumerate(sizes):
        for places in (chosen == seed).nonzero().split(max(1, _INDICES_AT_ONCE // size)):
            yield seed, places, torch.randint(size, (len(places), size), generator=generator)


def _of_same_problems(seeds: Sequence[Tensor]) -> Tensor:
    """Means (replicates,) over resampled seeds and resampled problems, the same in all seeds."""
    generator = torch.Generator().manual_seed(0)
    values = torch.stack(list(seeds))
    seed_shares, problem_shares = (_shares(size, generator) for size in values.shape)
    return (seed_shares @ values * problem_shares).sum(1)


def _shares(size: int, generator: torch.Generator) -> Tensor:
    """(replicates, size): each item's share of a resample of `size` items."""
    drawn = torch.randint(size, (_REPLICATES, size), generator=generator)
    return torch.zeros(_REPLICATES, size, dtype=torch.float64).scatter_add_(
        1, drawn, torch.full(drawn.shape, 1 / size, dtype=torch.float64)
    )
