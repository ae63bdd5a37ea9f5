"""A cost model of the head on a GPU, by which the sizes of buffers and `memory=None` are chosen.

Everything is a number of operations and bytes. A GEMM takes the longer of its multiplications and its memory traffic,
and a share `exposed` of the shorter: 0 if they overlap entirely, 1/2 if that was not measured. Row kernels take
their traffic, and each launch its latency. `python -m bench --model` prints it.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from rlplus.kernels.tiling import MOST_CHUNKS

TILE = (128, 256)  # the part of a GEMM's result that one processor computes at a time; the vendor may choose another
LAUNCH = 2e-6  # seconds
BLOCK, BETWEEN = 10, 60  # launches for a block of the vocabulary in both of two passes, and between these


class Machine(NamedTuple):
    """Operations and bytes per second, as large GEMMs and copies reach them; processors that share a GEMM's tiles."""

    half: float
    single: float
    bandwidth: float
    processors: int


A100 = Machine(256e12, 18e12, 1.7e12, 108)
H200 = Machine(750e12, 60e12, 4.2e12, 132)


class Shape(NamedTuple):
    """Sizes of a head: tokens, columns of hidden, vocabulary; bytes per element of inputs and accumulators."""

    N: int
    H: int
    V: int
    narrow: int = 2
    wide: int = 4


class Path(NamedTuple):
    """Bytes of a stored logit; whether a kernel reads it for the statistics, or they are in the GEMM's epilogue."""

    stored: int = 4
    read: bool = True


class Launches(NamedTuple):
    """Numbers of launches per chunk of logits and per emptying of the gradient buffer, copies included."""

    chunk: int = 6
    emptying: int = 7


NOW = Launches()
VENDOR, OWN, EXPONENTIALS = Path(), Path(read=False), Path(stored=2, read=False)


def gemm(machine: Machine, shape: Shape, size: tuple[int, int, int], traffic: float, exposed: float) -> float:
    """Seconds of a product of (m, k) and (k, n), size = (m, n, k), that moves that many bytes.

    The last of several rounds of tiles may leave processors idle; 0 processors: ignore that. In less than one round the
    vendor's kernels divide the sums over k.
    """
    m, n, k = size
    area, P = float(m * n), machine.processors
    tiles = ceil(m / TILE[0]) * ceil(n / TILE[1])
    if P and tiles >= P:
        area = ceil(tiles / P) * P * TILE[0] * TILE[1]
    compute = 2 * area * k / (machine.half if shape.narrow == 2 else machine.single)
    memory = traffic / machine.bandwidth
    return max(compute, memory) + exposed * min(compute, memory)


def one_pass(
    machine: Machine,
    shape: Shape,
    rows: int,
    capacity: int,
    *,
    share: float = 1.0,
    exposed: float = 0.5,
    launches: Launches = NOW,
    scaling: int = 0,
    path: Path = VENDOR,
) -> dict[str, float]:
    """Seconds of loss and gradients with memory="fast", by part.

    rows: rows of a chunk of logits; capacity: rows of the gradient buffer; share: rows that have a gradient; scaling:
    bytes moved per element of dweight by the factor of the backward pass; path: the logits' way; our own GEMM is
    taken to multiply as fast as the vendor's.
    """
    N, H, V, narrow, wide = shape
    active = round(share * N)
    chunks, emptyings = _parts(N, rows), _parts(active, capacity)
    count = sum(emptyings.values())
    # The first emptying writes dweight, the others read it too; the only one rounds it as well.
    own = narrow if count < 2 else wide
    first, again = V * H * own, 2 * V * H * wide

    def product(n: int, size: tuple[int, int, int], traffic: float) -> float:
        return gemm(machine, shape, size, traffic + n * V * narrow, exposed)

    weight = V * H * narrow
    dweight = {n: product(n, (V, H, n), again + n * H * narrow) for n in emptyings}
    beginning = max(emptyings, default=0)
    seconds = {
        "logits": sum(
            k * gemm(machine, shape, (n, V, H), weight + n * (V * path.stored + H * narrow), exposed)
            for n, k in chunks.items()
        ),
        "dhidden": sum(k * product(n, (n, H, V), weight + n * H * wide) for n, k in emptyings.items()),
        "dweight": sum(k * dweight[n] for n, k in emptyings.items()),
    }
    if count:
        seconds["dweight"] += product(beginning, (V, H, beginning), first + beginning * H * narrow) - dweight[beginning]
    bytes_moved = {
        "statistics": N * V * path.stored * path.read,
        "gradient": active * V * (path.stored + narrow),
        "rounding": V * H * (wide + narrow) if count > 1 and narrow != wide else 0,
        "scaling": scaling * V * H,
        "rows": active * H * (wide + 5 * narrow),  # hidden's: gathered, rounded, scattered
    }
    seconds |= {part: amount / machine.bandwidth for part, amount in bytes_moved.items()}
    seconds["launches"] = LAUNCH * (launches.chunk * sum(chunks.values()) + launches.emptying * count)
    return seconds


def two_passes(
    machine: Machine, shape: Shape, columns: int, *, share: float = 1.0, exposed: float = 0.5
) -> dict[str, float]:
    """Like `one_pass` with memory="least"; columns: width of a block of the vocabulary."""
    N, H, V, narrow, wide = shape
    active = round(share * N)
    lent = min(1.0, active * wide / (V * narrow)) if narrow != wide else 0.0  # share of the blocks that are done twice
    seconds = dict.fromkeys(("logits", "dhidden", "dweight", "statistics", "gradient", "launches"), 0.0)
    for B, k in _parts(V, columns).items():
        weight, dz = B * H * narrow, active * B * narrow

        def logits(n: int, B: int = B, weight: int = weight) -> float:
            return gemm(machine, shape, (n, B, H), weight + n * (H * narrow + B * wide), exposed)

        seconds["logits"] += k * (logits(N) + (1 + lent) * logits(active))
        seconds["dhidden"] += k * gemm(machine, shape, (active, H, B), dz + weight + 2 * active * H * wide, exposed)
        seconds["dweight"] += k * gemm(machine, shape, (B, H, active), dz + weight + active * H * narrow, exposed)
        seconds["statistics"] += k * N * B * wide / machine.bandwidth
        seconds["gradient"] += k * (1 + lent) * active * B * (wide + narrow) / machine.bandwidth
        seconds["launches"] += k * BLOCK * LAUNCH
    seconds["launches"] += BETWEEN * LAUNCH
    return seconds


@lru_cache(maxsize=4096)
def buffers(machine: Machine, shape: Shape, row: int, gradient_row: int, scratch_bytes: float) -> tuple[int, int]:
    """Rows of a chunk of logits and of the gradient buffer, a whole number of chunks, that cost the least in one pass.

    row, gradient_row: bytes of a row of each. At least one row, however small the scratch.
    """
    rows, chunks = ranked_buffers(machine, shape, row, gradient_row, scratch_bytes)[0]
    return _within(shape.N, rows, chunks)


def ranked_buffers(
    machine: Machine, shape: Shape, row: int, gradient_row: int, scratch_bytes: float
) -> list[tuple[int, int]]:
    """Pairs (rows of a chunk, chunks of the gradient buffer), from the least time on. Ties go to the smaller."""
    found = []
    for k in range(1, MOST_CHUNKS + 1):
        most = whole_tiles(scratch_bytes / (row + k * gradient_row))
        for n in {most, max(most - TILE[0], 1)}:  # fewer rows may leave fewer processors idle
            size = n * (row + k * gradient_row)
            if k == 1 or size <= scratch_bytes:
                seconds = sum(one_pass(machine, shape, *_within(shape.N, n, k)).values())
                found.append((seconds, size, n, k))
    return [(n, k) for *_, n, k in sorted(found)]


def _within(N: int, rows: int, chunks: int) -> tuple[int, int]:
    return min(rows, max(N, 1)), min(rows * chunks, N)


def whole_tiles(size: float) -> int:
    """The size, rounded down to whole tiles of a GEMM if it is at least one; at least 1."""
    tile = TILE[0]
    return max(1, int(size) if size < tile else int(size) // tile * tile)


@lru_cache(maxsize=4096)
def faster_memory(shape: Shape, scratch_bytes: float) -> str:
    """ "fast" or "least": the faster one with this scratch, by the floors on an A100."""
    machine, (N, H, V, narrow, wide) = A100._replace(processors=0), shape
    sizes = buffers(A100, shape, V * wide, V * narrow + H * (2 * narrow + wide), scratch_bytes)
    columns = min(V, whole_tiles(scratch_bytes / ((wide + narrow) * max(N, 1))))
    one, two = one_pass(machine, shape, *sizes, exposed=0.0), two_passes(machine, shape, columns, exposed=0.0)
    return "least" if sum(two.values()) < sum(one.values()) else "fast"


def _parts(total: int, size: int) -> dict[int, int]:
    """Number of pieces per size, if a total is cut into pieces of one size and a rest."""
    whole, rest = divmod(total, max(size, 1))
    return {n: k for n, k in ((size, whole), (rest, 1)) if n and k}
