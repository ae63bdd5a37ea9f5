"""Numbers of next-token distributions that TRL's trainers report besides logprob and entropy."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlplus.loss.head.head import Head, capped, raw_logits, scaled

MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # functions of logits z (n, V) and targets (n,)
    "is_top1": lambda z, target: z.argmax(-1) == target,
    "mean_logits": lambda z, target: z.mean(-1),
    "log_sum_sq_probs": lambda z, target: (2 * z).logsumexp(-1) - 2 * z.logsumexp(-1),
}
SCRATCH = 2**27  # bytes of logits at a time


@torch.no_grad()
def measure(names: tuple[str, ...], head: Head) -> list[Tensor]:
    """The `MEASURES` of these names, each (N,), without gradients: one more product with the head's weight.

    is_top1: whether the target is the likeliest token; mean_logits: the mean of the logits z over the vocabulary;
    log_sum_sq_probs: log of the sum of the squared probabilities.
    """
    head = head.rounded()
    rows = max(1, SCRATCH // (2 * len(head.weight) * head.dtype.itemsize))
    found: list[list[Tensor]] = []
    for start in range(0, max(1, len(head.target)), rows):
        part = head.rows(slice(start, start + rows))
        z = capped(scaled(raw_logits(part), part), part)
        found.append([MEASURES[name](z, part.target) for name in names])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
