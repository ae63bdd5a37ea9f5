"""Draws of a head that is split over ranks, for a sampled backward pass: each rank draws from its own rows of the head.

A rank's elements, those of its tokens, are drawn with a random number of its own, so that errors of different ranks are
not alike. The ranks exchange statistics of rows, as `sharded` does, and later sums of hidden's gradient.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.loss.backends.sampled import Drawn
from rlplus.loss.backends.sharded import Blocks, Shards, chunks
from rlplus.loss.backends.torch_draws import draw
from rlplus.loss.head.head import Head, Statistics, cap_slope, capped, scaled
from rlplus.loss.objective.tokens import FLOOR

GOLDEN = 0.6180339887  # multiples of it, without their whole part, are far apart
LESS = 6  # a chunk of these draws has so many times fewer rows: p, shares, running sums and what compares them


class ShardedDrawer:
    """`sampled.Drawer` of the head of this rank's rows."""

    def __init__(self, blocks: Blocks, shards: Shards, whole: Head) -> None:
        self.blocks = blocks
        self.whole = whole
        self.shards = shards._replace(chunk=max(1, shards.chunk // LESS))

    def draws(self, head: Head, on: Tensor, scratch_bytes: float) -> Iterator[tuple[slice, Drawn]]:
        """head: of this rank's rows. Collective."""
        for rows, part, z, known in chunks(self.blocks, self.shards, self.whole):
            yield rows, self._drawn(part, on[rows], z, known)

    def _drawn(self, part: Head, on: Tensor, z: Tensor, known: Statistics) -> Drawn:
        if not z.shape[1]:
            none = known.entropy[:0]
            number = part.target[:0]
            zeros = torch.zeros_like(known.entropy)
            return Drawn(known.logprob, known.entropy, number, number, none, none, None, None, zeros, zeros, zeros != 0)
        assert part.uniform is not None
        part = part._replace(uniform=(part.uniform + GOLDEN * self.shards.group.rank()) % 1)
        x = scaled(z, part)
        slope = cap_slope(x, part)
        logp = capped(x, part).sub_(known.reference[:, None]).sub_(known.logsum[:, None]).clamp_(min=FLOOR)
        return draw(part, on, logp, torch.empty_like(logp), known.logprob, known.entropy, slope)
