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
    assert head.uniform is not None
    n, V = z.shape
    capacity = MOST + 8
    inverse = inverse_temperature(head)
    fill_logits(head, gemm_of(head), z)
    statistics = row_statistics(z, head, bias)
    token = torch.empty(n, capacity, dtype=torch.int32)
    w = z.new_empty(n, capacity)
    logp = z.new_empty(n, capacity)
    slope = None if head.softcap is None else z.new_empty(n, capacity)
    rows = z.new_empty(n, COLUMNS)
    on = on.to(torch.uint8).contiguous()
    native().rlplus_draw(
        pointer(z), pointer(bias), pointer(head.target), int64(n), int64(V), pointer(inverse), cap_of(head),
        pointer(statistics), pointer(on), pointer(head.uniform.contiguous()), ctypes.c_double(head.threshold),
        int64(MOST), int64(capacity), *map(pointer, (token, w, logp, slope, rows)), torch.get_num_threads(),
    )  # fmt: skip
    count, flat = rows[:, :2].view(torch.int32).long().unbind(1)
    variance, square, own_slope = rows[:, 2:].unbind(1)
    assert count.max() <= capacity, "a threshold of 1 / MOST or more keeps MOST + 1 elements at most"
    kept = torch.arange(capacity) < count[:, None]
    row = torch.arange(n).repeat_interleave(count)
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
        flat=flat != 0,
    )
