"""Gradients from a few drawn elements of the logits' gradient, in the place of its products with whole matrices.

The gradient of a divergence by the logits is not linear in the probabilities, as that of a logprob is. So the draw is
from the gradient itself. An element of at least `threshold` times its row's sum of absolute values is kept as it is; a
smaller one is kept with a probability in proportion to its size, and counts as the threshold. So the gradients have the
exact mean. Nothing else differs from `sampled`, but for a target's element, which is none here.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlplus.loss.backends import cpp_draws, native
from rlplus.loss.backends.pair_sums import PairGradients
from rlplus.loss.backends.sampled import choose
from rlplus.loss.head.gradient_sum import Gradients, GradientSum, Index, Want
from rlplus.loss.head.head import Head

PARTS = 8  # a chunk is drawn from in so many, whose draw fits into what the chunk itself takes


Draw = Callable[[Head, Tensor, Tensor, Tensor], Iterator[tuple[Tensor, Tensor, Tensor]]]
"""The head of n rows, their dz (n, V) and its sums of absolute values (n,), and which of them are drawn from, (n,) bool
-> row, token, w (M,) of some rows at a time, w being the share of its row's sum that an element counts as."""


class DrawnGradients(PairGradients):
    """The gradients of a head whose `uniform` is given, from elements that `draw` chooses of each chunk's dz."""

    def __init__(self, head: Head, want: Want, draw: Draw) -> None:
        super().__init__(head, want)
        self.draw = draw
        self.parts = [(head.target[:0], head.target[:0], head.hidden.new_empty(0, dtype=head.dtype))]
        self.number = torch.arange(len(head.target), device=head.hidden.device)

    def add(
        self, rows: Index, head: Head, dz: Tensor, active: Tensor, memory: Tensor | None = None, clean: bool = False
    ) -> None:
        number = self.number[rows]
        size = torch.linalg.vector_norm(dz, 1, dim=1)
        finite = size.isfinite()
        for row, token, w in self.draw(head, dz, size, active & finite & (size > 0)):
            self.parts.append((number[row], token, (w * size[row]).copysign(dz[row, token])))
        broken = number[active & ~finite]  # a row that has NaN keeps nothing else, and shows it
        self.parts.append((broken, torch.zeros_like(broken), size.new_full((len(broken),), torch.nan)))

    def finish(self) -> Gradients:
        parts = zip(*self.parts, strict=True)
        self.parts = []
        row, token, value = (torch.cat(column) for column in parts)
        order = row.argsort(stable=True)
        self.add_pairs(slice(None), self.head, row[order], token[order], value[order])
        return super().finish()


def gradients_of(head: Head, want: Want, factors: list[Tensor], draw: Draw) -> GradientSum:
    """Exact sums, or drawn ones if the head's backward pass is sampled."""
    return GradientSum(head, want, factors) if head.uniform is None else DrawnGradients(head, want, draw)


def draw(head: Head, dz: Tensor, size: Tensor, on: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A `Draw`: native in fp32 on a CPU, where it is built; else in PyTorch, with some 30 bytes for each element."""
    if dz.device.type == "cpu" and dz.dtype == torch.float32 and native.load() is not None:
        yield from cpp_draws.draw(head, dz, size, on)
        return
    assert head.uniform is not None
    step = max(1, len(dz) // PARTS)
    for start in range(0, len(dz), step):
        rows = slice(start, start + step)
        share = dz[rows].abs().div_(torch.where(on, size, 1.0)[rows, None])
        row, token, w, *_ = choose(share, on[rows], head.uniform[rows], head.threshold)
        yield row + start, token, w
