"""Log-probability and entropy of tokens, and the logits' gradient, over a chunk of rows that a GEMM left in fp32.

    z = (logits + bias) / temperature        logprob = log p[target]
    p = softmax(z)                           entropy = -sum_v p[v] log p[v]
    dlogits = (dlogprob (onehot - p) - dentropy p (log p + entropy)) / temperature

The definition is `rlplus.ops.reference.logprob_and_entropy`. fp32 arithmetic, results in nats. Memory traffic: the
logits are read once by `row_statistics` and once by `row_gradient`, which writes only the rows that have a slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOOR = tl.constexpr(-1e30)  # stands in for log 0: e^FLOOR = 0, yet 0 * FLOOR is not NaN
LAUNCH = {"BLOCK_V": 4096, "num_warps": 8}

# Columns of `values` (n, WIDTH), what is known of a token.
LOGPROB, ENTROPY, MAX, LOGSUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DLOGPROB, DENTROPY, WIDTH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


def row_statistics(values: Tensor, logits: Tensor, target: Tensor, bias: Tensor | None, temperature: float) -> None:
    """Fill the columns LOGPROB, ENTROPY, MAX (of z) and LOGSUM (of e^(z - MAX)) of values (n, WIDTH) fp32.

    logits (n, V) fp32, contiguous in V; target (n,) int64; bias (V,) of any floating dtype or None. logprob is NaN
    where the target is no token; a row with a NaN, a +inf or nothing but -inf gets NaN everywhere.
    """
    _check(values, logits, target)
    if len(target):
        _statistics_kernel[(len(target),)](
            values, logits, target, bias, logits.stride(0), logits.shape[1], 1 / temperature, **LAUNCH
        )


def row_gradient(
    dlogits: Tensor, slot: Tensor, values: Tensor, logits: Tensor, target: Tensor, bias: Tensor | None,
    temperature: float,
) -> None:  # fmt: skip
    """Write the gradient of row i of the chunk into row slot[i] of dlogits; with slot -1, nowhere.

    It is 0, whatever the logits are, where DLOGPROB and DENTROPY are 0.
    dlogits (m, V) of a floating dtype, contiguous in V; slot (n,) int64 in [-1, m); values as `row_statistics` left
    them, with DLOGPROB and DENTROPY filled in; the others as there.
    """
    _check(values, logits, target)
    V = logits.shape[1]
    if dlogits.shape[1] != V or dlogits.stride(1) != 1 or slot.shape != target.shape:
        got = f"{tuple(dlogits.shape)} with strides {dlogits.stride()} and {tuple(slot.shape)}"
        raise ValueError(f"want dlogits (m, {V}), contiguous in V, and slot {tuple(target.shape)}; got {got}")
    if len(target):
        _gradient_kernel[(len(target), triton.cdiv(V, LAUNCH["BLOCK_V"]))](
            dlogits, slot, values, logits, target, bias, dlogits.stride(0), logits.stride(0), V, 1 / temperature,
            **LAUNCH,
        )  # fmt: skip


def _check(values: Tensor, logits: Tensor, target: Tensor) -> None:
    n = len(target)
    rows = logits.ndim == 2 and len(logits) == n and logits.stride(1) == 1 and logits.dtype == torch.float32
    if not rows or values.shape != (n, WIDTH.value) or not values.is_contiguous() or not target.is_contiguous():
        got = f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}, {tuple(values.shape)} and {n}"
        raise ValueError(f"want logits (n, V) fp32, contiguous in V, values (n, 6) and target (n,); got {got}")


@triton.jit
def _load_z(row, v, V, bias, inv_temperature):
    z = tl.load(row + v, mask=v < V, other=-float("inf"))
    if bias is not None:
        z += tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)
    return z * inv_temperature


@triton.jit
def _floor(x):
    return tl.where(x < FLOOR, FLOOR, x)  # unlike tl.maximum, keeps NaN


@triton.jit
def _statistics_kernel(values, logits, target, bias, stride, V, inv_temperature, BLOCK_V: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)  # 15k rows of 152k logits are past int32
    row = logits + n * stride
    # Online softmax: m = max z, s = sum e^(z-m), t = sum e^(z-m) (z-m). Shifting t by m keeps the small entropy of a
    # peaked policy accurate, where lse - E[z] would cancel.
    m, s, t = tl.full((), -float("inf"), tl.float32), 0.0, 0.0
    for start in range(0, V, BLOCK_V):
        z = _load_z(row, start + tl.arange(0, BLOCK_V), V, bias, inv_temperature)
        m_old, m = m, tl.maximum(m, tl.max(z, 0))
        shift = tl.where(m == -float("inf"), 0.0, m)  # nothing but -inf so far: no inf - inf
        up, d = _floor(m_old - shift), _floor(z - shift)
        decay, e = tl.exp(up), tl.exp(d)
        t = decay * (t + up * s) + tl.sum(e * d, 0)
        s = decay * s + tl.sum(e, 0)
    logsum = tl.log(s)
    y = tl.load(target + n)
    known = (y >= 0) & (y < V)
    logprob = _floor(_load_z(row, tl.where(known, y, 0), V, bias, inv_temperature) - m - logsum)
    out = values + n * WIDTH
    tl.store(out + LOGPROB, tl.where(known, logprob, float("nan")))
    tl.store(out + ENTROPY, logsum - t / s)
    tl.store(out + MAX, m)
    tl.store(out + LOGSUM, logsum)


@triton.jit
def _gradient_kernel(
    dlogits, slot, values, logits, target, bias, stride_d, stride, V, inv_temperature, BLOCK_V: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    to = tl.load(slot + n)
    if to >= 0:
        v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        known = values + n * WIDTH
        z = _load_z(logits + n * stride, v, V, bias, inv_temperature)
        logp = _floor(z - tl.load(known + MAX) - tl.load(known + LOGSUM))
        p = tl.exp(logp)
        dlogprob, dentropy = tl.load(known + DLOGPROB), tl.load(known + DENTROPY)
        dz = dlogprob * (tl.where(v == tl.load(target + n), 1.0, 0.0) - p)
        dz -= dentropy * p * (logp + tl.load(known + ENTROPY))
        dz = tl.where((dlogprob != 0) | (dentropy != 0), dz, 0.0)
        tl.store(dlogits + to * stride_d + v, dz * inv_temperature, mask=v < V)
