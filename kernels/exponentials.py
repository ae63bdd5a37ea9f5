"""From logits to exponentials relative to the row's reference, and from those to the gradient of the logits.

With E, rho, s and t of linear_logprob.py, S = 1 + s, a = dloss / dlogprob, h = dloss / dentropy, and the derivative of
z by x folded into E,

    dlogits = -(a / S) E / temperature, but for the target's element
    with h:  = (1 / S) (-a E - h E (log(E / S) + entropy)) / temperature

`close_rows` computes 1 / S with its factors, which the backward GEMMs apply by rows, and the target's element, which
own_tokens.py applies. Where the exponentials were not kept, `row_gradient` computes the gradient from fp32 logits.
"""

import triton
import triton.language as tl
from torch import Tensor, float32

from rlplus.kernels.elementwise import (
    FUSION,
    LN_2,
    LOG2_E,
    LOWEST,
    _at_rows,
    _exp,
    _exp2,
    _expm1,
    _floor,
    _log2,
    _softcap_slope,
    _x,
    _z,
)  # fmt: skip
from rlplus.kernels.linear_logprob import LARGEST, NOTHING, PARTIALS, check, check_rows
from rlplus.kernels.row_values import DENTROPY, DLOGPROB, ENTROPY, LOGPROB, LOGSUM, REFERENCE, SLOPE, WIDTH
from rlplus.kernels.tiling import GRADIENT, STATISTICS, Block


def row_exponentials(
    partial: Tensor, exponentials: Tensor | None, values: Tensor, logits: Tensor, V: int, target: Tensor,
    bias: Tensor | None, temperature: float, softcap: float | None = None, row_temperature: Tensor | None = None,
    block: Block = STATISTICS, carry: bool = False,
) -> None:  # fmt: skip
    """Fill partial (parts, PARTIALS, n) fp32 from logits (n, W) fp32; with one part also exponentials (n, W) or None.

    Each part of a row is read by one program. One whose sum is past LARGEST is read again, relative to its largest
    logit, which is its reference then. carry: partial has what blocks of the vocabulary before this one left, with one
    part; target and bias are the block's, a target outside [0, V) is in another one. Otherwise as in
    `linear_exponentials`.
    """
    check(values, target, row_temperature)
    check_rows("logits", logits, len(target), V, float32)
    if exponentials is not None:
        check_rows("exponentials", exponentials, len(target), V)
    parts = len(partial)
    n = len(target)
    if partial.shape != (parts, PARTIALS.value, n) or (parts > 1 and (carry or exponentials is not None)):
        raise ValueError(f"want partial (parts, {PARTIALS.value}, {n}), of one part if something is kept; got {parts}")
    if n:
        each = triton.cdiv(triton.cdiv(V, block.BLOCK_V), parts) * block.BLOCK_V
        strides = (logits.stride(0), 0 if exponentials is None else exponentials.stride(0))
        W = logits.shape[1] if exponentials is None else min(logits.shape[1], exponentials.shape[1])
        _row_kernel[(n, parts)](
            partial, exponentials, values, logits, target, bias, strides, (V, W, each), 1 / temperature, softcap,
            row_temperature, carry, **block._asdict(), **FUSION,
        )  # fmt: skip


def close_rows(
    factor: Tensor, own: Tensor, values: Tensor, exponentials: Tensor, V: int, target: Tensor, temperature: float,
    row_temperature: Tensor | None = None, entropy: bool = False, block: Block = GRADIENT,
) -> None:  # fmt: skip
    """Turn exponentials (n, W) into a matrix whose rows times factor (n,) fp32 are the gradient of the logits, but for
    the target's element, own (n,) fp32. Both are filled.

    Rows whose DLOGPROB and DENTROPY are 0 become zeros, whatever they were, and so is own where the target is no token.
    values as `finish_rows` left them, with the two filled in. entropy: whether a DENTROPY may be other than 0; only
    without a softcap, and every element of such a row is rounded twice.
    """
    check(values, target, row_temperature)
    check_rows("exponentials", exponentials, len(target), V)
    if len(target):
        grid = (len(target), triton.cdiv(V, block.BLOCK_V) if entropy else 1)
        _close_kernel[grid](
            factor, own, values, exponentials, target, exponentials.stride(0), V, exponentials.shape[1],
            1 / temperature, row_temperature, entropy, **block._asdict(), **FUSION,
        )  # fmt: skip


def row_gradient(
    dlogits: Tensor, values: Tensor, logits: Tensor, V: int, target: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None = None, row_temperature: Tensor | None = None, block: Block = GRADIENT,
) -> None:  # fmt: skip
    """Write the gradient of the logits to dlogits (n, W), which may be the logits (n, W) fp32 themselves.

    It is 0, whatever the logits are, where DLOGPROB and DENTROPY are 0. values as `finish_rows` left them, with the two
    filled in; the others as there.
    """
    check(values, target, row_temperature)
    check_rows("logits", logits, len(target), V, float32)
    check_rows("dlogits", dlogits, len(target), V)
    W = min(logits.shape[1], dlogits.shape[1])
    if len(target):
        _gradient_kernel[(len(target), triton.cdiv(V, block.BLOCK_V))](
            dlogits, values, logits, target, bias, (dlogits.stride(0), logits.stride(0)), (V, W), 1 / temperature,
            softcap, row_temperature, **block._asdict(), **FUSION,
        )  # fmt: skip


@triton.jit
def _sums(exponentials, row, span, V, y, reference, bias, inv_temperature, softcap, s, t, BLOCK_V: tl.constexpr):
    """s and t (BLOCK_V,), grown by the exponentials of a span of a row, which are stored on request.

    The span may end behind V, at a multiple of 16: loads and stores are then 16 bytes wide.
    """
    first, last = span
    for start in range(first, last, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        there = v < last
        inside = v < V
        raw = tl.load(row + v, there, 0.0)
        d = _floor((_z(raw, v, inside, bias, inv_temperature, softcap) - reference) * LOG2_E)
        d = tl.where(inside & (v != y), d, NOTHING)
        e = _exp2(d)
        s += e
        t += e * d
        if exponentials is not None:
            if softcap is not None:
                e *= _softcap_slope(_x(raw, v, inside, bias, inv_temperature), softcap)
            tl.store(exponentials + v, e.to(exponentials.dtype.element_ty), there)
    return s, t


@triton.jit
def _row_kernel(
    partial, exponentials, values, logits, target, bias, strides, sizes, inv_temperature, softcap, row_temperature,
    CARRY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    stride, stride_e = strides
    V, W, width = sizes
    n = tl.program_id(0).to(tl.int64)  # 15k rows of 152k logits are past int32
    N = tl.num_programs(0)
    y = tl.load(target + n)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    first = tl.program_id(1) * width
    span = (first, tl.minimum(first + width, W))
    row = logits + n * stride
    part = partial + tl.program_id(1) * PARTIALS * N + n
    if exponentials is not None:
        exponentials += n * stride_e
    reference = tl.load(values + n * WIDTH + REFERENCE)
    s_before = 0.0
    t_before = 0.0
    if CARRY:
        reference = tl.load(part)
        s_before = tl.load(part + N)
        t_before = tl.load(part + 2 * N)
    zeros = tl.zeros((BLOCK_V,), tl.float32)
    s, t = _sums(exponentials, row, span, V, y, reference, bias, inv_temperature, softcap, zeros, zeros, BLOCK_V)
    s_all = s_before + tl.sum(s, 0)
    t_all = t_before + tl.sum(t, 0) * LN_2
    if (s_all <= LARGEST) == 0:
        top = tl.full((BLOCK_V,), LOWEST, tl.float32)
        for start in range(span[0], span[1], BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            inside = v < V
            z = _z(tl.load(row + v, v < span[1], 0.0), v, inside, bias, inv_temperature, softcap)
            top = tl.maximum(top, tl.where(inside, z, LOWEST))
        new = tl.maximum(tl.max(top, 0), reference)
        up = _floor(reference - new)
        s, t = _sums(exponentials, row, span, V, y, new, bias, inv_temperature, softcap, zeros, zeros, BLOCK_V)
        s_all = _exp(up) * s_before + tl.sum(s, 0)
        t_all = _exp(up) * (t_before + up * s_before) + tl.sum(t, 0) * LN_2
        reference = new
    tl.store(part, reference)
    tl.store(part + N, s_all)
    tl.store(part + 2 * N, t_all)


@triton.jit
def _close_kernel(
    factor, own, values, exponentials, target, stride, V, W, inv_temperature, row_temperature,
    ENTROPY_BONUS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    known = values + n * WIDTH
    row = exponentials + n * stride
    a = tl.load(known + DLOGPROB)
    h = tl.load(known + DENTROPY)
    y = tl.load(target + n)
    logprob = tl.load(known + LOGPROB)
    logsum = tl.load(known + LOGSUM)
    entropy = tl.load(known + ENTROPY)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    inverse = _exp(-logsum) * inv_temperature
    mine = -a * _expm1(logprob) * tl.load(known + SLOPE)
    first = tl.program_id(1) * BLOCK_V
    idle = (a == 0) & (h == 0)
    if idle:
        for start in range(first, V, BLOCK_V * tl.num_programs(1)):
            v = start + tl.arange(0, BLOCK_V)
            tl.store(row + v, tl.zeros((BLOCK_V,), exponentials.dtype.element_ty), v < W)
    elif ENTROPY_BONUS:
        if h == 0:
            inverse *= -a
        else:
            v = first + tl.arange(0, BLOCK_V)
            e = tl.load(row + v, v < W, 0.0).to(tl.float32)
            bonus = h * (_floor(_log2(e) * LN_2) + (entropy - logsum))
            tl.store(row + v, (-e * (a + bonus)).to(exponentials.dtype.element_ty), v < W)
            mine -= h * _exp(logprob) * (logprob + entropy)
    else:
        inverse *= -a
    if tl.program_id(1) == 0:
        tl.store(factor + n, tl.where(idle, 0.0, inverse))
        tl.store(own + n, tl.where(idle | (y < 0) | (y >= V), 0.0, mine * inv_temperature))


@triton.jit
def _gradient_kernel(
    dlogits, values, logits, target, bias, strides, sizes, inv_temperature, softcap, row_temperature,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    stride_d, stride = strides
    V, W = sizes
    n = tl.program_id(0).to(tl.int64)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    out = dlogits + n * stride_d + v
    known = values + n * WIDTH
    there = v < W
    inside = v < V
    a = tl.load(known + DLOGPROB)
    h = tl.load(known + DENTROPY)
    dz = tl.zeros((BLOCK_V,), tl.float32)
    if (a != 0) | (h != 0):
        a *= inv_temperature
        h *= inv_temperature
        raw = tl.load(logits + n * stride + v, there, 0.0)
        z = _z(raw, v, inside, bias, inv_temperature, softcap)
        logp = _floor(z - tl.load(known + REFERENCE) - tl.load(known + LOGSUM))
        p = _exp(logp)
        logprob = tl.load(known + LOGPROB)
        at_target = v == tl.load(target + n)
        dz = tl.where(at_target, -a * _expm1(logprob), -a * p)
        dz -= h * p * (tl.where(at_target, logprob, logp) + tl.load(known + ENTROPY))
        if softcap is not None:
            dz *= _softcap_slope(_x(raw, v, inside, bias, inv_temperature), softcap)
    tl.store(out, dz.to(dlogits.dtype.element_ty), there)
