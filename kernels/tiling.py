"""Launch parameters of a head's kernels.

Of the others that were timed on an H200, none made a call faster (decision 006). Kernels that are not named here take
negligible time beside the logits.
"""

from typing import NamedTuple


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


# Blocks of the row kernels, from logits to their statistics and to their gradient.
STATISTICS = Block(4096, 8)
GRADIENT = Block(4096, 8)
DRAWN = Block(1024, 4)  # statistics of rows from which a draw reads single blocks
PROGRAMS = 512  # so many fill any GPU: with fewer rows, several programs share a row of fp32 logits

# Tiles by the GPU's major compute capability, for half precision: the default, and one with a bias, softcap or
# temperatures of rows, which need registers. 0: the interpreter.
TILES = {
    0: (Tile(16, 32, 32, 2, 4, 1, True), Tile(32, 64, 32, 2, 4, 1, False)),
    8: (Tile(128, 256, 32, 8, 8, 3, False), Tile(128, 128, 64, 8, 8, 3, False)),
    9: (Tile(128, 256, 64, 16, 8, 3, True), Tile(128, 128, 64, 16, 8, 4, True)),
    10: (Tile(128, 128, 64, 16, 8, 4, True), Tile(64, 128, 64, 16, 8, 4, True)),
    12: (Tile(128, 128, 32, 16, 8, 3, False), Tile(128, 128, 32, 16, 8, 3, False)),
}
FP32_TILE = Tile(64, 64, 32, 16, 4, 2, False)  # no tensor cores: "ieee" is plain multiplication and addition
