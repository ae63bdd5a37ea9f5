"""Draws of the `torch` backend for a sampled backward pass."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.loss.backends.chunked import scratch_per_logit, slices, statistics
from rlplus.loss.backends.sampled import MOST, Drawn
from rlplus.loss.head.head import Head

ONE = 2**40  # a threshold, in the whole numbers of running sums


def draws(head: Head, on: Tensor, scratch_bytes: float) -> Iterator[tuple[slice, Drawn]]:
    """As `sampled.Drawer` has it."""
    # log p and p, the small ones, their shares and running sums of 8 bytes, and what compares them.
    row = len(head.weight) * (scratch_per_logit(*head.logits) + head.dtype.itemsize + 2 * 8 + 3)
    for rows in slices(len(head.target), scratch_bytes / row):
        yield rows, _draw(head.rows(rows), on[rows])


def _draw(head: Head, on: Tensor) -> Drawn:
    logp, memory, logprob, entropy, slope = statistics(head, slice(None), gradient=True)
    return draw(head, on, logp, memory, logprob, entropy, slope)


def draw(
    head: Head, on: Tensor, logp: Tensor, memory: Tensor, logprob: Tensor, entropy: Tensor, slope: Tensor | None
) -> Drawn:
    """The draw from log p (n, V), the columns of the head's own tokens, where the softcap has this slope or is None.

    memory (n, V): overwritten. logprob, entropy (n,): of whole rows.
    """
    assert head.uniform is not None
    threshold = head.threshold
    p = torch.exp(logp, out=memory)
    on, known = on & entropy.isfinite(), (head.target >= 0) & (head.target < p.shape[1])
    at = head.target.where(known, 0)[:, None]
    p.scatter_(1, at, torch.where(known[:, None], 0.0, p.gather(1, at)))
    small = p < threshold
    many = (~small).sum(1) + p.masked_fill(~small, 0.0).sum(1, dtype=torch.float64) / threshold
    flat = on & (many > MOST)
    raised = torch.full_like(many, max(threshold, 1 / MOST))
    level = torch.where(flat, raised, threshold)[:, None]
    small = p < level
    tail = p.masked_fill(~small, 0.0)
    # Whole numbers: a GPU's cumulative sum of floats differs in bits from run to run.
    shares = tail.to(level.dtype).div_(level).mul_(ONE).round_().long()
    steps = shares.cumsum_(1).add_((head.uniform.double() * ONE).long()[:, None]).div_(ONE, rounding_mode="floor")
    kept = ~small
    kept[:, 0] |= steps[:, 0] > 0
    kept[:, 1:] |= steps[:, 1:] > steps[:, :-1]
    row, token = kept.logical_and_(on[:, None]).nonzero(as_tuple=True)
    w = torch.where(small[row, token], level.to(p.dtype)[row, 0], p[row, token])
    variance = (tail * (level.to(p.dtype) - tail)).sum(1)
    square = torch.where(known, torch.expm1(logprob.nan_to_num(0.0)) ** 2, 0.0) + (p * p).sum(1)
    of_cap, of_own = (None, None) if slope is None else (slope[row, token], slope.gather(1, at).squeeze(1))
    return Drawn(logprob, entropy, row, token, w, logp[row, token], of_cap, of_own, variance, square, flat)
