"""A kernel that selects a chunk's rows with a gradient, and assigns their places in the gradient buffer.

One program, a scan: places are in the order of the rows, so the same inputs give the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"BLOCK_N": 512, "num_warps": 16}  # a row per thread: values cross threads in the scans only

# Columns of `values`, as in linear_logprob.py.
DLOGPROB, DENTROPY, WIDTH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


def active_rows(
    slot: Tensor, token: Tensor, filled: Tensor, values: Tensor, start: int, scale: Tensor | None, active: Tensor | None
) -> None:
    """Give the next place of the buffer to each row whose DLOGPROB or DENTROPY is not 0; with `active`, to every row.

    values (n, WIDTH) fp32, contiguous; with scale (0-d fp32) the two columns are multiplied by it.
    slot (n,) int64: gets the place, or -1. token (capacity,) int64: token[slot[i]] = start + i. filled (1,) int64:
    places taken so far, at most capacity - n; it grows. active (n,) int32 or None: gets 1 for a row with a gradient,
    0 for one without.
    """
    n = len(values)
    if values.shape != (n, WIDTH.value) or not values.is_contiguous() or slot.shape != (n,):
        got = f"{tuple(values.shape)} with strides {values.stride()} and {tuple(slot.shape)}"
        raise ValueError(f"want values (n, {WIDTH.value}), contiguous, and slot (n,); got {got}")
    if n:
        _active_rows_kernel[(1,)](slot, token, filled, values, start, scale, active, n, **LAUNCH)


@triton.jit(do_not_specialize=["start", "n"])
def _active_rows_kernel(slot, token, filled, values, start, scale, active, n, BLOCK_N: tl.constexpr):
    thread = tl.arange(0, BLOCK_N)
    before = tl.load(filled + tl.zeros_like(thread))
    for first in range(0, n, BLOCK_N):
        i = first + thread
        here, row = i < n, values + i * WIDTH
        dlogprob, dentropy = tl.load(row + DLOGPROB, here, 0.0), tl.load(row + DENTROPY, here, 0.0)
        on = (dlogprob != 0) | (dentropy != 0)
        taken = on.to(tl.int32)
        if active is not None:
            tl.store(active + i, taken, here)
            taken = here.to(tl.int32)
        up_to = tl.cumsum(taken, 0)
        place = before + up_to - 1
        tl.store(slot + i, tl.where(taken != 0, place, -1), here)
        tl.store(token + place, (start + i).to(tl.int64), taken != 0)
        if scale is not None:
            factor = tl.load(scale)
            tl.store(row + DLOGPROB, dlogprob * factor, here)
            tl.store(row + DENTROPY, dentropy * factor, here)
        before += up_to - taken + tl.cumsum(taken, 0, reverse=True)  # every thread knows the sum
    tl.store(filled + tl.zeros_like(thread), before, thread == 0)
