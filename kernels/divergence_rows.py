"""The divergence of a student from a teacher, from rows of both logits; as in rlplus/loss/objective/divergence.py.

`row_divergences` reads a pair of rows twice: for the logsumexps, then for the divergence and what its gradient needs.
`row_gradients` writes the gradient of the student's logits, which may be over these. beta: 0 is the forward and 1 the
reverse divergence, between them a jsd; each of the three is compiled for itself.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float32

from rlplus.kernels.elementwise import (
    FUSION,
    LOWEST,
    _at_rows,
    _exp,
    _expm1,
    _floor,
    _log1p,
    _softcap_slope,
    _x,
    _z,
)  # fmt: skip
from rlplus.kernels.linear_logprob import check_rows, check_temperature
from rlplus.kernels.tiling import Block

# Columns of values (n, WIDTH) fp32: the largest z and log sum e^(z - largest) of the student and the teacher; the mean
# of log(p / q), or of log(p / m), under the student; the divergence; the derivative of the loss by it.
LARGEST = tl.constexpr(0)
LOGSUM = tl.constexpr(1)
TEACHER_LARGEST = tl.constexpr(2)
TEACHER_LOGSUM = tl.constexpr(3)
MEAN = tl.constexpr(4)
DIVERGENCE = tl.constexpr(5)
WEIGHT = tl.constexpr(6)
WIDTH = tl.constexpr(7)
FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
MIXED = tl.constexpr(2)

# Estimates, not measured: the state of a row's logsumexps and sums takes 4 registers a column.
ROWS = Block(2048, 8)
GRADIENT = Block(2048, 8)


class Transform(NamedTuple):
    """From logits to z, of one head: bias (V,) or None, temperature, softcap, row_temperature (n,) fp32 or None."""

    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    row_temperature: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor | None, float, float | None, Tensor | None]:
        return self.bias, 1 / self.temperature, self.softcap, self.row_temperature


def row_divergences(
    values: Tensor, logits: Tensor, teacher_logits: Tensor, V: int, of_student: Transform, of_teacher: Transform,
    beta: float, block: Block = ROWS,
) -> None:  # fmt: skip
    """Fill all columns of values (n, WIDTH) but WEIGHT from the logits of both, (n, W) fp32 with W >= V."""
    n = _check(values, logits, teacher_logits, V, of_student, of_teacher)
    if n:
        _divergence_kernel[(n,)](
            values, logits, teacher_logits, (logits.stride(0), teacher_logits.stride(0)),
            (V, min(logits.shape[1], teacher_logits.shape[1])), *of_student.arguments, *of_teacher.arguments,
            beta, _kind(beta), **block._asdict(), **FUSION,
        )  # fmt: skip


def row_gradients(
    dlogits: Tensor, values: Tensor, logits: Tensor, teacher_logits: Tensor, V: int, of_student: Transform,
    of_teacher: Transform, beta: float, block: Block = GRADIENT,
) -> None:  # fmt: skip
    """Write WEIGHT times the gradient of the student's logits to dlogits (n, W), which may be these; 0 without a
    weight, whatever the logits are. values as `row_divergences` left them, with WEIGHT filled in."""
    n = _check(values, logits, teacher_logits, V, of_student, of_teacher)
    check_rows("dlogits", dlogits, n, V)
    if n:
        W = min(logits.shape[1], teacher_logits.shape[1], dlogits.shape[1])
        _difference_kernel[(n, triton.cdiv(V, block.BLOCK_V))](
            dlogits, values, logits, teacher_logits, (dlogits.stride(0), logits.stride(0), teacher_logits.stride(0)),
            (V, W), *of_student.arguments, *of_teacher.arguments, beta, _kind(beta), **block._asdict(), **FUSION,
        )  # fmt: skip


def _check(
    values: Tensor, logits: Tensor, teacher_logits: Tensor, V: int, *transforms: Transform
) -> int:  # fmt: skip
    n = len(values)
    if values.shape != (n, WIDTH.value) or not values.is_contiguous():
        raise ValueError(f"want values (n, {WIDTH.value}), contiguous; got {tuple(values.shape)}, {values.stride()}")
    check_rows("logits", logits, n, V, float32)
    check_rows("teacher_logits", teacher_logits, n, V, float32)
    for transform in transforms:
        check_temperature(transform.row_temperature, n)
    return n


def _kind(beta: float) -> int:
    return {0.0: FORWARD, 1.0: REVERSE}.get(beta, MIXED).value


@triton.jit
def _grow(z, inside, largest, rest):
    """The largest z of each column so far, and the sum of the others' e^(z - largest), with another z.

    The largest is left out of the sum, a 1 that would take the digits of the others; so an empty sum is -1.
    """
    e = _exp(-tl.abs(z - largest))
    grown = tl.where(z > largest, (1.0 + rest) * e, rest + e)
    return tl.maximum(largest, z), tl.where(inside, grown, rest)


@triton.jit
def _logsum(largest, rest, BLOCK_V: tl.constexpr):
    """The largest z of all columns, and log sum e^(z - largest)."""
    top = tl.max(largest, 0)
    column = tl.arange(0, BLOCK_V)
    first = tl.min(tl.where(largest == top, column, BLOCK_V), 0)
    shares = tl.where(column == first, rest, (1.0 + rest) * _exp(largest - top))
    return top, _log1p(tl.sum(shares, 0))


@triton.jit
def _gap(logp, logq, d, decay):
    """p - q of d = log(p / q) and decay = e^-|d| - 1, which keeps its digits where the two are near."""
    gap = -decay * _exp(tl.maximum(logp, logq))
    return tl.where(d < 0, -gap, gap)


@triton.jit
def _rest(d, decay, beta):
    """log(m / max(p, q))."""
    return _log1p(tl.where(d > 0, beta, 1.0 - beta) * decay)


@triton.jit
def _terms(logp, logq, beta, KIND: tl.constexpr):
    """A token's terms of the divergence and of the mean."""
    d = logp - logq
    decay = _expm1(-tl.abs(d))
    gap = _gap(logp, logq, d, decay)
    if KIND == FORWARD:
        term = gap - _exp(logq) * d
        mean = term
    elif KIND == REVERSE:
        term = _exp(logp) * d - gap
        mean = term
    else:
        p = _exp(logp)
        rest = _rest(d, decay, beta)
        of_p = tl.minimum(d, 0.0) - rest
        mean = p * of_p - beta * gap
        term = (1.0 - beta) * p * of_p - beta * _exp(logq) * (tl.maximum(d, 0.0) + rest)
    return term, mean


@triton.jit
def _divergence_kernel(
    values, logits, teacher_logits, strides, sizes, bias, inv_temperature, softcap, row_temperature,
    teacher_bias, teacher_inv_temperature, teacher_softcap, teacher_row_temperature, beta, KIND: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    stride, teacher_stride = strides
    V, W = sizes
    n = tl.program_id(0).to(tl.int64)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    teacher_inv_temperature = _at_rows(teacher_inv_temperature, teacher_row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    if teacher_softcap is not None:
        teacher_softcap = _at_rows(teacher_softcap, teacher_row_temperature, n, True)
    row = logits + n * stride
    teacher_row = teacher_logits + n * teacher_stride
    s_largest = tl.full((BLOCK_V,), LOWEST, tl.float32)
    t_largest = tl.full((BLOCK_V,), LOWEST, tl.float32)
    s_rest = tl.full((BLOCK_V,), -1.0, tl.float32)
    t_rest = tl.full((BLOCK_V,), -1.0, tl.float32)
    for start in range(0, W, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        inside = v < V
        s = _floor(_z(tl.load(row + v, v < W, 0.0), v, inside, bias, inv_temperature, softcap))
        t = tl.load(teacher_row + v, v < W, 0.0)
        t = _floor(_z(t, v, inside, teacher_bias, teacher_inv_temperature, teacher_softcap))
        s_largest, s_rest = _grow(tl.where(inside, s, LOWEST), inside, s_largest, s_rest)
        t_largest, t_rest = _grow(tl.where(inside, t, LOWEST), inside, t_largest, t_rest)
    s_top, s_logsum = _logsum(s_largest, s_rest, BLOCK_V)
    t_top, t_logsum = _logsum(t_largest, t_rest, BLOCK_V)
    terms = tl.zeros((BLOCK_V,), tl.float32)
    means = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, W, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        inside = v < V
        s = _z(tl.load(row + v, v < W, 0.0), v, inside, bias, inv_temperature, softcap)
        t = tl.load(teacher_row + v, v < W, 0.0)
        t = _z(t, v, inside, teacher_bias, teacher_inv_temperature, teacher_softcap)
        term, mean = _terms(_floor(s - s_top - s_logsum), _floor(t - t_top - t_logsum), beta, KIND)
        terms += tl.where(inside, term, 0.0)
        means += tl.where(inside, mean, 0.0)
    out = values + n * WIDTH
    tl.store(out + LARGEST, s_top)
    tl.store(out + LOGSUM, s_logsum)
    tl.store(out + TEACHER_LARGEST, t_top)
    tl.store(out + TEACHER_LOGSUM, t_logsum)
    tl.store(out + MEAN, tl.sum(means, 0))
    tl.store(out + DIVERGENCE, tl.sum(terms, 0))


@triton.jit
def _difference_kernel(
    dlogits, values, logits, teacher_logits, strides, sizes, bias, inv_temperature, softcap, row_temperature,
    teacher_bias, teacher_inv_temperature, teacher_softcap, teacher_row_temperature, beta, KIND: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    stride_d, stride, teacher_stride = strides
    V, W = sizes
    n = tl.program_id(0).to(tl.int64)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    teacher_inv_temperature = _at_rows(teacher_inv_temperature, teacher_row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    if teacher_softcap is not None:
        teacher_softcap = _at_rows(teacher_softcap, teacher_row_temperature, n, True)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    known = values + n * WIDTH
    there = v < W
    inside = v < V
    weight = tl.load(known + WEIGHT)
    dz = tl.zeros((BLOCK_V,), tl.float32)
    if weight != 0:
        raw = tl.load(logits + n * stride + v, there, 0.0)
        s = _z(raw, v, inside, bias, inv_temperature, softcap)
        t = tl.load(teacher_logits + n * teacher_stride + v, there, 0.0)
        t = _z(t, v, inside, teacher_bias, teacher_inv_temperature, teacher_softcap)
        logp = _floor(s - tl.load(known + LARGEST) - tl.load(known + LOGSUM))
        logq = _floor(t - tl.load(known + TEACHER_LARGEST) - tl.load(known + TEACHER_LOGSUM))
        d = logp - logq
        mean = tl.load(known + MEAN)
        if KIND == REVERSE:
            dz = _exp(logp) * (d - mean)
        else:
            decay = _expm1(-tl.abs(d))
            if KIND == FORWARD:
                dz = _gap(logp, logq, d, decay)
            else:
                dz = (1.0 - beta) * _exp(logp) * (tl.minimum(d, 0.0) - _rest(d, decay, beta) - mean)
        dz *= weight * inv_temperature
        if softcap is not None:
            dz *= _softcap_slope(_x(raw, v, inside, bias, inv_temperature), softcap)
    tl.store(dlogits + n * stride_d + v, dz.to(dlogits.dtype.element_ty), there)
