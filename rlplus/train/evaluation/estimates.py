"""pass@k of one problem, means over problems and seeds, and their 95% intervals."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.uint32]

_REPLICATES = 2000
_TAIL = 0.025  # probability at either end of a 95% interval
_INDICES_AT_ONCE = 1 << 22  # bootstrap indices held at a time (16 MB)
_WEIGHTS_KEPT = 1 << 22  # weights of resampled problems kept at most, for further means (32 MB)


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


def bootstrap(seeds: Sequence[Array], least: float = 0.0, *, same_problems: bool = False) -> Estimate:
    """95% interval of the mean over seeds of the means over problems; each value is in [least, 1].

    Percentiles over resampled seeds and, within each, resampled problems; with same_problems, where every seed has the
    same ones in the same order, these are resampled once for all seeds. A few seeds, resampled, vary less than seeds
    do: the interval includes Student's t interval over the seeds' means.

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
    means = means.clip(least, 1)  # rounding may put a mean an ulp beyond
    low, high = np.quantile(means, [_TAIL, 1 - _TAIL]).tolist()
    by_seed = np.array([values.mean() for values in seeds])
    mean = by_seed.mean().item()
    spread = 0.0 if len(seeds) == 1 else by_seed.std(ddof=1).item() / len(seeds) ** 0.5 * _student(len(seeds) - 1)
    return Estimate(mean, max(least, min(low, mean - spread)), min(1.0, max(high, mean + spread)))


@lru_cache
def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, which is sqrt(freedom) tan(x) with x of a density ~ cos(x)^(freedom - 1)."""
    angle = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.cumsum(density[1:] + density[:-1])  # trapezoids
    after = np.searchsorted(mass, (1 - 2 * _TAIL) * mass[-1])
    return math.sqrt(freedom) * math.tan(angle[after + 1].item())


def _of_own_problems(seeds: Sequence[Array]) -> Array:
    """Means (replicates,) over resampled seeds and, in each, resampled problems of its own."""
    sizes = tuple(map(len, seeds))
    if _REPLICATES * sum(sizes) <= _WEIGHTS_KEPT:
        return _weights(sizes) @ np.concatenate(seeds)
    means = np.empty((_REPLICATES, len(seeds)))
    for seed, places, problems in _resamples(sizes):
        means[places[:, 0], places[:, 1]] = seeds[seed][problems].mean(1)
    averages: Array = means.mean(1)
    return averages


@lru_cache(maxsize=4)  # a report asks for many means over the same problems
def _weights(sizes: tuple[int, ...]) -> Array:
    """(replicates, problems of all seeds): the weight of each value in each replicate's mean."""
    first = [0, *accumulate(sizes)]
    weights = np.zeros(_REPLICATES * first[-1])
    for seed, places, problems in _resamples(sizes):
        chosen = places[:, :1] * first[-1] + first[seed] + problems
        np.add.at(weights, chosen.ravel(), 1 / (sizes[seed] * len(sizes)))  # one that is drawn twice counts twice
    return weights.reshape(_REPLICATES, -1)


def _resamples(sizes: tuple[int, ...]) -> Iterator[tuple[int, NDArray[np.intp], Indices]]:
    """Resamples, by seed: the seed, its places (n, 2) as (replicate, draw), and the problems (n, size) there."""
    generator = np.random.RandomState(0)
    chosen = _draw(len(sizes), (_REPLICATES, len(sizes)), generator)
    for seed, size in enumerate(sizes):
        places = np.argwhere(chosen == seed)
        most = max(1, _INDICES_AT_ONCE // size)
        for part in (places[start : start + most] for start in range(0, len(places), most)):
            yield seed, part, _draw(size, (len(part), size), generator)


def _of_same_problems(seeds: Sequence[Array]) -> Array:
    """Means (replicates,) over resampled seeds and resampled problems, the same in all seeds."""
    generator = np.random.RandomState(0)
    values = np.stack(seeds)
    seed_shares = _shares(len(seeds), generator)
    problem_shares = _shares(values.shape[1], generator)
    means: Array = (seed_shares @ values * problem_shares).sum(1)
    return means


def _shares(size: int, generator: np.random.RandomState) -> Array:
    """(replicates, size): each item's share of a resample of `size` items."""
    drawn = np.arange(_REPLICATES)[:, None] * size + _draw(size, (_REPLICATES, size), generator)
    return np.bincount(drawn.ravel(), minlength=_REPLICATES * size).reshape(_REPLICATES, size) / size


def _draw(size: int, shape: tuple[int, int], generator: np.random.RandomState) -> Indices:
    """Integers below `size`, as torch.randint draws them with the same seed: torch's generator is MT19937, too."""
    return generator.randint(0, 1 << 32, shape, dtype=np.uint32) % np.uint32(size)
