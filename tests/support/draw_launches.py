"""Launches of the kernel that draws the elements of a sampled backward pass, for `kernel_table.py`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rlplus.kernels import draws
from rlplus.kernels.linear_logprob import PARTIALS
from rlplus.kernels.row_values import WIDTH
from rlplus.kernels.tiling import DRAWN


def draw_launches() -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Name, whether its rows are aligned, and the launch: exponentials in our GEMM's tiles, or rows in larger ones."""
    n, V, W, K, most = 200, 152_001, 152_064, 514, 512
    out = (torch.empty(n, K, dtype=torch.int32), torch.empty(n, K), torch.empty(n, K))
    values, ones = torch.empty(n, WIDTH.value), torch.ones(n, dtype=torch.int32)
    target, sums, uniform = torch.zeros(n, dtype=torch.int64), torch.empty(n, draws.SUMS.value), torch.empty(n)
    plain = (None, 1.0)
    every = (torch.empty(V, dtype=torch.bfloat16), 1.0, 30.0, torch.ones(n))

    def launch(
        dtype: torch.dtype, tile: int, slope: torch.Tensor | None, options: tuple[Any, ...], *, exponentials: bool
    ) -> Callable[[], Any]:
        partial_sums = torch.empty(-(-V // tile), PARTIALS.value, n)
        rows = (partial_sums, values, torch.empty(n, W, dtype=dtype), V, tile, ones, uniform, 2.0**-12, most, target)
        return partial(draws.draw_rows, *out, slope, sums, *rows, *options, exponentials=exponentials)

    for tile in (256, 128):
        yield f"exponentials, tiles of {tile}", False, launch(torch.bfloat16, tile, None, plain, exponentials=True)
    tile = DRAWN.BLOCK_V
    yield f"gradients, tiles of {tile}", False, launch(torch.float32, tile, None, plain, exponentials=True)
    for options, slope, where in ((plain, None, ""), (every, torch.empty(n, K), ", every option")):
        yield f"logits, tiles of {tile}{where}", False, launch(torch.float32, tile, slope, options, exponentials=False)
