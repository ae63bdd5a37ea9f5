"""A cost model of the head on a GPU, by which the rows of a chunk are chosen.

Everything is a number of operations and bytes. A GEMM takes the longer of its multiplications and its memory traffic,
and a share `exposed` of the shorter: 0 if they overlap entirely, 1/2 if that was not measured. Our first GEMM takes
OWN_GEMM times as long, and then its epilogue, whose instructions nothing hides. Row kernels take their traffic, and
each launch its latency. `python -m bench --model` prints it.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

TILE = (128, 256)  # the part of a GEMM's result that one processor computes at a time; the vendor may choose another
LAUNCH = 2e-6  # seconds
CHUNK = 22  # launches for a chunk, copies and the repair of rows included
# An assumption. An H200 took, epilogue and stores included, 1.03 to 1.04 alone (decision 006), and 1.24 within a
# profiled call, which is not at the limit of power (decision 008). With settled clocks only whole calls were timed.
OWN_GEMM = 1.1


class Machine(NamedTuple):
    """Operations and bytes per second, as large GEMMs and copies reach them; processors that share a GEMM's tiles;
    instructions of single threads per second; instructions of our first GEMM's epilogue per logit, by SASS."""

    half: float
    single: float
    bandwidth: float
    processors: int
    instructions: float
    epilogue: float


A100 = Machine(256e12, 18e12, 1.7e12, 108, 108 * 128 * 1.41e9, 9.3)
H200 = Machine(750e12, 60e12, 4.2e12, 132, 132 * 128 * 1.7e9, 6.7)


class Shape(NamedTuple):
    """Sizes of a head: tokens, columns of hidden, vocabulary; bytes per element of inputs and accumulators."""

    N: int
    H: int
    V: int
    narrow: int = 2
    wide: int = 4


class Path(NamedTuple):
    """A way from hidden states to what the backward GEMMs read: whose first GEMM, the bytes per logit that it writes,
    and those that kernels between the GEMMs move."""

    ours: bool
    stored: int
    passes: int


OWN = Path(True, 2, 0)  # exponentials
VENDOR = Path(False, 4, 4 + 2)  # fp32 logits, read once to write exponentials
TWICE = Path(False, 4, 4 + 4 + 2)  # fp32 logits, read for the statistics and for the gradient
TWICE_FP32 = Path(False, 4, 4 + 4 + 4)
BONUS = 4  # bytes per exponential for the gradient of an entropy, in place


def gemm(machine: Machine, shape: Shape, size: tuple[int, int, int], traffic: float, exposed: float) -> float:
    """Seconds of a product of (m, k) and (k, n), size = (m, n, k), that moves that many bytes.

    The last of several rounds of tiles may leave processors idle; 0 processors: ignore that. In less than one round the
    vendor's kernels divide the sums over k.
    """
    m, n, k = size
    area = float(m * n)
    P = machine.processors
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
    *,
    path: Path = OWN,
    share: float = 1.0,
    exposed: float = 0.5,
    scaling: int = 0,
    bonus: bool = False,
) -> dict[str, float]:
    """Seconds of loss and gradients, by part.

    rows: rows of a chunk; share: of the rows, those with a gradient, the others take the first GEMM alone, the vendor's
    with a reading of its logits; scaling: bytes moved per element of dweight by the factor of the backward pass; bonus:
    a gradient of the entropy in every row.
    """
    N, H, V, narrow, wide = shape
    active = round(share * N)
    chunks = _parts(active, rows)
    count = sum(chunks.values())
    weight = V * H * narrow

    def product(size: tuple[int, int, int], traffic: float) -> float:
        return gemm(machine, shape, size, traffic, exposed)

    def first(n: int, stored: int) -> float:
        seconds = product((n, V, H), weight + n * (V * stored + H * narrow))
        return OWN_GEMM * seconds if path.ours else seconds

    # The first chunk writes dweight, the others read it too; the only one rounds it as well.
    begins = V * H * (narrow if count < 2 else wide)
    grows = 2 * V * H * wide

    def dweight(n: int, traffic: float) -> float:
        return product((V, H, n), traffic + n * (V + H) * narrow)

    silent = 0 if path.ours else path.stored
    target_elements = 2 * (narrow + wide) if path in (OWN, VENDOR) else 0
    seconds = {
        "logits": sum(k * first(n, path.stored) for n, k in chunks.items())
        + sum(k * first(n, silent) for n, k in _parts(N - active, rows).items()),
        "epilogue": N * V * machine.epilogue / machine.instructions if path.ours else 0.0,
        "dhidden": sum(k * product((n, H, V), weight + n * (V * narrow + H * wide)) for n, k in chunks.items()),
        "dweight": sum(k * dweight(n, grows) for n, k in chunks.items()),
    }
    if count:
        largest = max(chunks)
        seconds["dweight"] += dweight(largest, begins) - dweight(largest, grows)
    bytes_moved = {
        "passes": active * V * (path.passes + BONUS * bonus) + (N - active) * V * silent,
        "rounding": V * H * (wide + narrow) if count > 1 and narrow != wide else 0,
        "scaling": scaling * V * H,
        # Scaled, rounded, scattered; targets' elements, where exponentials are kept; targets' logits.
        "rows": active * H * (wide + 5 * narrow + target_elements) + N * H * 2 * narrow,
    }
    seconds |= {part: amount / machine.bandwidth for part, amount in bytes_moved.items()}
    seconds["launches"] = LAUNCH * CHUNK * (count + sum(_parts(N - active, rows).values()))
    return seconds


@lru_cache(maxsize=4096)
def rows_of_chunk(machine: Machine, shape: Shape, row: int, scratch_bytes: float, path: Path) -> int:
    """Rows of a chunk that cost the least in one pass, the smaller of equals; row: bytes of one. At least one, however
    small the scratch. Fewer than fit may leave fewer processors idle."""
    most = min(whole_tiles(scratch_bytes / max(row, 1)), max(shape.N, 1))
    found = {most, *range(max(TILE[0], most // 2 // TILE[0] * TILE[0]), most, TILE[0])}
    return min(found, key=lambda n: (sum(one_pass(machine, shape, n, path=path).values()), n))


def whole_tiles(size: float) -> int:
    """The size, rounded down to whole tiles of a GEMM if it is at least one; at least 1."""
    tile = TILE[0]
    return max(1, int(size) if size < tile else int(size) // tile * tile)


def _parts(total: int, size: int) -> dict[int, int]:
    """Number of pieces per size, if a total is cut into pieces of one size and a rest."""
    whole, rest = divmod(total, max(size, 1))
    return {n: k for n, k in ((size, whole), (rest, 1)) if n and k}
