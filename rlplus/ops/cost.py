"""What the head should cost on a GPU, by arithmetic: the sizes of buffers and `memory=None` are chosen by it.

Everything is a number of operations and bytes. A GEMM takes the longer of its multiplications and its memory traffic,
and a share `exposed` of the shorter: 0 if one hides behind the other, 1/2 where nobody has measured. Row kernels take
their traffic, and each launch its latency. `python -m bench --model` prints it.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from rlplus.kernels.tiling import MOST_CHUNKS

TILE = (128, 256)  # of a GEMM's result, what a processor works on at a time; the vendor may choose another
LAUNCH = 2e-6  # seconds
BLOCK, BETWEEN = 10, 60  # launches for a block of the vocabulary in both of two passes, and between these


class Machine(NamedTuple):
    """Operations and bytes a second, as large GEMMs and copies reach them; processors that share out a GEMM's tiles."""

    half: float
    single: float
    bandwidth: float
    processors: int


A100 = Machine(256e12, 18e12, 1.7e12, 108)
H200 = Machine(750e12, 60e12, 4.2e12, 132)


class Shape(NamedTuple):
    """Of a head: tokens, columns of hidden, vocabulary; bytes of an input and of an accumulator."""

    N: int
    H: int
    V: int
    narrow: int = 2
    wide: int = 4


class Launches(NamedTuple):
    """What is launched for a chunk of logits and for an emptying of the gradient buffer; copies count."""

    chunk: int = 6
    emptying: int = 7


NOW = Launches()


def gemm(machine: Machine, shape: Shape, size: tuple[int, int, int], traffic: float, exposed: float) -> float:
    """Seconds of a product of (m, k) and (k, n), size = (m, n, k), that moves so many bytes.

    The last of several rounds of tiles may leave processors idle; with 0 processors that does not count. Of less than
    a round the vendor shares out the sums over k.
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
) -> dict[str, float]:
    """Seconds of loss and gradients with memory="fast", by part.

    rows: of a chunk of logits; capacity: of the gradient buffer; share: of the rows, those with a gradient; scaling:
    bytes moved for an element of dweight by the factor of the backward pass.
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
            k * gemm(machine, shape, (n, V, H), weight + n * (V * wide + H * narrow), exposed)
            for n, k in chunks.items()
        ),
        "dhidden": sum(k * product(n, (n, H, V), weight + n * H * wide) for n, k in emptyings.items()),
        "dweight": sum(k * dweight[n] for n, k in emptyings.items()),
    }
    if count:
        seconds["dweight"] += product(beginning, (V, H, beginning), first + beginning * H * narrow) - dweight[beginning]
    bytes_moved = {
        "statistics": N * V * wide,
        "gradient": active * V * (wide + narrow),
        "rounding": V * H * (wide + narrow) if count > 1 and narrow != wide else 0,
        "scaling": scaling * V * H,
        "rows": active * H * (wide + 5 * narrow),  # of hidden: gathered, rounded, put in their places
    }
    seconds |= {part: amount / machine.bandwidth for part, amount in bytes_moved.items()}
    seconds["launches"] = LAUNCH * (launches.chunk * sum(chunks.values()) + launches.emptying * count)
    return seconds


def two_passes(
    machine: Machine, shape: Shape, columns: int, *, share: float = 1.0, exposed: float = 0.5
) -> dict[str, float]:
    """The same with memory="least"; columns: of a block of the vocabulary."""
    N, H, V, narrow, wide = shape
    active = round(share * N)
    lent = min(1.0, active * wide / (V * narrow)) if narrow != wide else 0.0  # of the blocks, those done twice
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

    row, gradient_row: bytes of a row of each. At least one row, however little the scratch.
    """
    rows, chunks = ranked_buffers(machine, shape, row, gradient_row, scratch_bytes)[0]
    return _within(shape.N, rows, chunks)


def ranked_buffers(
    machine: Machine, shape: Shape, row: int, gradient_row: int, scratch_bytes: float
) -> list[tuple[int, int]]:
    """Rows of a chunk, and chunks of the gradient buffer, what costs the least first; of equals the smaller."""
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
    """At least 1; what a GEMM handles together, where it is that much."""
    tile = TILE[0]
    return max(1, int(size) if size < tile else int(size) // tile * tile)


@lru_cache(maxsize=4096)
def faster_memory(shape: Shape, scratch_bytes: float) -> str:
    """ "fast" or "least": what takes less time with so much scratch, by the floors on an A100."""
    machine, (N, H, V, narrow, wide) = A100._replace(processors=0), shape
    sizes = buffers(A100, shape, V * wide, V * narrow + H * (2 * narrow + wide), scratch_bytes)
    columns = min(V, whole_tiles(scratch_bytes / ((wide + narrow) * max(N, 1))))
    one, two = one_pass(machine, shape, *sizes, exposed=0.0), two_passes(machine, shape, columns, exposed=0.0)
    return "least" if sum(two.values()) < sum(one.values()) else "fast"


def _parts(total: int, size: int) -> dict[int, int]:
    """How often each size occurs where a total is cut into pieces of one size and a rest."""
    whole, rest = divmod(total, max(size, 1))
    return {n: k for n, k in ((size, whole), (rest, 1)) if n and k}
