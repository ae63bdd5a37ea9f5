"""The target's element of each row, in fp32, beside the backward GEMMs.

The target's element dominates a row's gradient by the logits: without a softcap and an entropy bonus the others add up
to its negative, so that it has at least half of the squares. In the exponentials a 0 stands for it, and GEMMs in bf16
round the other elements alone. It contributes a multiple of the target's row of the weight to the gradient of the
hidden state, and a multiple of the hidden state to the gradient of that row.
"""

import triton
import triton.language as tl
from torch import Tensor

from rlplus.kernels.elementwise import FUSION

HIDDEN = {"BLOCK_C": 1024, "num_warps": 4, **FUSION}
WEIGHT = {"BLOCK_N": 8, "BLOCK_C": 512, "num_warps": 4, **FUSION}


def finish_hidden(product: Tensor, factor: Tensor, own: Tensor, weight: Tensor, target: Tensor) -> None:
    """product (n, H) = factor (n,) product + own (n,) weight[target], of each row, in fp32.

    weight (V, H) of any floating dtype and strides; target (n,) int64, which is read where own is not 0.
    """
    n, H = product.shape
    if weight.shape[1] != H or not product.is_contiguous() or any(x.shape != (n,) for x in (factor, own, target)):
        got = ", ".join(str(tuple(x.shape)) for x in (product, factor, own, weight, target))
        raise ValueError(f"want product (n, H), contiguous, factor and own (n,), weight (V, H), target (n,); got {got}")
    if n:
        grid = (n, triton.cdiv(H, HIDDEN["BLOCK_C"]))
        _own_hidden_kernel[grid](product, factor, own, weight, target, H, weight.stride(), **HIDDEN)


def add_to_weight(dweight: Tensor, own: Tensor, hidden: Tensor, target: Tensor) -> None:
    """dweight (V, H)[target] += own (n,) hidden (n, H), in fp32, rounded once to the dtype of dweight.

    Any floating dtypes and strides; target (n,) int64, and both it and hidden are read where own is not 0. A token's
    rows are summed in their order, by one program: the same inputs give the same bits.
    """
    V, H = dweight.shape
    n = len(own)
    if hidden.shape != (n, H) or own.shape != (n,) or target.shape != (n,):
        got = ", ".join(str(tuple(x.shape)) for x in (dweight, own, hidden, target))
        raise ValueError(f"want dweight (V, H), own (n,), hidden (n, H), target (n,); got {got}")
    if n:
        token, order = target.where(own != 0, V).sort(stable=True)
        grid = (n, triton.cdiv(H, WEIGHT["BLOCK_C"]))
        strides = (*dweight.stride(), *hidden.stride())
        _own_weight_kernel[grid](dweight, own, hidden, token, order, n, (V, H), strides, **WEIGHT)


@triton.jit
def _own_hidden_kernel(product, factor, own, weight, target, H, strides, BLOCK_C: tl.constexpr):
    stride_v, stride_w = strides
    n = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    scale = tl.load(factor + n)
    mine = tl.load(own + n)
    at = product + n * H + h
    y = tl.where(mine == 0, 0, tl.load(target + n))
    row = tl.load(weight + y * stride_v + h * stride_w, h < H, 0.0).to(tl.float32)
    tl.store(at, scale * tl.load(at, h < H, 0.0) + mine * row, h < H)


@triton.jit(do_not_specialize=["N"])  # the number of rows changes from step to step
def _own_weight_kernel(
    dweight, own, hidden, token, order, N, sizes, strides, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    V, H = sizes
    stride_v, stride_w, stride_n, stride_h = strides
    start = tl.program_id(0)
    y = tl.load(token + start)
    # The program of a token's first row takes all of them.
    if (y < V) & (y != tl.load(token + start - 1, start > 0, -1)):
        h = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
        total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
        more = True
        while more:
            i = start + tl.arange(0, BLOCK_N)
            here = tl.load(token + i, i < N, V) == y
            n = tl.load(order + i, here, 0)
            x = tl.load(hidden + n[:, None] * stride_n + h[None, :] * stride_h, here[:, None] & (h < H)[None, :], 0.0)
            total += tl.load(own + n, here, 0.0)[:, None] * x.to(tl.float32)
            start += BLOCK_N
            more = tl.load(token + start, start < N, V) == y
        at = dweight + y * stride_v + h * stride_w
        value = tl.load(at, h < H, 0.0).to(tl.float32) + tl.sum(total, 0)
        tl.store(at, value.to(dweight.dtype.element_ty), h < H)
