"""Launch parameters of a head's kernels: the defaults, and the candidates of `rlplus-bench tune`.

The defaults are estimates; on an H200 `tune` found nothing better (decision 137). Kernels that are not named here take
negligible time beside the logits.
"""

from typing import Literal, NamedTuple


class Block(NamedTuple):
    """Columns that a program of a row kernel processes at a time, and its warps."""

    BLOCK_V: int
    num_warps: int


class Tile(NamedTuple):
    """The tile of a program of our GEMM: tokens, vocabulary, hidden columns at a time; how many tiles of tokens run
    side by side and share a tile of the weight in the cache; warps; stages of the pipeline; loads by TMA."""

    BLOCK_M: int
    BLOCK_V: int
    BLOCK_H: int
    GROUP_M: int
    num_warps: int
    num_stages: int
    tma: bool


class Rows(NamedTuple):
    """Rows of a chunk, and the scratch in bytes that they were timed with."""

    rows: int
    scratch_bytes: int


First = Tile | Literal["vendor"] | None  # the first GEMM: ours with that tile, the vendor's, or as is best by the model


class Tiling(NamedTuple):
    """Blocks, tiles and rows of a head's operations. Another tiling changes the last bits of results.

    statistics, gradient   blocks of the row kernels
    programs               minimum for the statistics of fp32 logits: with fewer rows, several programs share a row
    forward, loss          the first GEMM, for logprobs alone and with exponentials to store. None: ours with the
                           default tile for bf16 on CUDA, else the vendor's. A loss in fp16 has the vendor's
    rows                   None, or timed with another scratch: the number of `rlplus.loss.cost`
    """

    statistics: Block = Block(4096, 8)
    gradient: Block = Block(4096, 8)
    programs: int = 512  # fill any GPU
    forward: First = None
    loss: First = None
    rows: Rows | None = None


DEFAULT = Tiling()

# Candidates, the default first.
STATISTICS = (DEFAULT.statistics, Block(2048, 4), Block(4096, 4), Block(8192, 16))
GRADIENT = (DEFAULT.gradient, Block(2048, 4), Block(4096, 4), Block(8192, 8))
PROGRAMS = (DEFAULT.programs, 1024, 2048)

# Tiles by the GPU's major compute capability, for half precision: the default; the default with a bias, softcap or
# temperatures of rows, which need registers; other candidates. 0: the interpreter.
TILES = {
    0: (Tile(16, 32, 32, 2, 4, 1, True), Tile(32, 64, 32, 2, 4, 1, False)),
    8: (
        Tile(128, 256, 32, 8, 8, 3, False), Tile(128, 128, 64, 8, 8, 3, False), Tile(64, 256, 64, 8, 8, 3, False),
        Tile(64, 128, 64, 8, 4, 3, False),
    ),
    9: (
        Tile(128, 256, 64, 16, 8, 3, True), Tile(128, 128, 64, 16, 8, 4, True), Tile(128, 128, 64, 16, 8, 3, True),
        Tile(64, 256, 64, 16, 8, 4, True),
    ),
    10: (Tile(128, 128, 64, 16, 8, 4, True), Tile(64, 128, 64, 16, 8, 4, True), Tile(128, 128, 64, 16, 8, 3, True)),
    12: (Tile(128, 128, 32, 16, 8, 3, False), Tile(128, 128, 32, 16, 8, 3, False), Tile(64, 128, 64, 16, 4, 3, False)),
}  # fmt: skip
FP32_TILE = Tile(64, 64, 32, 16, 4, 2, False)  # no tensor cores: "ieee" is plain multiplication and addition
