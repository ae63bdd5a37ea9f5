"""Log-probability and entropy of tokens from hidden states: our first GEMM, which keeps no logits.

    logits = hidden weight^T                 x = (logits + bias) / temperature
    z = softcap tanh(x / softcap) / row_temperature, without a softcap x / row_temperature
    p = softmax(z)                           logprob = log p[y], y the target
    entropy = -sum_v p[v] log p[v]

The definition is `rlplus.loss.backends.reference.logprob_and_entropy`. fp32 arithmetic, results in nats.

Each row has a reference rho, usually z[y], a dot product that `target_logits` computes. Relative to it,

    E[v] = e^(z[v] - rho)       s = sum_v E[v] without v = y         t = sum_v E[v] (z[v] - rho) without v = y
    logprob = -log(1 + s)       entropy = log(1 + s) - t / (1 + s)

so no logit is looked at twice, and a nearly sure token keeps all its digits: s is summed without the 1. The sums leave
the GEMM by tiles, `finish_rows` adds them up. Where s overflows, or nearly so, the reference was too small: these rows
are `marked`, listed, and computed again relative to their largest logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlplus.kernels.elementwise import (
    FUSION,
    LN_2,
    LOG2_E,
    LOWEST,
    _at_rows,
    _exp,
    _exp2,
    _floor,
    _log1p,
    _softcap_slope,
    _x,
    _z,
)  # fmt: skip
from rlplus.kernels.row_values import ENTROPY, LOGPROB, LOGSUM, REFERENCE, SLOPE, WIDTH
from rlplus.kernels.tiling import FP32_TILE, TILES, Tile

PARTIALS = tl.constexpr(3)  # numbers per part of a row: its reference, s and t
LARGEST = tl.constexpr(2.0**57)  # s at most, about e^40: a gradient by 1 / (1 + s) is far from underflow
NOTHING = tl.constexpr(-1000.0)  # log E of what does not count: E is 0, and so is its product with this
DOT = {"BLOCK_H": 1024, "num_warps": 4, **FUSION}
ACCUMULATORS = 128 * 256  # fp32 numbers that the programs on one processor sum at the same time: half of its registers
COMBINE = {"BLOCK_N": 16, "BLOCK_T": 64, "num_warps": 4, **FUSION}


def target_logits(
    values: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None = None, row_temperature: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill the columns LOGPROB and REFERENCE of values (n, WIDTH) fp32 with z[y], and SLOPE with dz[y] / dx[y].

    hidden (n, H) and weight (V, H) of the same floating dtype, any strides; target (n,) int64: where it is no token,
    LOGPROB is NaN and the reference token 0's logit. bias (V,) of any floating dtype or None; row_temperature (n,) fp32
    or None, which means 1.
    """
    check(values, target, row_temperature)
    if hidden.shape != (len(target), weight.shape[1]):
        raise ValueError(f"want hidden ({len(target)}, {weight.shape[1]}); got {tuple(hidden.shape)}")
    if len(target):
        _target_kernel[(len(target),)](
            values, hidden, weight, target, bias, weight.shape, (*hidden.stride(), *weight.stride()), 1 / temperature,
            softcap, row_temperature, **DOT,
        )  # fmt: skip


def default_tile(hidden: Tensor, transformed: bool) -> Tile:
    """The default tile of the tensor's device and dtype; transformed: by a bias, softcap or temperatures of rows."""
    if hidden.dtype == torch.float32 and hidden.is_cuda:
        return FP32_TILE
    major = torch.cuda.get_device_capability(hidden.device)[0] if hidden.is_cuda else 0
    return TILES[max(known for known in TILES if known <= major)][transformed]


def linear_exponentials(
    partial: Tensor, exponentials: Tensor | None, values: Tensor, hidden: Tensor, weight: Tensor, target: Tensor,
    bias: Tensor | None, temperature: float, softcap: float | None = None, row_temperature: Tensor | None = None,
    tile: Tile | None = None, listed: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill partial (ceil(V / BLOCK_V), PARTIALS, n) fp32, and exponentials (n, W) unless they are None.

    exponentials, of any floating dtype (with TMA a tile of them must fit into shared memory), W >= V, contiguous in W,
    get E times the derivative of z by x, 0 for the target, whose gradient `exponentials.close_rows` computes; the
    columns past V anything. hidden (n, H), weight (V, H): bf16, fp16 or fp32, contiguous in H;
    slow, but right, where their rows are not a multiple of 16 bytes apart. values as `target_logits` left them; the
    others as there.

    listed: (n,) int64 and () int64, the numbers of the rows to compute and how many of them count. Without exponentials
    each of their tiles has its own reference, its largest logit; with them it is their REFERENCE, which `finish_rows`
    updated.
    """
    n, H = hidden.shape
    V = len(weight)
    check(values, target, row_temperature)
    if exponentials is not None:
        check_rows("exponentials", exponentials, n, V)
    if hidden.shape[1] != weight.shape[1] or any(x.stride(1) != 1 and H > 1 for x in (hidden, weight)):
        got = ", ".join(f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}" for x in (hidden, weight))
        raise ValueError(f"want hidden (n, H) and weight (V, H), contiguous in H; got {got}")
    tile = tile or default_tile(hidden, any(x is not None for x in (bias, softcap, row_temperature)))
    columns = triton.cdiv(V, tile.BLOCK_V)
    if partial.shape != (columns, PARTIALS.value, n) or not partial.is_contiguous():
        raise ValueError(f"want partial ({columns}, {PARTIALS.value}, {n}), contiguous; got {tuple(partial.shape)}")
    if not n:
        return
    matrices: list[Any] = [hidden, weight, exponentials]
    strides = [0 if x is None else x.stride(0) for x in matrices]
    W = V if exponentials is None else exponentials.shape[1]
    tma = tile.tma and listed is None and all(x is None or _tma_reaches(x) for x in matrices)
    if tma:
        boxes = ((tile.BLOCK_M, tile.BLOCK_H), (tile.BLOCK_V, tile.BLOCK_H), (tile.BLOCK_M, tile.BLOCK_V))
        for i, box in enumerate(boxes[: 2 + (exponentials is not None)]):
            matrices[i] = TensorDescriptor.from_tensor(matrices[i], list(box))
            strides[i] = 0  # the descriptor knows its stride
    programs = min(triton.cdiv(n, tile.BLOCK_M) * columns, at_once(hidden, tile))
    hidden, weight, exponentials = matrices
    _tile_kernel[(programs,)](
        partial, exponentials, values, hidden, weight, target, bias, *(listed or (None, None)),
        (n, V, H, W), tuple(strides), 1 / temperature, softcap, row_temperature,
        tile.BLOCK_M, tile.BLOCK_V, tile.BLOCK_H, tile.GROUP_M, tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **FUSION,
    )  # fmt: skip


def at_once(hidden: Tensor, tile: Tile) -> int:
    """Programs of our GEMM: at least as many as a GPU runs at the same time. Each takes one tile after the other."""
    if not hidden.is_cuda:
        return 8  # the interpreter's are one after the other
    processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    return processors * max(1, ACCUMULATORS // (tile.BLOCK_M * tile.BLOCK_V))


def finish_rows(
    values: Tensor, partial: Tensor, V: int, target: Tensor, marked: Tensor | None = None, again: bool = False
) -> None:
    """Fill LOGPROB, ENTROPY, REFERENCE and LOGSUM of values (n, WIDTH) from partial (parts, PARTIALS, n).

    LOGPROB has z[y] before, and is NaN where the target is no token. A row with a NaN or +inf gets NaN everywhere, and
    so does one of nothing but -inf. marked (n,) int32 gets 1 where s is past LARGEST or NaN, 0 elsewhere; LOGPROB of
    such a row stays z[y]. If `again`, `marked` is read, and the other rows stay as they are.
    """
    n = len(target)
    check(values, target, None)
    if n:
        grid = (triton.cdiv(n, COMBINE["BLOCK_N"]),)
        _finish_kernel[grid](values, partial, target, marked, n, V, len(partial), again, **COMBINE)


def _tma_reaches(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def check(values: Tensor, target: Tensor, row_temperature: Tensor | None) -> None:
    n = len(target)
    check_temperature(row_temperature, n)
    if values.shape != (n, WIDTH.value) or not values.is_contiguous() or not target.is_contiguous():
        got = f"{tuple(values.shape)} and {tuple(target.shape)} with strides {values.stride()}, {target.stride()}"
        raise ValueError(f"want values ({n}, {WIDTH.value}) and target (n,), contiguous; got {got}")


def check_temperature(x: Tensor | None, n: int) -> None:
    if x is not None and (x.shape != (n,) or x.dtype != torch.float32 or not x.is_contiguous()):
        raise ValueError(f"want row_temperature ({n},) fp32, contiguous; got {x.dtype} {tuple(x.shape)}")


def check_rows(name: str, x: Tensor, n: int, V: int, dtype: torch.dtype | None = None) -> None:
    if x.ndim != 2 or len(x) != n or x.shape[1] < V or x.stride(1) != 1 or dtype not in (None, x.dtype):
        kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
        got = f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        raise ValueError(f"want {name} ({n}, W){kind}, W >= {V}, contiguous in W; got {got}")


@triton.jit
def _target_kernel(
    values, hidden, weight, target, bias, sizes, strides, inv_temperature, softcap, row_temperature,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    V, H = sizes
    stride_n, stride_h, stride_v, stride_w = strides
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(target + n)
    known = (y >= 0) & (y < V)
    y = tl.where(known, y, 0)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(0, H, BLOCK_H):
        h = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
        a = tl.load(hidden + n * stride_n + h * stride_h, h < H, 0.0).to(tl.float32)
        total += a * tl.load(weight + y * stride_v + h * stride_w, h < H, 0.0).to(tl.float32)
    inv_temperature = _at_rows(inv_temperature, row_temperature, n, True)
    logit = tl.sum(total, 0)
    out = values + n * WIDTH
    if softcap is None:
        tl.store(out + SLOPE, 1.0)
    else:
        softcap = _at_rows(softcap, row_temperature, n, True)
        tl.store(out + SLOPE, _softcap_slope(_x(logit, y, True, bias, inv_temperature), softcap))
    z = tl.maximum(_z(logit, y, True, bias, inv_temperature, softcap), LOWEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + LOGPROB, tl.where(known, z, float("nan")))
    tl.store(out + REFERENCE, z)


@triton.jit
def _tile_kernel(
    partial, exponentials, values, hidden, weight, target, bias, listed, count, sizes, strides,
    inv_temperature, softcap, row_temperature,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_M: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    rows, V, _, _ = sizes
    if listed is not None:
        rows = tl.load(count).to(tl.int32)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_v = tl.cdiv(V, BLOCK_V)
    for tile in range(tl.program_id(0), tiles_m * tiles_v, tl.num_programs(0)):
        group = tile // (GROUP_M * tiles_v)
        within = tile % (GROUP_M * tiles_v)
        size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        _tile(
            partial, exponentials, values, hidden, weight, target, bias, listed, rows, sizes, strides,
            inv_temperature, softcap, row_temperature, group * GROUP_M + within % size, within // size,
            BLOCK_M, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip


@triton.jit
def _tile(
    partial, exponentials, values, hidden, weight, target, bias, listed, rows, sizes, strides,
    inv_temperature, softcap, row_temperature, tile_m, tile_v,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    n, V, H, W = sizes
    stride_hidden, stride_weight, stride_e = strides
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    here = m < rows
    if listed is not None:
        m = tl.load(listed + m, here, 0).to(tl.int32)

    acc = _products(
        hidden, weight, tl.where(here, m, 0), tl.where(v < V, v, 0), tile_m, tile_v, H, stride_hidden, stride_weight,
        BLOCK_M, BLOCK_V, BLOCK_H, TMA,
    )  # fmt: skip
    reference = tl.load(values + m * WIDTH + REFERENCE, here, 0.0)
    inv_temperature = _at_rows(inv_temperature, row_temperature, m[:, None], here[:, None])
    if softcap is not None:
        softcap = _at_rows(softcap, row_temperature, m[:, None], here[:, None])
    if listed is not None and exponentials is None:
        z = _z(acc, v[None, :], (v < V)[None, :], bias, inv_temperature, softcap)
        reference = tl.max(tl.where((v < V)[None, :], tl.maximum(z, LOWEST), LOWEST), 1)
    d = _logs(acc, reference[:, None], v[None, :], (v < V)[None, :], bias, inv_temperature, softcap)
    y = tl.load(target + m, here, -1)
    y = tl.where((y >= 0) & (y < V), y, -1).to(tl.int32)  # cheaper to compare with
    # Few blocks hold targets of their own rows: the others need no comparison of every column.
    if ((tile_v + 1) * BLOCK_V > V) | (tl.max((y // BLOCK_V == tile_v).to(tl.int32), 0) > 0):
        d = tl.where((v[None, :] == y[:, None]) | (v >= V)[None, :], NOTHING, d)
    e, s, t = _sums(d)
    out = partial + (tile_v * PARTIALS).to(tl.int64) * n + m
    tl.store(out, reference, here)
    tl.store(out + n, s, here)
    tl.store(out + 2 * n, t, here)
    if exponentials is not None:
        if softcap is not None:
            e *= _softcap_slope(_x(acc, v[None, :], (v < V)[None, :], bias, inv_temperature), softcap)
        if TMA:  # elements outside are left out
            exponentials.store([tile_m * BLOCK_M, tile_v * BLOCK_V], e.to(exponentials.dtype))
        else:
            to = exponentials + m.to(tl.int64)[:, None] * stride_e + v[None, :]
            tl.store(to, e.to(exponentials.dtype.element_ty), here[:, None] & (v < W)[None, :])


@triton.jit
def _products(
    hidden, weight, m, v, tile_m, tile_v, H, stride_hidden, stride_weight, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of hidden weight^T; m, v: its rows of both, or row 0 in the place of those outside."""
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if TMA:
        for k in range(0, H, BLOCK_H):  # zeros come back for what is outside
            a = hidden.load([tile_m * BLOCK_M, k])
            acc = tl.dot(a, weight.load([tile_v * BLOCK_V, k]).T, acc, input_precision="ieee")
    else:
        h = tl.arange(0, BLOCK_H)
        # A weight of 262k rows of 8192 is past int32. Rows outside read row 0: no mask in the loop for them.
        a_at = hidden + m.to(tl.int64)[:, None] * stride_hidden + h[None, :]
        b_at = weight + v.to(tl.int64)[:, None] * stride_weight + h[None, :]
        for k in range(0, H, BLOCK_H):
            inside = h[None, :] < H - k
            a = tl.load(a_at, inside, 0.0)
            acc = tl.dot(a, tl.load(b_at, inside, 0.0).T, acc, input_precision="ieee")
            a_at += BLOCK_H
            b_at += BLOCK_H
    return acc


@triton.jit
def _logs(logits, reference, v, inside, bias, inv_temperature, softcap):
    """The logarithms of E in base 2."""
    if softcap is None:  # one multiplication and addition
        reference *= LOG2_E
        if bias is not None:
            reference = _floor(reference)  # -inf - -inf would be NaN
        d = _x(logits, v, inside, bias, inv_temperature * LOG2_E) - reference
    else:
        d = (_z(logits, v, inside, bias, inv_temperature, softcap) - reference) * LOG2_E
    if bias is not None:
        d = _floor(d)  # a bias of -inf
    return d


@triton.jit
def _sums(d):
    """E = 2^d, and its sums s and t over columns."""
    e = _exp2(d)
    return e, tl.sum(e, 1), tl.sum(e * d, 1) * LN_2


@triton.jit(do_not_specialize=["n"])  # a multiple of 16 would be summed in another order
def _finish_kernel(
    values, partial, target, marked, n, V, parts,
    AGAIN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = rows < n
    if AGAIN:
        here = here & (tl.load(marked + rows, here, 0) != 0)
    y = tl.load(target + rows, here, -1)
    out = values + rows * WIDTH
    known = (y >= 0) & (y < V)
    z = tl.load(out + LOGPROB, here & known, 0.0)  # must precede the sums' barriers: threads may share a row
    m = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    s = tl.zeros((BLOCK_N,), tl.float32)
    t = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, parts, BLOCK_T):
        part = start + tl.arange(0, BLOCK_T)
        at = partial + (part * PARTIALS).to(tl.int64)[:, None] * n + rows[None, :]
        inside = (part < parts)[:, None] & here[None, :]
        m_part = tl.load(at, inside, -float("inf"))
        s_part = tl.load(at + n, inside, 0.0)
        t_part = tl.load(at + 2 * n, inside, 0.0)
        m_old = m
        m = tl.maximum(m, tl.max(m_part, 0))
        up = _floor(m_old - m)
        d = _floor(m_part - m[None, :])
        decay = _exp(up)
        e = _exp(d)
        t = decay * (t + up * s) + tl.sum(e * (t_part + d * s_part), 0)
        s = decay * s + tl.sum(e * s_part, 0)
    d = _floor(z - m)
    e_target = tl.where(known, _exp(d), 0.0)
    logsum = tl.where(m > LOWEST, _log1p(s + (e_target - 1.0)), float("nan"))
    tl.store(out + ENTROPY, logsum - (t + e_target * d) / (s + e_target), here)
    tl.store(out + REFERENCE, m, here)
    tl.store(out + LOGSUM, logsum, here)
    logprob = tl.where(known, _floor(d - logsum), float("nan"))
    if marked is not None and not AGAIN:
        bad = (s <= LARGEST) == 0
        tl.store(marked + rows, bad.to(tl.int32), here)
        logprob = tl.where(bad & known, z, logprob)
    tl.store(out + LOGPROB, logprob, here)
