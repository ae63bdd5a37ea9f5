"""Log-probability and entropy of tokens, and the gradient of their logits.

    logits = hidden weight^T                 x = (logits + bias) / temperature
    z = softcap tanh(x / softcap) / row_temperature, without a softcap x / row_temperature
    p = softmax(z)                           logprob = log p[target]
    entropy = -sum_v p[v] log p[v]           dz = dlogprob (onehot - p) - dentropy p (log p + entropy)
    dlogits = dz (1 - tanh^2(x / softcap)) / (temperature row_temperature)

The definition is `rlplus.loss.backends.reference.logprob_and_entropy`. fp32 arithmetic, results in nats. Three ways to
the statistics of the rows: `row_statistics` reads logits that a GEMM left, `add_statistics` logits of one block of the
vocabulary after another; `linear_statistics` is that GEMM, with the statistics in its epilogue, and stores the logits,
or their exponentials (exponentials.py), only on request. `row_gradient` reads the logits once and writes only rows with
a slot.

Logits and their gradient are (n, W), W >= V: rows of a multiple of 16 elements keep loads and stores 16 bytes wide
whatever the size V of the vocabulary. The columns past V hold anything and get anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlplus.kernels.elementwise import LOWEST, _at_rows, _exp, _floor, _softcap_slope, _x, _z
from rlplus.kernels.tiling import DEFAULT, FP32_TILE, TILES, Block, Tile, Tiling

FUSION = {"enable_fp_fusion": True}  # stated: the environment could switch it off, and with it the bits of the results
# The statistics see a block as a matrix of ROWS; a thread has VECTOR whole columns of it.
ROWS, VECTOR = tl.constexpr(8), tl.constexpr(4)

# Columns of `values` (n, WIDTH), what is known of a token.
LOGPROB, ENTROPY, MAX, LOGSUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DLOGPROB, DENTROPY, WIDTH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
PARTIALS = tl.constexpr(3)  # numbers per part of a row: max z, sum of e^(z - max), sum of e^(z - max) (z - max)
E_SCALE = tl.constexpr(2.0**15)  # scale of the exponentials: fp16 then has its 11 bits from there down to 2^-14
COMBINE = {"BLOCK_N": 16, "BLOCK_T": 64, "num_warps": 4, **FUSION}


def row_statistics(
    values: Tensor, logits: Tensor, V: int, target: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None = None, row_temperature: Tensor | None = None, tiling: Tiling = DEFAULT,
) -> None:  # fmt: skip
    """Fill the columns LOGPROB, ENTROPY, MAX (of z) and LOGSUM (of e^(z - MAX)) of values (n, WIDTH) fp32.

    logits (n, W) fp32, contiguous in W; target (n,) int64; bias (V,) of any floating dtype or None; row_temperature
    (n,) fp32 or None, which means 1. logprob is NaN where the target is no token; a row with a NaN gets NaN
    everywhere, and without a softcap, which makes infinite logits finite, so does one with +inf or nothing but -inf.
    """
    n, blocks = len(target), triton.cdiv(V, tiling.statistics.BLOCK_V)
    each = triton.cdiv(blocks, min(blocks, triton.cdiv(tiling.programs, max(n, 1))))  # read by a program, per row
    parts = triton.cdiv(blocks, each)
    partial = values.new_empty(parts, PARTIALS.value, n) if parts > 1 else None
    rest = (temperature, softcap, row_temperature, each, tiling.statistics)
    _launch_statistics(values, partial, logits, V, target, bias, *rest)
    if partial is not None:
        finish_statistics(values, partial, V, target)


def begin_statistics(n: int, device: torch.device) -> Tensor:
    """Initial statistics of n rows, to which `add_statistics` adds."""
    partial = torch.zeros(1, PARTIALS.value, n, dtype=torch.float32, device=device)
    partial[:, 0] = LOWEST.value
    return partial


def add_statistics(
    values: Tensor, partial: Tensor, logits: Tensor, V: int, target: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None = None, row_temperature: Tensor | None = None, block: Block = DEFAULT.statistics,
) -> None:  # fmt: skip
    """Add a block of V tokens of the vocabulary to `partial`, and the logits of targets in it to values.

    As in `row_statistics`; target and bias are the block's, a target outside [0, V) is in another one.
    """
    rest = (temperature, softcap, row_temperature, triton.cdiv(V, block.BLOCK_V), block)
    _launch_statistics(values, partial, logits, V, target, bias, *rest, carry=True)


def finish_statistics(values: Tensor, partial: Tensor, V: int, target: Tensor) -> None:
    """Fill values (n, WIDTH) from `partial` (parts, 3, n), the statistics of parts of rows of V tokens in all."""
    n = len(target)
    if n:
        grid = (triton.cdiv(n, COMBINE["BLOCK_N"]),)
        _combine_kernel[grid](values, partial, target, n, V, len(partial), **COMBINE)


def _launch_statistics(
    values: Tensor, partial: Tensor | None, logits: Tensor, V: int, target: Tensor, bias: Tensor | None,
    temperature: float, softcap: float | None, row_temperature: Tensor | None, each: int, block: Block,
    carry: bool = False,
) -> None:  # fmt: skip
    _check(values, logits, V, target, row_temperature)
    if len(target):
        grid = (len(target), 1 if partial is None else len(partial))
        _statistics_kernel[grid](
            values, partial, logits, target, bias, (logits.stride(0), V, logits.shape[1], each * block.BLOCK_V),
            1 / temperature, softcap, row_temperature, carry, **block._asdict(), **FUSION,
        )  # fmt: skip


def row_gradient(
    dlogits: Tensor, slot: Tensor, values: Tensor, logits: Tensor, V: int, target: Tensor, bias: Tensor | None,
    temperature: float, softcap: float | None = None, row_temperature: Tensor | None = None,
    block: Block = DEFAULT.gradient,
) -> None:  # fmt: skip
    """Write the gradient of row i of the chunk into row slot[i] of dlogits; with slot -1, nowhere.

    It is 0, whatever the logits are, where DLOGPROB and DENTROPY are 0.
    dlogits (m, W) of a floating dtype, contiguous in W; slot (n,) int64 in [-1, m); values as the statistics left them,
    with DLOGPROB and DENTROPY filled in; the others as there.
    """
    _check(values, logits, V, target, row_temperature)
    W = logits.shape[1]
    if dlogits.shape[1] != W or dlogits.stride(1) != 1 or slot.shape != target.shape:
        got = f"{tuple(dlogits.shape)} with strides {dlogits.stride()} and {tuple(slot.shape)}"
        raise ValueError(f"want dlogits (m, {W}), contiguous in W, and slot {tuple(target.shape)}; got {got}")
    if len(target):
        _gradient_kernel[(len(target), triton.cdiv(W, block.BLOCK_V))](
            dlogits, slot, values, logits, target, bias, dlogits.stride(0), logits.stride(0), V, W, 1 / temperature,
            softcap, row_temperature, **block._asdict(), **FUSION,
        )  # fmt: skip


def tiles(hidden: Tensor) -> tuple[Tile, ...]:
    """The tiles for the tensor's device and dtype: alone, with a bias or logits to store, then others to try."""
    if hidden.dtype == torch.float32 and hidden.is_cuda:
        return (FP32_TILE, FP32_TILE)
    major = torch.cuda.get_device_capability(hidden.device)[0] if hidden.is_cuda else 0
    return TILES[max(known for known in TILES if known <= major)]


def default_tile(hidden: Tensor, more: bool) -> Tile:
    """The default tile of the tensor's device and dtype; `more`: with a bias or logits to store."""
    return tiles(hidden)[more]


def _tma_reads(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _check(
    values: Tensor, logits: Tensor | None, V: int, target: Tensor, row_temperature: Tensor | None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:  # fmt: skip
    n, own = len(target), row_temperature
    if own is not None and (own.shape != (n,) or own.dtype != torch.float32 or not own.is_contiguous()):
        raise ValueError(f"want row_temperature ({n},) fp32, contiguous; got {own.dtype} {tuple(own.shape)}")
    if logits is not None and (
        logits.ndim != 2 or len(logits) != n or logits.shape[1] < V or logits.stride(1) != 1
        or logits.dtype not in dtypes
    ):  # fmt: skip
        got = f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}"
        kinds = "fp32" if len(dtypes) == 1 else "fp32 or fp16"
        raise ValueError(f"want logits ({n}, W) {kinds}, W >= {V}, contiguous in W; got {got}")
    if values.shape != (n, WIDTH.value) or not values.is_contiguous() or not target.is_contiguous():
        got = f"{tuple(values.shape)} and {tuple(target.shape)} with strides {values.stride()}, {target.stride()}"
        raise ValueError(f"want values ({n}, {WIDTH.value}) and target (n,), contiguous; got {got}")


def linear_statistics(
    values: Tensor, logits: Tensor | None, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    temperature: float, softcap: float | None = None, row_temperature: Tensor | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Fill the columns LOGPROB, ENTROPY, MAX and LOGSUM of values (n, WIDTH) fp32, as `row_statistics` does.

    -> tops (ceil(V / BLOCK_V), n) fp32, the largest z of each row in each tile; at least LOWEST.

    hidden (n, H), weight (V, H): bf16, fp16 or fp32, contiguous in H; slow, but right, where their rows are not a
    multiple of 16 bytes apart. logits (n, W) or None: fp32 gets hidden weight^T, fp16 gets E_SCALE e^(z - top). The
    others as there. Allocates 12 ceil(V / BLOCK_V) n bytes, which tops keeps.
    """
    (n, H), V = hidden.shape, len(weight)
    _check(values, logits, V, target, row_temperature, (torch.float32, torch.float16))
    if hidden.shape[1] != weight.shape[1] or not hidden.stride(1) == weight.stride(1) == 1:
        got = ", ".join(f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}" for x in (hidden, weight))
        raise ValueError(f"want hidden (n, H) and weight (V, H), contiguous in H; got {got}")
    tile = tile or default_tile(hidden, logits is not None or bias is not None)
    columns = triton.cdiv(V, tile.BLOCK_V)
    partial = torch.empty(columns, PARTIALS.value, n, dtype=torch.float32, device=hidden.device)
    if not n:
        return partial[:, 0]
    sides, strides = (hidden, weight), (hidden.stride(0), weight.stride(0))
    if tile.tma and all(map(_tma_reads, sides)):
        shapes = ((tile.BLOCK_M, tile.BLOCK_H), (tile.BLOCK_V, tile.BLOCK_H))
        sides = tuple(TensorDescriptor.from_tensor(x, list(s)) for x, s in zip(sides, shapes, strict=True))
        strides = (0, 0)  # the descriptors know
    _tile_kernel[(triton.cdiv(n, tile.BLOCK_M) * columns,)](
        values, partial, logits, *sides, target, bias, (n, V, H, V if logits is None else logits.shape[1]),
        (*strides, 0 if logits is None else logits.stride(0)), 1 / temperature, softcap, row_temperature,
        tile.BLOCK_M, tile.BLOCK_V, tile.BLOCK_H, tile.GROUP_M, sides[0] is not hidden,
        logits is not None and logits.dtype == torch.float16,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **FUSION,
    )  # fmt: skip
    finish_statistics(values, partial, V, target)
    return partial[:, 0]


@triton.jit
def _add_tile(m, s, t, z):
    """Take z (rows, columns) into the statistics m, s, t (columns,) of its columns.

    Online softmax: m = max z, s = sum e^(z-m), t = sum e^(z-m) (z-m). Shifting t by m keeps the small entropy of a
    peaked policy accurate, where lse - E[z] would cancel.
    """
    m_old, m = m, tl.maximum(m, tl.max(z, 0))
    up, d = _floor(m_old - m), _floor(z - m[None, :])
    decay, e = _exp(up), _exp(d)
    return m, decay * s + tl.sum(e, 0), decay * (t + up * s) + tl.sum(e * d, 0)


@triton.jit
def _statistics_kernel(
    values, partial, logits, target, bias, sizes, inv_temperature, softcap, row_temperature,
    CARRY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Statistics of a row, or with `partial` of a part of it, added to the stored ones if CARRY."""
    stride, V, W, width = sizes
    n = tl.program_id(0).to(tl.int64)  # 15k rows of 152k logits are past int32
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, n, True)
    first = tl.program_id(1) * width
    last = tl.minimum(first + width, V)
    row = logits + n * stride
    part = partial
    if partial is not None:
        part += tl.program_id(1) * PARTIALS * tl.num_programs(0) + n
    COLUMNS: tl.constexpr = BLOCK_V // ROWS
    column = tl.arange(0, COLUMNS)
    m = tl.full((COLUMNS,), LOWEST, tl.float32)
    s, t = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    if CARRY:
        m = tl.where(column == 0, tl.load(part), m)
        s = tl.where(column == 0, tl.load(part + tl.num_programs(0)), s)
        t = tl.where(column == 0, tl.load(part + 2 * tl.num_programs(0)), t)
    offset = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
    offset = tl.max_contiguous(offset, (1, VECTOR))  # not more with a bias of two bytes: threads would share columns
    whole = first + (last - first) // BLOCK_V * BLOCK_V  # a multiple of 16, as the compiler can see
    for start in range(first, whole, BLOCK_V):  # no masks, and no thread waits for another
        raw = tl.load(row + start + offset)
        m, s, t = _add_tile(m, s, t, _z(raw, start + offset, True, bias, inv_temperature, softcap))
    if whole < last:
        v = whole + offset
        z = _z(tl.load(row + v, v < W, 0.0), v, v < V, bias, inv_temperature, softcap)
        m, s, t = _add_tile(m, s, t, tl.where(v < V, z, -float("inf")))
    top = tl.max(m, 0)
    d = _floor(m - top)
    e = _exp(d)
    m, s, t = top, tl.sum(e * s, 0), tl.sum(e * (t + d * s), 0)

    y = tl.load(target + n)
    known = (y >= first) & (y < last)
    at = tl.where(known, y, 0)
    z_target = _z(tl.load(row + at), at, True, bias, inv_temperature, softcap)
    out = values + n * WIDTH
    if partial is None:
        logsum = tl.log(s)
        tl.store(out + LOGPROB, tl.where(known, _floor(z_target - m - logsum), float("nan")))
        tl.store(out + ENTROPY, logsum - t / s)
        tl.store(out + MAX, m)
        tl.store(out + LOGSUM, logsum)
    else:
        tl.store(out + LOGPROB, z_target, known)  # a placeholder, which `_combine_kernel` replaces
        tl.store(part, m)
        tl.store(part + tl.num_programs(0), s)
        tl.store(part + 2 * tl.num_programs(0), t)


@triton.jit
def _gradient_kernel(
    dlogits, slot, values, logits, target, bias, stride_d, stride, V, W, inv_temperature, softcap, row_temperature,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    to = tl.load(slot + n)
    if to >= 0:
        inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
        if softcap is not None:
            softcap = _at_rows(softcap, row_temperature, n, True)
        v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        out, known = dlogits + to * stride_d + v, values + n * WIDTH
        dlogprob, dentropy = tl.load(known + DLOGPROB), tl.load(known + DENTROPY)
        if (dlogprob != 0) | (dentropy != 0):
            raw = tl.load(logits + n * stride + v, v < W, 0.0)
            z = _z(raw, v, v < V, bias, inv_temperature, softcap)
            logp = _floor(z - tl.load(known + MAX) - tl.load(known + LOGSUM))
            dlogprob, dentropy = dlogprob * inv_temperature, dentropy * inv_temperature
            p = _exp(logp)
            dz = tl.where(v == tl.load(target + n), dlogprob, 0.0) - dlogprob * p  # fused: no rounding before 1 - p
            dz -= dentropy * p * (logp + tl.load(known + ENTROPY))
            if softcap is not None:
                dz *= _softcap_slope(_x(raw, v, v < V, bias, inv_temperature), softcap)
            tl.store(out, dz, v < W)
        else:
            tl.store(out, tl.zeros((BLOCK_V,), tl.float32), v < W)


@triton.jit
def _tile_kernel(
    values, partial, logits, hidden, weight, target, bias, sizes, strides, inv_temperature, softcap, row_temperature,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_M: tl.constexpr, TMA: tl.constexpr,
    EXPONENTIALS: tl.constexpr,
):  # fmt: skip
    n, V, H, W = sizes
    stride_hidden, stride_weight, stride_logits = strides
    tiles_m, tiles_v = tl.cdiv(n, BLOCK_M), tl.cdiv(V, BLOCK_V)
    group, within = tl.program_id(0) // (GROUP_M * tiles_v), tl.program_id(0) % (GROUP_M * tiles_v)
    size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m, tile_v = group * GROUP_M + within % size, within // size
    m, v = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    here = m < n

    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if TMA:
        for k in range(0, H, BLOCK_H):  # zeros come back for what is outside
            a = hidden.load([tile_m * BLOCK_M, k])
            acc = tl.dot(a, weight.load([tile_v * BLOCK_V, k]).T, acc, input_precision="ieee")
    else:
        h = tl.arange(0, BLOCK_H)
        # A weight of 262k rows of 8192 is past int32. Rows outside read row 0: no mask in the loop for them.
        a_at = hidden + tl.where(here, m, 0).to(tl.int64)[:, None] * stride_hidden + h[None, :]
        b_at = weight + tl.where(v < V, v, 0).to(tl.int64)[:, None] * stride_weight + h[None, :]
        for k in range(0, H, BLOCK_H):
            inside = h[None, :] < H - k
            a = tl.load(a_at, inside, 0.0)
            acc = tl.dot(a, tl.load(b_at, inside, 0.0).T, acc, input_precision="ieee")
            a_at += BLOCK_H
            b_at += BLOCK_H

    if logits is not None:
        to = logits + m.to(tl.int64)[:, None] * stride_logits + v[None, :]
        stored = here[:, None] & (v < W)[None, :]
        if not EXPONENTIALS:
            tl.store(to, acc, stored)
    inv_temperature = _at_rows(inv_temperature, row_temperature, m[:, None], here[:, None])
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, m[:, None], here[:, None])
    z = _z(acc, v[None, :], (v < V)[None, :], bias, inv_temperature, softcap)
    z = tl.where((v < V)[None, :], z, -float("inf"))
    y = tl.load(target + m, here, -1)
    z_target = tl.sum(tl.where(v[None, :] == y[:, None], z, 0.0), 1)
    # LOGPROB holds the target's z until the kernels below replace it.
    tl.store(values + m * WIDTH + LOGPROB, z_target, (y // BLOCK_V == tile_v) & (y >= 0) & (y < V))
    top = tl.maximum(tl.max(z, 1), LOWEST)
    d = _floor(z - top[:, None])
    e = _exp(d)
    if EXPONENTIALS:
        tl.store(to, (e * E_SCALE).to(tl.float16), stored)
    out = partial + (tile_v * PARTIALS).to(tl.int64) * n + m
    tl.store(out, top, here)
    tl.store(out + n, tl.sum(e, 1), here)
    tl.store(out + 2 * n, tl.sum(e * d, 1), here)


@triton.jit(do_not_specialize=["n"])  # a multiple of 16 would be summed in another order
def _combine_kernel(values, partial, target, n, V, tiles, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = rows < n
    y = tl.load(target + rows, here, -1)
    out, known = values + rows * WIDTH, (y >= 0) & (y < V)
    z_target = tl.load(out + LOGPROB, here & known, 0.0)  # must precede the sums' barriers: threads may share a row
    m = tl.full((BLOCK_N,), LOWEST, tl.float32)
    s, t = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        at = partial + (tile * PARTIALS).to(tl.int64)[:, None] * n + rows[None, :]
        inside = (tile < tiles)[:, None] & here[None, :]
        m_tile = tl.load(at, inside, -float("inf"))
        s_tile, t_tile = tl.load(at + n, inside, 0.0), tl.load(at + 2 * n, inside, 0.0)
        m_old, m = m, tl.maximum(m, tl.max(m_tile, 0))
        up, d = _floor(m_old - m), _floor(m_tile - m[None, :])
        decay, e = _exp(up), _exp(d)
        t = decay * (t + up * s) + tl.sum(e * (t_tile + d * s_tile), 0)
        s = decay * s + tl.sum(e * s_tile, 0)
    logsum = tl.log(s)
    tl.store(out + LOGPROB, tl.where(known, _floor(z_target - m - logsum), float("nan")), here)
    tl.store(out + ENTROPY, logsum - t / s, here)
    tl.store(out + MAX, m, here)
    tl.store(out + LOGSUM, logsum, here)
