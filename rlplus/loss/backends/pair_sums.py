"""Sums over pairs of a row and a token: the gradients of a head of which few logits have one.

Pairs are taken a few at a time, so that copies of their hidden states and rows of the weight fit max_scratch_mb. Sums
over the pairs of a row, and over the pairs of a token, are bags of `embedding_bag`, in fp32 (fp64) and in a fixed
order: the same inputs give the same bits, on CUDA too.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlplus.loss.head.gradient_sum import Gradients, GradientSum, Index, Want
from rlplus.loss.head.head import Head

CACHED_BYTES = 4e6  # copies on a CPU: with 1250 MB of them it took twice as long, at 8 and at 64 tokens a row


def spans(head: Head, count: int, scratch_bytes: float) -> Iterator[slice]:
    """Pairs at a time: each takes a copy of its hidden state and of its token's row of the weight, in fp32 (fp64)."""
    if not head.hidden.is_cuda:
        scratch_bytes = min(scratch_bytes, CACHED_BYTES)
    step = max(1, int(scratch_bytes // (2 * head.hidden.shape[1] * head.dtype.itemsize)))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def bags(table: Tensor, index: Tensor, factors: Tensor | None, offsets: Tensor) -> Tensor:
    """Sums of the table's rows (., H) at index (P,) times factors (P,), in their dtype: (len(offsets) - 1, H)."""
    if factors is not None and table.dtype != factors.dtype:
        table = table.index_select(0, index).to(factors.dtype)
        index = torch.arange(len(index), device=index.device)
    return torch.nn.functional.embedding_bag(
        index, table, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True
    )


class PairGradients(GradientSum):
    """The inputs' gradients: of rows with the whole vocabulary, which come first, if any, and of rows with pairs."""

    def __init__(self, head: Head, want: Want) -> None:
        super().__init__(head, want, None)  # products of pairs are in fp32 (fp64)

    def wanted(self) -> Want:
        """The first rows are to be computed with this: their gradient of weight is added to the sum here."""
        if self.weight is None and self.want.needs.weight:
            self.weight = self.head.hidden.new_zeros(self.head.weight.shape, dtype=self.head.dtype)
        return self.want.into(self.weight)

    def take(self, which: Tensor, gradients: Gradients) -> None:
        """The first rows' gradients, computed with `wanted`."""
        dhidden, _, dbias = gradients
        if self.want.needs.hidden:
            self.hidden[which] = dhidden
        if self.want.needs.bias:
            self.bias += dbias

    def add_pairs(self, which: Index, head: Head, row: Tensor, token: Tensor, dz: Tensor) -> None:
        """The gradients of the rows `which` of the whole head, which `head` has alone, from their pairs.

        row (P,), sorted, token (P,), and the loss's derivative dz (P,) by the row's logit of that token.
        """
        live = dz.nonzero().squeeze(1)
        row = row[live]
        token = token[live]
        dz = dz[live]
        pieces = list(spans(head, len(dz), self.want.scratch_bytes))
        if self.want.needs.hidden:
            total = head.hidden.new_zeros(head.hidden.shape, dtype=head.dtype)
            add_sums(total, row, dz, head.weight, token, pieces)
            add_over_ranks(head, total)
            self.set_hidden(which, total)
        order = token.argsort(stable=True)
        row = row[order]
        token = token[order]
        dz = dz[order]
        if self.weight is not None:
            add_sums(self.weight, token, dz, head.hidden, row, pieces)
        elif self.want.needs.weight:  # a sum for the tokens that there are: for all it would take most of the time
            tokens, number = token.unique_consecutive(return_inverse=True)
            total = head.hidden.new_zeros(len(tokens), head.hidden.shape[1], dtype=head.dtype)
            add_sums(total, number, dz, head.hidden, row, pieces)
            self.weight = head.hidden.new_zeros(head.weight.shape)  # complete, in hidden's dtype
            self.weight[tokens] = total.to(self.weight.dtype)
        if self.want.needs.bias:
            one = dz.new_ones(1, 1)
            add_sums(self.bias[:, None], token, dz, one, torch.zeros_like(row), [slice(None)])


def add_over_ranks(head: Head, x: Tensor) -> None:
    """Make x the sum over the ranks of a split head, each of which has some of the tokens. Collective."""
    if head.group:
        from torch.distributed import all_reduce
        from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

        all_reduce(x, group=_resolve_process_group(head.group))  # type: ignore[arg-type]


def add_sums(total: Tensor, key: Tensor, dz: Tensor, table: Tensor, index: Tensor, pieces: Iterable[slice]) -> None:
    """total[k] += sum of dz times the table's rows at index, over the pairs whose key (P,), sorted, is k."""
    for span in pieces:
        which, counts = key[span].unique_consecutive(return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        total[which] += bags(table, index[span], dz[span], offsets)
