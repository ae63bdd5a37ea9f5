"""A few elements of each row's probabilities, drawn for a sampled backward pass; see `rlplus.loss.backends.sampled`.

A row's probabilities p but the target's are sampled by a threshold t. Each p of at least t is kept as it is. A smaller
one is kept where the running sum of the smaller ones, from u t on, passes a multiple of t, and counts as t. A block
without a large p whose mass passes no multiple, as nearly all are, is read and nothing more.
"""

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from rlplus.kernels.elementwise import FUSION, LN_2, _at_rows, _exp, _expm1, _floor, _log2, _softcap_slope, _x, _z
from rlplus.kernels.linear_logprob import check, check_rows
from rlplus.kernels.row_values import ENTROPY, LOGPROB, LOGSUM, REFERENCE, WIDTH

# 16 bytes a thread.
OF_EXPONENTIALS = {"BLOCK_V": 1024, "num_warps": 4}
OF_LOGITS = {"BLOCK_V": 1024, "num_warps": 8}
# Columns of sums (n, SUMS).
COUNT = tl.constexpr(0)
FLAT = tl.constexpr(1)
VARIANCE = tl.constexpr(2)
SQUARE = tl.constexpr(3)
SUMS = tl.constexpr(4)


def draw_rows(
    token: Tensor, w: Tensor, logp: Tensor, slope: Tensor | None, sums: Tensor, values: Tensor, rows: Tensor, V: int,
    on: Tensor, uniform: Tensor, threshold: float, most: int, target: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None = None, row_temperature: Tensor | None = None, *, exponentials: bool,
) -> None:  # fmt: skip
    """Fill token int32, w, logp and, behind a softcap, slope, fp32 (n, K), of rows `on` (n,) int32, and sums (n, 4).

    rows (n, W): fp32 logits, or exponentials (then without a softcap), as `finish_rows` left them and values, or others
    whose absolute values have the sum e^LOGSUM; K of at least most + 2. sums has each row's number of elements, whether
    its threshold was raised to 1 / most, since it would keep more, the sum of w's variances, and the sum of squares of
    the gradient of logprob by z. A row that has a NaN keeps nothing.
    """
    check(values, target, row_temperature)
    check_rows("rows", rows, len(target), V, None if exponentials else float32)
    n, K = token.shape
    if n != len(target) or token.dtype != int32 or most + 2 > K or (exponentials and softcap is not None):
        got = f"{token.dtype} {tuple(token.shape)}, most {most}, softcap {softcap}"
        raise ValueError(f"want token int32 ({len(target)}, most + 2), exponentials without a softcap; got {got}")
    if n:
        _draw_kernel[(n,)](
            token, w, logp, slope, sums, values, rows, on, uniform, target, bias, rows.stride(0), (V, rows.shape[1], K),
            (threshold, max(threshold, 1 / most), float(most)), 1 / temperature, softcap, row_temperature,
            exponentials, **(OF_EXPONENTIALS if exponentials else OF_LOGITS), **FUSION,
        )  # fmt: skip


@triton.jit
def _pass(
    token, w, logp, slope, row, sizes, y, u, level, reference, logsum, bias, inv_temperature, softcap,
    EXPONENTIALS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Elements at this level: their number, the number of large p, mass and squares of the others, all squares."""
    V, W, K = sizes
    none = (y * 0).to(tl.int32)  # a tensor in the interpreter, too
    count = none
    large = none
    total = u * level
    mass = 0.0
    mass_squares = 0.0
    squares = 0.0
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        inside = v < V
        raw = tl.load(row + v, v < W, 0.0).to(tl.float32)  # W is a multiple of 16: loads are 16 bytes wide
        if EXPONENTIALS:
            raw = tl.abs(raw)
            lp = _floor(_log2(raw) * LN_2) - logsum
            p = raw * _exp(-logsum)
        else:
            lp = _floor(_z(raw, v, inside, bias, inv_temperature, softcap) - reference - logsum)
            p = _exp(lp)
        p = tl.where(inside & (v != y), p, 0.0)
        big = p >= level
        tail = tl.where(big, 0.0, p)
        step = tl.sum(tail, 0)
        look = tl.max(p, 0)
        mass += step
        mass_squares += tl.sum(tail * tail, 0)
        squares += tl.sum(p * p, 0)
        if (total + step >= level) | (look >= level):
            after = total + tl.cumsum(tail, 0)
            passed = tl.floor(after / level) > tl.floor((after - tail) / level)
            kept = big | (passed & (tail > 0))
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            ok = kept & (place < K)
            tl.store(token + place, v, ok)
            tl.store(w + place, tl.where(big, p, level), ok)
            tl.store(logp + place, lp, ok)
            if slope is not None:
                at = _softcap_slope(_x(raw, v, inside, bias, inv_temperature), softcap)
                tl.store(slope + place, at, ok)
            count += tl.sum(kept.to(tl.float32), 0).to(tl.int32)
            large += tl.sum(big.to(tl.float32), 0).to(tl.int32)
        total += step
        total -= tl.floor(total / level) * level
    return count, large, mass, mass_squares, squares


@triton.jit
def _draw_kernel(
    token, w, logp, slope, sums, values, rows, on, uniform, target, bias, stride, sizes, levels, inv_temperature,
    softcap, row_temperature, EXPONENTIALS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    level, raised, most = levels
    _, _, K = sizes
    n = tl.program_id(0).to(tl.int64)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    known = values + n * WIDTH
    logprob = tl.load(known + LOGPROB)
    entropy = tl.load(known + ENTROPY)
    reference = tl.load(known + REFERENCE)
    logsum = tl.load(known + LOGSUM)
    token += n * K
    w += n * K
    logp += n * K
    row = rows + n * stride
    if slope is not None:
        slope += n * K
    y = tl.load(target + n)
    u = tl.load(uniform + n)
    out = sums + n * SUMS
    none = (y * 0).to(tl.int32)
    count = none
    flat = none
    variance = 0.0
    square = 0.0
    if (tl.load(on + n) != 0) & (entropy == entropy):
        count, large, mass, below, square = _pass(
            token, w, logp, slope, row, sizes, y, u, level, reference, logsum, bias, inv_temperature, softcap,
            EXPONENTIALS, BLOCK_V,
        )  # fmt: skip
        variance = level * mass - below
        if (large + mass / level > most) & (raised > level):
            flat = none + 1
            count, large, mass, below, square = _pass(
                token, w, logp, slope, row, sizes, y, u, raised, reference, logsum, bias, inv_temperature, softcap,
                EXPONENTIALS, BLOCK_V,
            )  # fmt: skip
            variance = raised * mass - below
        miss = _expm1(logprob)
        square += tl.where(logprob == logprob, miss * miss, 0.0)  # NaN: no target
    tl.store(out + COUNT, count.to(tl.float32))
    tl.store(out + FLAT, flat.to(tl.float32))
    tl.store(out + VARIANCE, variance)
    tl.store(out + SQUARE, square)
