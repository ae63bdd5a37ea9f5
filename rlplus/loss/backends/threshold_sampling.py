"""The rule of a sampled backward pass in PyTorch: which of a row's shares are kept, and as how much they count."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss.backends.sampled import MOST

ONE = 2**40  # a threshold, in the whole numbers of running sums


class Chosen(NamedTuple):
    """row, token, w (M,): the elements that are kept, in order of rows; variance (n,): of a row's w; flat (n,) bool:
    whether its threshold was raised."""

    row: Tensor
    token: Tensor
    w: Tensor
    variance: Tensor
    flat: Tensor


def choose(p: Tensor, on: Tensor, uniform: Tensor, threshold: float) -> Chosen:
    """Elements of rows p (n, V) >= 0 whose sums are 1 or less, in rows `on`; uniform (n,) in [0, 1)."""
    small = p < threshold
    many = (~small).sum(1) + p.masked_fill(~small, 0.0).sum(1, dtype=torch.float64) / threshold
    flat = on & (many > MOST)
    raised = torch.full_like(many, max(threshold, 1 / MOST))
    level = torch.where(flat, raised, threshold)[:, None]
    small = p < level
    tail = p.masked_fill(~small, 0.0)
    # Whole numbers: a GPU's cumulative sum of floats differs in bits from run to run.
    shares = tail.to(level.dtype).div_(level).mul_(ONE).round_().long()
    steps = shares.cumsum_(1).add_((uniform.double() * ONE).long()[:, None]).div_(ONE, rounding_mode="floor")
    kept = ~small
    kept[:, 0] |= steps[:, 0] > 0
    kept[:, 1:] |= steps[:, 1:] > steps[:, :-1]
    row, token = kept.logical_and_(on[:, None]).nonzero(as_tuple=True)
    w = torch.where(small[row, token], level.to(p.dtype)[row, 0], p[row, token])
    return Chosen(row, token, w, (tail * (level.to(p.dtype) - tail)).sum(1), flat)
