"""memory="least": the policy loss in two passes over blocks of the vocabulary, four GEMMs, no accumulator of dweight.

Pass one computes the logits of all tokens, one block of the vocabulary at a time, and updates running statistics of the
rows. The objective follows, for all tokens at once. Pass two recomputes each block's logits for the rows that have a
gradient: one GEMM over all tokens gives the block's rows of dweight, rounded once, another adds to dhidden.

Scratch beside the outputs: the blocks of logits and of their gradient, max_scratch_mb in all, and where only some rows
have a gradient a copy of their hidden states. dhidden is a sum over blocks, so with half-precision inputs it needs
fp32, 4 N H bytes. These are borrowed from the end of dweight; if that is not needed or too small, they are scratch. The
logits of the vocabulary rows there are recomputed a second time when dhidden is done. The cost is
(1 + (3 + f) rho) GEMMs instead of 1 + 2 rho, with rho the share of rows that have a gradient and f = 2 rho N / V (0
where nothing is borrowed); at N = 16,384 and V = 151,936, 4.2 instead of 3.

On CUDA the host waits once, between the passes, for the number of rows that have a gradient; during graph capture it
does not wait, and all rows take part.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from rlplus.loss import MISMATCH_STATS, STATS, Objective, TokenConstants, token_loss
from rlplus.loss.cost import whole_tiles
from rlplus.loss.head import Head, RunningStatistics, Statistics, add_dweight, dweight, fp16_scale

PIECE = 1024  # rows of dhidden that are rounded at a time


class Blocks(Protocol):
    """A backend's functions for a block of the vocabulary: a head with the block's weight and bias.

    Targets are relative to the start of the block; those outside it are none of its tokens. OVERWRITES: whether
    `running_statistics` overwrites the logits that it takes.
    """

    OVERWRITES: bool

    def block_logits(self, head: Head) -> Tensor:
        """hidden weight^T (n, B), accumulated in fp32 (fp64)."""

    def running_statistics(self, head: Head) -> RunningStatistics:
        """Running statistics of a whole head's rows, before its first block; or an object with the same methods."""

    def known_rows(self, head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> Any:
        """The arguments of `block_gradient` about the rows."""

    def block_gradient(self, head: Head, z: Tensor, known: Any) -> Tensor:
        """The logits' gradient (n, B), 0 where dlogprob and dentropy are 0; may overwrite z of `block_logits`."""

    def scratch_per_logit(self, dtype: torch.dtype, device: str, capped: bool = False) -> int:
        """Bytes, for a head with these `Head.logits`; also asked by `rlplus plan`."""

    def add_dhidden(self, total: Tensor, dz: Tensor, head: Head) -> None:
        """total (n, H), fp32 (fp64), += dz weight."""


def policy_loss(
    blocks: Blocks,
    head: Head,
    constants: TokenConstants,
    objective: Objective,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """-> loss (0-d), logprob (N,), entropy (N,), stats (S,), gradients of hidden, weight and bias where needed.

    With `weight_grad` (V, H), fp32 (fp64), the gradient of weight is added there.
    """
    known = _statistics(blocks, head, scratch_bytes)
    out = token_loss(known.logprob, known.entropy, constants, objective)
    names = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    stats = torch.stack([out.stats[name] for name in names])
    dentropy = out.dentropy if objective.entropy_coef else None
    grads = head.hidden.new_empty(0), head.hidden.new_empty(0), head.hidden.new_empty(0)
    if any(needs) or weight_grad is not None:
        second = _SecondPass(blocks, head, known, out.dlogprob, dentropy)
        grads = second.run(scratch_bytes, needs, weight_grad)
    return out.loss, known.logprob, known.entropy, stats, grads


def _spans(V: int, column: int, scratch_bytes: float) -> Iterator[slice]:
    """Blocks of the vocabulary; column: bytes of a column."""
    columns = min(V, whole_tiles(scratch_bytes / max(column, 1)))
    return (slice(start, min(start + columns, V)) for start in range(0, V, columns))


def _block(head: Head, v: slice) -> Head:
    bias = None if head.bias is None else head.bias[v]
    return head._replace(weight=head.weight[v], bias=bias, target=head.target - v.start)


def _statistics(blocks: Blocks, head: Head, scratch_bytes: float) -> Statistics:
    running = blocks.running_statistics(head)
    for v in _spans(len(head.weight), len(head.target) * blocks.scratch_per_logit(*head.logits), scratch_bytes):
        block = _block(head, v)
        running.take(block, blocks.block_logits(block))
    return running.finish()


class _SecondPass:
    """The second pass: the rows that have a gradient, and the buffers that receive it."""

    def __init__(
        self, blocks: Blocks, head: Head, known: Statistics, dlogprob: Tensor, dentropy: Tensor | None
    ) -> None:
        self.blocks, self.whole, self.scale = blocks, head, None
        active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
        rows = (*known, dlogprob, *(() if dentropy is None else (dentropy,)))
        self.index: Tensor | None = None
        if head.hidden.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph cannot wait for a count
            head = head._replace(hidden=head.hidden.masked_fill(~active[:, None], 0.0))
        elif (index := active.nonzero().squeeze(1)).numel() < len(active):
            self.index, head = index, head.rows(index)
            rows = tuple(x[index] for x in rows)
        if head.hidden.dtype == torch.float16:
            self.scale = fp16_scale(*rows[4:])
            rows = (*rows[:4], *(x * self.scale for x in rows[4:]))
        self.head = head
        self.known = blocks.known_rows(head, Statistics(*rows[:4]), rows[4], None if dentropy is None else rows[5])

    def run(self, scratch_bytes: float, needs: list[bool], weight_grad: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of hidden, weight and bias where needed."""
        head, n, (V, H) = self.whole, len(self.head.target), self.whole.weight.shape
        self.weight_grad = weight_grad
        self.weight = head.hidden.new_empty((V, H) if needs[1] else (0,))
        self.bias = head.hidden.new_empty(V if needs[2] else 0, dtype=head.dtype)
        dhidden, first_lent = self._accumulator(n) if needs[0] else (None, V)
        self.dhidden: Tensor | None = dhidden
        column = n * self.blocks.scratch_per_logit(*head.logits)
        if self.scale is not None:  # dweight before it is rounded, and unscaled
            column += 2 * H * head.dtype.itemsize
        spans = list(_spans(V, column, scratch_bytes))
        for v in spans:
            self._take(v, first=True, weight=v.stop <= first_lent)
        hidden = head.hidden.new_empty(0) if dhidden is None else self._rounded(dhidden)
        for v in spans:
            if v.stop > first_lent:
                self._take(v, first=False, weight=True)
        return hidden, self.weight, self.bias

    def _accumulator(self, n: int) -> tuple[Tensor, int]:
        """Zeros (n, H) in fp32 (fp64), and the first row of dweight whose memory they borrow."""
        head, (V, H) = self.whole, self.whole.weight.shape
        size = n * H * head.dtype.itemsize // head.hidden.dtype.itemsize
        if head.hidden.dtype == head.dtype or size > self.weight.numel():
            return head.hidden.new_zeros(n, H, dtype=head.dtype), V
        start = (V * H - size) // 64 * 64  # aligned
        lent = self.weight.view(-1)[start : start + size].view(head.dtype).view(n, H)
        return lent.zero_(), start // H

    def _take(self, v: slice, first: bool, weight: bool) -> None:
        """Recompute a block's logits and propagate their gradient to dweight and, if `first`, to dhidden and dbias."""
        block = _block(self.head, v)
        dz = self.blocks.block_gradient(block, self.blocks.block_logits(block), self.known)
        if block.mixed:
            dz = dz.to(block.hidden.dtype)  # once for both products
        if first and self.dhidden is not None:
            self.blocks.add_dhidden(self.dhidden, dz, block)
        if first and self.bias.numel():
            self.bias[v] = self._unscaled(dz.sum(0, dtype=self.head.dtype))
        if weight:
            self._take_weight(v, dz)

    def _take_weight(self, v: slice, dz: Tensor) -> None:
        hidden, total = self.head.hidden, self.weight_grad
        if total is not None and self.scale is None and (dz.is_cuda or dz.dtype == total.dtype):
            add_dweight(total[v], dz, hidden)
        elif total is not None:
            total[v] += self._unscaled(dweight(dz, hidden))
        elif self.weight.numel() and self.scale is None and dz.dtype == hidden.dtype:  # the GEMM rounds its sums
            torch.mm(dz.t(), hidden, out=self.weight[v])
        elif self.weight.numel():
            self.weight[v] = self._unscaled(dweight(dz, hidden))

    def _rounded(self, total: Tensor) -> Tensor:
        """dhidden (N, H) in its dtype, zeros where a row has no gradient."""
        if self.index is None and total.dtype == self.whole.hidden.dtype:
            return total
        out = torch.zeros_like(self.whole.hidden, memory_format=torch.contiguous_format)
        for start in range(0, len(total), PIECE):  # a rounded copy of all would be as large as the output
            rows = slice(start, start + PIECE)
            out[rows if self.index is None else self.index[rows]] = self._unscaled(total[rows]).to(out.dtype)
        return out

    def _unscaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x / self.scale
