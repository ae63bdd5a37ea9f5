"""Draws of the `torch` backend for a sampled backward pass."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.loss.backends.chunked import scratch_per_logit, slices, statistics
from rlplus.loss.backends.sampled import Drawn, choose
from rlplus.loss.head.head import Head


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
    p = torch.exp(logp, out=memory)
    on = on & entropy.isfinite()
    known = (head.target >= 0) & (head.target < p.shape[1])
    at = head.target.where(known, 0)[:, None]
    p.scatter_(1, at, torch.where(known[:, None], 0.0, p.gather(1, at)))
    row, token, w, variance, flat = choose(p, on, head.uniform, head.threshold)
    square = torch.where(known, torch.expm1(logprob.nan_to_num(0.0)) ** 2, 0.0) + (p * p).sum(1)
    of_cap = None if slope is None else slope[row, token]
    of_own = None if slope is None else slope.gather(1, at).squeeze(1)
    return Drawn(logprob, entropy, row, token, w, logp[row, token], of_cap, of_own, variance, square, flat)
