"""The gradient of logits whose exponentials our first GEMM stored in two bytes (`linear_logprob.linear_statistics`).

    E = 2^15 e^(z - top), rounded to fp16               top = the largest z of the row in E's tile
    dlogits = -dlogprob p / temperature                 p = 2^-15 E e^(top - max - logsum)
    dlogits[target] = dlogprob (1 - e^logprob) / temperature, from fp32

E is relative to its tile, so it neither overflows nor, down to 2^-29 of the tile's largest, has less than 11 bits: the
rounding is an eighth of a bf16 gradient's. log E is not exact enough for the gradient of an entropy.
"""

import triton
import triton.language as tl
from torch import Tensor, float16, float32

from rlplus.kernels.elementwise import LOWEST, _exp
from rlplus.kernels.linear_logprob import DLOGPROB, E_SCALE, FUSION, LOGPROB, LOGSUM, MAX, WIDTH
from rlplus.kernels.tiling import DEFAULT, Block


def row_gradient(
    dlogits: Tensor, slot: Tensor, values: Tensor, exponentials: Tensor, tops: Tensor, tile: int, V: int,
    target: Tensor, temperature: float, block: Block = DEFAULT.gradient,
) -> None:  # fmt: skip
    """Write the gradient of row i of the chunk into row slot[i] of dlogits; with slot -1, nowhere.

    It is 0, whatever the logits are, where DLOGPROB is 0; DENTROPY is taken to be 0.
    dlogits (m, W) of a floating dtype, contiguous in W; slot (n,) int64 in [-1, m); values (n, WIDTH) as
    `linear_statistics` left them, with DLOGPROB filled in; exponentials (n, W) fp16 and tops (ceil(V / tile), n) fp32
    from there, tile the BLOCK_V of its tile; target (n,) int64.
    """
    n, W = exponentials.shape
    if dlogits.shape[1] != W or not dlogits.stride(1) == exponentials.stride(1) == 1 or exponentials.dtype != float16:
        kinds = ((dlogits.dtype, tuple(dlogits.shape)), (exponentials.dtype, tuple(exponentials.shape)))
        raise ValueError(f"want dlogits (m, {W}) and exponentials (n, {W}) fp16, contiguous in {W}; got {kinds}")
    if tops.shape != (triton.cdiv(V, tile), n) or tops.stride(1) != 1 or tops.dtype != float32:
        raise ValueError(f"want tops ({triton.cdiv(V, tile)}, {n}) fp32; got {tops.dtype} {tuple(tops.shape)}")
    if values.shape != (n, WIDTH.value) or slot.shape != (n,) or target.shape != (n,) or not values.is_contiguous():
        got = ", ".join(str(tuple(x.shape)) for x in (values, slot, target))
        raise ValueError(f"want values ({n}, {WIDTH.value}), contiguous, slot and target ({n},); got {got}")
    if n:
        _exponential_gradient_kernel[(n, triton.cdiv(W, block.BLOCK_V))](
            dlogits, slot, values, exponentials, tops, target,
            (dlogits.stride(0), exponentials.stride(0), tops.stride(0)), (len(tops), W), 1 / temperature,
            BLOCK_V=block.BLOCK_V, TILE=tile, num_warps=block.num_warps, **FUSION,
        )  # fmt: skip


@triton.jit
def _exponential_gradient_kernel(
    dlogits, slot, values, exponentials, tops, target, strides, sizes, inv_temperature,
    BLOCK_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    stride_d, stride, stride_tops = strides
    tiles, W = sizes
    n = tl.program_id(0).to(tl.int64)
    to = tl.load(slot + n)
    if to >= 0:
        TILES: tl.constexpr = BLOCK_V // TILE
        tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
        v = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        out, known = dlogits + to * stride_d + v, values + n * WIDTH
        slope, y = tl.load(known + DLOGPROB), tl.load(target + n)
        y = tl.where((y >= 0) & (y < W), y, -1).to(tl.int32)  # cheaper to compare with
        if slope != 0:
            slope *= inv_temperature
            e = tl.load(exponentials + n * stride + v, v < W, 0.0).to(tl.float32)
            top = tl.load(tops + tile.to(tl.int64) * stride_tops + n, tile < tiles, LOWEST)
            scale = _exp(top - tl.load(known + MAX) - tl.load(known + LOGSUM)) * (-slope * (1 / E_SCALE))
            own = slope - slope * _exp(tl.load(known + LOGPROB))  # fused: no rounding before 1 - p
            tl.store(out, tl.where(v == y, own, e * scale[:, None]), v < W)
        else:
            tl.store(out, tl.zeros((TILES, TILE), tl.float32), v < W)
