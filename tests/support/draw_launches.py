"""Launches of the kernel that draws the elements of a sampled backward pass, for `kernel_table.py`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rlplus.kernels import draws
from rlplus.kernels.row_values import WIDTH


def draw_launches() -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Name, whether its rows are aligned, and the launch: 4097 exponentials or logits in 4160 columns."""
    n, V, W, K, most = 200, 4097, 4160, 514, 512
    out = (torch.empty(n, K, dtype=torch.int32), torch.empty(n, K), torch.empty(n, K))
    values, ones = torch.empty(n, WIDTH.value), torch.ones(n, dtype=torch.int32)
    target, sums, uniform = torch.zeros(n, dtype=torch.int64), torch.empty(n, draws.SUMS.value), torch.empty(n)
    rows = (V, ones, uniform, 2.0**-12, most, target)
    every = (torch.empty(V, dtype=torch.bfloat16), 1.0, 30.0, torch.ones(n))
    for dtype in (torch.bfloat16, torch.float32):
        args = (*out, None, sums, values, torch.empty(n, W, dtype=dtype), *rows, None, 1.0)
        where = "exponentials of " + str(dtype).removeprefix("torch.") + f", V {V} in {W}"
        yield where, True, partial(draws.draw_rows, *args, exponentials=True)
    for options, slope, where in (((None, 1.0), None, ""), (every, torch.empty(n, K), ", every option")):
        args = (*out, slope, sums, values, torch.empty(n, W), *rows, *options)
        yield f"logits, V {V} in {W}{where}", True, partial(draws.draw_rows, *args, exponentials=False)
