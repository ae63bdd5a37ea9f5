"""A few elements of each row's probabilities, drawn for a sampled backward pass; see `rlplus.loss.backends.sampled`.

A row's probabilities p but the target's are sampled by a threshold t. Each p of at least t is kept as it is. A smaller
one is kept where the running sum of the smaller ones, from u t on, passes a multiple of t, and counts as t.

The statistics of a row are sums over its tiles, of some hundred columns each. A tile whose sum is below t has no larger
element, and one whose sums pass no multiple keeps nothing: so few of a peaked row's tiles are read at all.
"""

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from rlplus.kernels.elementwise import FUSION, LN_2, _at_rows, _exp, _expm1, _floor, _log2, _softcap_slope, _x, _z
from rlplus.kernels.linear_logprob import PARTIALS, check, check_rows
from rlplus.kernels.row_values import ENTROPY, LOGPROB, LOGSUM, REFERENCE, WIDTH

# Columns of sums (n, SUMS).
COUNT = tl.constexpr(0)
FLAT = tl.constexpr(1)
VARIANCE = tl.constexpr(2)
SQUARE = tl.constexpr(3)
SUMS = tl.constexpr(4)


def draw_rows(
    token: Tensor, w: Tensor, logp: Tensor, slope: Tensor | None, sums: Tensor, partial: Tensor, values: Tensor,
    rows: Tensor, V: int, tile: int, on: Tensor, uniform: Tensor, threshold: float, most: int, target: Tensor,
    bias: Tensor | None, temperature: float, softcap: float | None = None, row_temperature: Tensor | None = None, *,
    exponentials: bool,
) -> None:  # fmt: skip
    """Fill token int32, w, logp and, behind a softcap, slope, fp32 (n, K), of rows `on` (n,) int32, and sums (n, 4).

    rows (n, W): fp32 logits, or exponentials (then without a softcap), as `finish_rows` left them and values, or others
    whose absolute values have the sum e^LOGSUM; partial (tiles, PARTIALS, n) fp32 are the sums of `tile` columns each,
    a power of 2, with the reference of values where `rows` are others. K of at least most + 2. sums has each row's
    number of elements, whether its threshold was raised to 1 / most, since it would keep more, and estimates without a
    bias of the sum of w's variances and of the sum of squares of the gradient of logprob by z. A row that has a NaN
    keeps nothing.
    """
    check(values, target, row_temperature)
    check_rows("rows", rows, len(target), V, None if exponentials else float32)
    n, K = token.shape
    tiles = triton.cdiv(V, tile)
    if n != len(target) or token.dtype != int32 or most + 2 > K or (exponentials and softcap is not None):
        got = f"{token.dtype} {tuple(token.shape)}, most {most}, softcap {softcap}"
        raise ValueError(f"want token int32 ({len(target)}, most + 2), exponentials without a softcap; got {got}")
    if tile & (tile - 1) or partial.shape != (tiles, PARTIALS.value, n) or not partial.is_contiguous():
        want = f"tile a power of 2, and partial ({tiles}, {PARTIALS.value}, {n}), contiguous"
        raise ValueError(f"want {want}; got {tile} and {tuple(partial.shape)}")
    if n:
        together = triton.next_power_of_2(tiles)
        _draw_kernel[(n,)](
            token, w, logp, slope, sums, partial, values, rows, on, uniform, target, bias, rows.stride(0),
            (V, rows.shape[1], K), (threshold, max(threshold, 1 / most), float(most)), 1 / temperature, softcap,
            row_temperature, exponentials, tile, together, num_warps=8 if max(together, 2 * tile) > 1024 else 4,
            **FUSION,
        )  # fmt: skip


@triton.jit
def _mass(partial, tiles, there, n, reference, logsum):
    """The mass of a row's tiles."""
    N = tl.num_programs(0)
    part = partial + (tiles * PARTIALS).to(tl.int64) * N + n
    shift = _floor(tl.load(part, there, 0.0) - reference - logsum)
    return tl.where(there, tl.load(part + N, there, 0.0) * _exp(shift), 0.0)  # 0 times infinity where there is none


@triton.jit
def _probabilities(
    row, tile, sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """v, what is there, log p and p of a tile; p is 0 at the target."""
    V, W, _ = sizes
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < V
    raw = tl.load(row + v, v < W, 0.0).to(tl.float32)
    if EXPONENTIALS:
        raw = tl.abs(raw)
        logp = _floor(_log2(raw) * LN_2) - logsum
        p = raw * _exp(-logsum)
    else:
        logp = _floor(_z(raw, v, inside, bias, inv_temperature, softcap) - reference - logsum)
        p = _exp(logp)
    return v, raw, logp, tl.where(inside & (v != y), p, 0.0)


@triton.jit
def _tails(
    mass, level, row, sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The mass of each tile's p below the level, and how many are not."""
    tiles = tl.arange(0, mass.shape[0])
    tail = mass
    heavy = (mass >= level).to(tl.int32)
    large = tl.sum(heavy * 0, 0)
    rank = tl.where(heavy > 0, tl.cumsum(heavy, 0), 0)
    for k in range(1, tl.sum(heavy, 0) + 1):
        tile = tl.sum(tl.where(rank == k, tiles, 0), 0)
        _, _, _, p = _probabilities(
            row, tile, sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS, BLOCK_V
        )
        big = p >= level
        tail = tl.where(rank == k, tl.sum(tl.where(big, 0.0, p), 0), tail)
        large += tl.sum(big.to(tl.int32), 0)
    return tail, large


@triton.jit
def _keep(
    token, w, logp, slope, partial, n, mass, tail, level, u, row, sizes, y, reference, logsum, bias, inv_temperature,
    softcap, EXPONENTIALS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the elements that are kept; their number, and estimates of the sums of squares of small p and of all."""
    K = sizes[2]
    after = u * level + tl.cumsum(tail, 0)
    before = after - tail
    hit = (tl.floor(after / level) > tl.floor(before / level)) & (tail > 0)
    heavy = (mass >= level).to(tl.int32)
    read = (hit | (heavy > 0)).to(tl.int32)
    rank = tl.where(read > 0, tl.cumsum(read, 0), 0)
    codes = 2 * tl.arange(0, mass.shape[0]) + heavy  # one sum over the tiles finds both
    count = tl.sum(heavy * 0, 0)
    small = 0.0
    square = 0.0
    for k in range(1, tl.sum(read, 0) + 1):
        code = tl.sum(tl.where(rank == k, codes, 0), 0)
        start = tl.sum(tl.where(rank == k, before, 0.0), 0)
        tile = code // 2
        is_heavy = code % 2 > 0
        v, raw, lp, p = _probabilities(
            row, tile, sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS, BLOCK_V
        )
        big = p >= tl.where(is_heavy, level, 2.0)  # a light tile has no large p, though one may be rounded up to it
        rest = tl.where(big, 0.0, p)
        start -= tl.floor(start / level) * level
        # The stored exponentials are rounded: those of a light tile together have the mass by which it was chosen.
        total = tl.sum(rest, 0)
        whole = tl.where(is_heavy, total, _mass(partial, tile, tile >= 0, n, reference, logsum))
        rest *= whole / tl.maximum(total, 1e-37)
        sum_after = start + tl.cumsum(rest, 0)
        sum_before = sum_after - rest
        passed = (tl.floor(sum_after / level) > tl.floor(sum_before / level)) & (rest > 0)
        kept = big | passed
        place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        ok = kept & (place < K)
        weight = tl.where(big, p, level)
        tl.store(token + place, v, ok)
        tl.store(w + place, weight, ok)
        tl.store(logp + place, lp, ok)
        if slope is not None:
            tl.store(slope + place, _softcap_slope(_x(raw, v, v < sizes[0], bias, inv_temperature), softcap), ok)
        count = tl.minimum(count + tl.sum(kept.to(tl.int32), 0), K)
        each = tl.where(kept, weight * p, 0.0)
        square += tl.sum(each, 0)
        small += tl.sum(tl.where(big, 0.0, each), 0)
    return count, small, square


@triton.jit
def _draw_kernel(
    token, w, logp, slope, sums, partial, values, rows, on, uniform, target, bias, stride, sizes, levels,
    inv_temperature, softcap, row_temperature, EXPONENTIALS: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    level, raised, most = levels
    V, _, K = sizes
    n = tl.program_id(0).to(tl.int64)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    known = values + n * WIDTH
    logprob = tl.load(known + LOGPROB)
    entropy = tl.load(known + ENTROPY)
    reference = tl.load(known + REFERENCE)
    logsum = tl.load(known + LOGSUM)
    row = rows + n * stride
    if slope is not None:
        slope += n * K
    y = tl.load(target + n)
    out = sums + n * SUMS
    count = (y * 0).to(tl.int32)  # a tensor in the interpreter, too
    flat = count
    variance = 0.0
    square = 0.0
    if (tl.load(on + n) != 0) & (entropy == entropy):
        tiles = tl.arange(0, TILES)
        mass = _mass(partial, tiles, tiles < tl.cdiv(V, BLOCK_V), n, reference, logsum)
        tail, large = _tails(
            mass, level, row, sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS, BLOCK_V
        )
        if (large + tl.sum(tail, 0) / level > most) & (raised > level):
            flat += 1
            level = raised
            tail, large = _tails(
                mass, level, row, sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS, BLOCK_V
            )
        count, small, square = _keep(
            token + n * K, w + n * K, logp + n * K, slope, partial, n, mass, tail, level, tl.load(uniform + n), row,
            sizes, y, reference, logsum, bias, inv_temperature, softcap, EXPONENTIALS, BLOCK_V,
        )  # fmt: skip
        variance = level * tl.sum(tail, 0) - small
        miss = _expm1(logprob)
        square += tl.where(logprob == logprob, miss * miss, 0.0)  # NaN: no target
    tl.store(out + COUNT, count.to(tl.float32))
    tl.store(out + FLAT, flat.to(tl.float32))
    tl.store(out + VARIANCE, variance)
    tl.store(out + SQUARE, square)
