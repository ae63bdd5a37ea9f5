"""A matrix times a number that only the device knows: the gradients times the factor of the loss.

The number is 1 in nearly every training step; then every program exits after reading it.
"""

import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": True}
PROGRAMS = 1024  # more than any GPU runs at a time


def scale_(x: Tensor, by: Tensor) -> Tensor:
    """x *= by, multiplied in the dtype of `by` and rounded once; -> x.

    x (n, m) or (m,) of a floating dtype, contiguous in m; by 0-d, fp32 or fp64, on the same device.
    """
    rows = x if x.ndim == 2 else x[None]
    if rows.ndim != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1) or by.numel() != 1:
        got = f"{tuple(x.shape)} with strides {x.stride()} and {tuple(by.shape)}"
        raise ValueError(f"want x (n, m) or (m,), contiguous in m, and one number; got {got}")
    if rows.numel():
        grid = (min(len(rows), PROGRAMS),)
        _scale_kernel[grid](rows, by, len(rows), rows.shape[1], rows.stride(0), **LAUNCH)
    return x


@triton.jit
def _scale_kernel(x, by, n, m, stride, BLOCK: tl.constexpr):
    factor = tl.load(by)
    if factor != 1.0:
        row = x + tl.program_id(0).to(tl.int64) * stride
        step = tl.num_programs(0).to(tl.int64) * stride
        for _ in range(tl.program_id(0), n, tl.num_programs(0)):
            for start in range(0, m, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(row + at, at < m).to(factor.dtype)
                tl.store(row + at, (value * factor).to(x.dtype.element_ty), at < m)
            row += step
