"""Draws of the `cpp` backend for a sampled backward pass, by the native library."""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.loss.backends.native import (
    CHUNK_ROWS,
    ENTROPY,
    LOGPROB,
    cap_of,
    dense,
    fill_logits,
    gemm_of,
    give_back,
    int64,
    inverse_temperature,
    native,
    pointer,
    row_statistics,
    take_scratch,
    wide_bias,
)
from rlplus.loss.backends.sampled import MOST, Drawn
from rlplus.loss.head.head import Head

CAPACITY = MOST + 8
CACHED_BYTES = 1e6  # logarithms of so many rows at a time stay in the second-level cache of a core
COLUMNS = 5  # fp32 or int32 numbers of a row: count, flat, variance, square, slope of the target's softcap


def draws(head: Head, on: Tensor, scratch_bytes: float) -> Iterator[tuple[slice, Drawn]]:
    """As `sampled.Drawer` has it."""
    N = len(head.target)
    V = len(head.weight)
    head = head._replace(hidden=dense(head.hidden), weight=dense(head.weight), target=head.target.contiguous())
    size = max(1, min(N, CHUNK_ROWS[head.hidden.dtype], int(scratch_bytes // (4 * V))))
    scratch = take_scratch(size * V)
    bias = wide_bias(head)
    for start in range(0, N, size):
        rows = slice(start, min(start + size, N))
        yield rows, _draw(head.rows(rows), on[rows], bias, scratch[: (rows.stop - start) * V].view(-1, V))
    give_back(scratch)


def _draw(head: Head, on: Tensor, bias: Tensor | None, z: Tensor) -> Drawn:
    """z (n, V): memory of the logits."""
    fill_logits(head, gemm_of(head), z)
    statistics = row_statistics(z, head, bias)
    slope = None if head.softcap is None else z.new_empty(len(z), CAPACITY)
    token, w, logp, rows = _drawn(head, on, bias, z, statistics, slope)
    row, kept = _kept(rows)
    variance, square, own_slope = rows[:, 2:].unbind(1)
    return Drawn(
        logprob=statistics[:, LOGPROB],
        entropy=statistics[:, ENTROPY],
        row=row,
        token=token[kept].long(),
        w=w[kept],
        logp=logp[kept],
        slope=None if slope is None else slope[kept],
        own_slope=None if slope is None else own_slope,
        variance=variance,
        square=square,
        flat=rows[:, 1].view(torch.int32) != 0,
    )


def draw(head: Head, dz: Tensor, size: Tensor, on: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `drawn_gradients.Draw` has it, in fp32: the logarithms of dz are logits whose softmax is drawn from."""
    none = torch.full_like(head.target, -1)
    plain = Head(head.hidden, head.weight, None, none, 1.0, uniform=head.uniform, threshold=head.threshold)
    step = torch.get_num_threads() * max(1, int(CACHED_BYTES // (dz.itemsize * dz.shape[1])))
    for start in range(0, len(dz), step):
        rows = slice(start, start + step)
        z = dz[rows].abs().log_()
        part = plain.rows(rows)
        token, w, _, found = _drawn(part, on[rows], None, z, row_statistics(z, part, None), None)
        row, kept = _kept(found)
        yield row + start, token[kept].long(), w[kept]


def _drawn(
    head: Head, on: Tensor, bias: Tensor | None, z: Tensor, statistics: Tensor, slope: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token, w, logp (n, CAPACITY), and numbers of each row (n, COLUMNS); slope is filled."""
    assert head.uniform is not None
    n, V = z.shape
    token = torch.empty(n, CAPACITY, dtype=torch.int32)
    w = z.new_empty(n, CAPACITY)
    logp = z.new_empty(n, CAPACITY)
    rows = z.new_empty(n, COLUMNS)
    on = on.to(torch.uint8).contiguous()
    inverse = inverse_temperature(head)
    native().rlplus_draw(
        pointer(z), pointer(bias), pointer(head.target), int64(n), int64(V), pointer(inverse), cap_of(head),
        pointer(statistics), pointer(on), pointer(head.uniform.contiguous()), ctypes.c_double(head.threshold),
        int64(MOST), int64(CAPACITY), *map(pointer, (token, w, logp, slope, rows)), torch.get_num_threads(),
    )  # fmt: skip
    return token, w, logp, rows


def _kept(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each element, and where elements are in (n, CAPACITY)."""
    count = rows[:, 0].view(torch.int32).long()
    assert not len(count) or count.max() <= CAPACITY, "a threshold of 1 / MOST or more keeps MOST + 1 elements at most"
    return torch.arange(len(count)).repeat_interleave(count), torch.arange(CAPACITY) < count[:, None]
