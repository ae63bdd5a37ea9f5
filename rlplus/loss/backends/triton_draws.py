"""Draws of the `triton` backend for a sampled backward pass: from exponentials, or from fp32 logits.

The host waits for the number of elements of each chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.kernels import draws as kernels
from rlplus.kernels import tiling
from rlplus.kernels.linear_logprob import PARTIALS
from rlplus.kernels.row_values import ENTROPY, LOGPROB, LOGSUM, SLOPE, WIDTH
from rlplus.loss.backends.sampled import MOST, Drawn
from rlplus.loss.backends.triton import on_device, sets
from rlplus.loss.backends.triton_chunks import Work, arguments
from rlplus.loss.backends.ways import Way, way_of
from rlplus.loss.head.gradient_sum import Index
from rlplus.loss.head.head import Head


class Masses(NamedTuple):
    """partial (tiles, PARTIALS, n): a row's sums by tiles of `tile` columns each."""

    partial: Tensor
    tile: int


def draws(head: Head, on: Tensor, scratch_bytes: float) -> Iterator[tuple[Index, Drawn]]:
    """As `sampled.Drawer` has it: rows that keep elements come first, from exponentials or fp32 logits."""
    with on_device(head.hidden.device):
        for which, kept in sets(on, True):
            way = way_of(head, gradient=kept, bonus=True)
            if kept and (way.exponentials is None or way.tile is None):
                way = Way(None, None, head.dtype)
            for rows, part, values in (work := Work(head, way, which, scratch_bytes, by_tile=kept)).chunks():
                yield rows, _drawn(work, part, values, on[rows])


def _drawn(work: Work, head: Head, values: Tensor, on: Tensor) -> Drawn:
    n = len(values)
    K = MOST + 8
    new = values.new_empty
    rows = work.logits if work.exponentials is None else work.exponentials
    logprob = values[:, LOGPROB.value].clone()
    entropy = values[:, ENTROPY.value].clone()
    if rows is None or work.partial is None or not n:
        none = new(0)
        number = head.target[:0]
        zeros = torch.zeros_like(logprob)
        return Drawn(logprob, entropy, number, number, none, none, None, None, zeros, zeros, zeros != 0)
    slope = None if head.softcap is None else new(n, K)
    masses = Masses(work.partial, work.tile)
    token, w, logp, sums = _draw(head, rows[:n], masses, values, on, slope, exponentials=rows is work.exponentials)
    count, flat, variance, square = sums.unbind(1)
    row, kept = _kept(count, K)
    of_cap = None if slope is None else slope[kept]
    of_own = None if slope is None else values[:, SLOPE.value].clone()
    found = (row, token[kept].long(), w[kept], logp[kept], of_cap)
    return Drawn(logprob, entropy, *found, own_slope=of_own, variance=variance, square=square, flat=flat != 0)


def draw(head: Head, dz: Tensor, size: Tensor, on: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `drawn_gradients.Draw` has it: absolute values of dz are exponentials whose sum is known."""
    tile = tiling.DRAWN.BLOCK_V
    V = dz.shape[1]
    partial = dz.new_zeros(-(-V // tile), PARTIALS.value, len(dz))
    whole = V - V % tile
    partial[: V // tile, 1] = torch.linalg.vector_norm(dz[:, :whole].unflatten(1, (-1, tile)), 1, dim=2).T
    partial[V // tile :, 1] = torch.linalg.vector_norm(dz[:, whole:], 1, dim=1)
    values = dz.new_zeros(len(dz), WIDTH.value)
    values[:, LOGSUM.value] = torch.where(on, size, 1.0).log()
    plain = Head(head.hidden, head.weight, None, torch.full_like(head.target, -1), 1.0)
    plain = plain._replace(uniform=head.uniform, threshold=head.threshold)
    token, w, _, sums = _draw(plain, dz, Masses(partial, tile), values, on, None, exponentials=True)
    row, kept = _kept(sums[:, kernels.COUNT.value], token.shape[1])
    yield row, token[kept].long(), w[kept]


def _draw(
    head: Head, rows: Tensor, masses: Masses, values: Tensor, on: Tensor, slope: Tensor | None, *, exponentials: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token, w, logp (n, K), of which each row has as many as sums (n, SUMS) says; slope (n, K) is filled."""
    assert head.uniform is not None
    n = len(values)
    K = MOST + 8
    new = values.new_empty
    token = torch.empty(n, K, dtype=torch.int32, device=values.device)
    sums = new(n, kernels.SUMS.value)
    w = new(n, K)
    logp = new(n, K)
    kernels.draw_rows(
        token, w, logp, slope, sums, masses.partial, values, rows, len(head.weight), masses.tile, on.to(torch.int32),
        head.uniform.contiguous(), head.threshold, MOST, *arguments(head), exponentials=exponentials,
    )  # fmt: skip
    return token, w, logp, sums


def _kept(count: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The row of each element, and where elements are in (n, K)."""
    count = count.long()
    kept = torch.arange(K, device=count.device) < count[:, None]
    return torch.arange(len(count), device=count.device).repeat_interleave(count), kept
