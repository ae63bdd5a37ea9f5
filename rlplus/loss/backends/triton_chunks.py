"""Chunks of rows of the `triton` backend: the first GEMM, and what the backward GEMMs read."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.kernels import exponentials as row_kernels
from rlplus.kernels import linear_logprob as linear_kernels
from rlplus.kernels import row_values as names
from rlplus.kernels import tiling
from rlplus.loss.backends.ways import Way, chunk_rows, width
from rlplus.loss.head.gradient_sum import Index
from rlplus.loss.head.head import Head, logits_into

WIDTH = names.WIDTH.value
DLOGPROB = names.DLOGPROB.value
DENTROPY = names.DENTROPY.value
PARTIALS = linear_kernels.PARTIALS.value


class Work:
    """Chunks of rows on one way, and the buffers that they share."""

    def __init__(
        self, head: Head, way: Way, which: Tensor | None, scratch_bytes: float,
        stored: tuple[Tensor, Tensor] | None = None, *, by_tile: bool = False,
    ) -> None:  # fmt: skip
        """by_tile: `partial` keeps each chunk's sums by tiles of `tile` columns."""
        self.head = head
        self.way = way
        self.which = which
        self.stored = stored
        self.by_tile = by_tile
        self.block = tiling.DRAWN if by_tile else tiling.STATISTICS
        self.tile = self.block.BLOCK_V if way.tile is None else way.tile.BLOCK_V
        self.partial: Tensor | None = None
        self.count = len(head.target) if which is None else len(which)
        self.rows = chunk_rows(head._replace(target=head.target[: self.count]), way, scratch_bytes)
        self.logits: Tensor | None = None  # (n, .) of the chunk, as the exponentials are
        self.exponentials: Tensor | None = None
        self.dlogits = None if way.dlogits == head.dtype and stored is None else self._buffer(way.dlogits)

    def _buffer(self, dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else self.head.hidden.new_empty(self.rows, width(self.head), dtype=dtype)

    def chunks(self) -> Iterator[tuple[Index, Head, Tensor]]:
        """Which rows, the head of those alone, and values (n, WIDTH) with their statistics."""
        way = self.way
        buffer = None
        logits = self._buffer(self.head.dtype if way.tile is None else None)
        if self.stored is None:
            buffer = self._buffer(way.exponentials)
        for rows in self._spans():
            head = self.head.rows(rows)
            n = len(head.target)
            self.partial = None  # before the next one is there
            self.logits = self._of(logits, n)
            self.exponentials = self._of(buffer, n)
            if self.stored is not None:
                self._take(self.stored[0][rows])
            values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
            linear_kernels.target_logits(values, head.hidden, head.weight, *arguments(head))
            (self._vendor if self.way.tile is None else self._ours)(head, values)
            if self.stored is not None:
                values[:, DLOGPROB : DENTROPY + 1] = 0  # not known yet
                self.stored[1][rows] = values
            yield rows, head, values

    def stored_chunks(self) -> Iterator[tuple[Index, Head, Tensor]]:
        """As `chunks`, of rows that an earlier one has stored."""
        assert self.stored is not None
        for rows in self._spans():
            self._take(self.stored[0][rows])
            yield rows, self.head.rows(rows), self.stored[1][rows].clone()

    def _spans(self) -> Iterator[Index]:
        for start in range(0, self.count, self.rows):
            rows = slice(start, min(start + self.rows, self.count))
            yield rows if self.which is None else self.which[rows]

    def _take(self, rows: Tensor) -> None:
        if self.way.exponentials is None:
            self.logits = rows
        else:
            self.exponentials = rows

    def _vendor(self, head: Head, values: Tensor) -> None:
        n = len(values)
        V = len(head.weight)
        logits = self.logits
        kept = self.exponentials
        assert logits is not None
        if head.mixed:
            torch.mm(head.hidden, head.weight.t(), out_dtype=head.dtype, out=logits[:, :V])
        else:
            logits_into(head, logits[:, :V])
        parts = 1
        if kept is None:
            blocks = -(-V // self.block.BLOCK_V)
            parts = blocks if self.by_tile else max(1, min(blocks, -(-tiling.PROGRAMS // n)))
        partial = values.new_empty(parts, PARTIALS, n)
        self.partial = partial if self.by_tile else None
        rest = arguments(head)
        row_kernels.row_exponentials(partial, kept, values, logits, V, *rest, block=self.block)
        linear_kernels.finish_rows(values, partial, V, rest[0])

    def _ours(self, head: Head, values: Tensor) -> None:
        tile = self.way.tile
        n = len(values)
        V = len(head.weight)
        kept = self.exponentials
        rest = arguments(head)
        assert tile is not None
        hidden = head.hidden.contiguous()
        weight = head.weight
        if not hidden.is_cuda:  # the interpreter's bf16 is wrong
            hidden = hidden.to(head.dtype)
            weight = weight.to(head.dtype)
        partial = values.new_empty(-(-V // tile.BLOCK_V), PARTIALS, n)
        self.partial = partial if self.by_tile else None
        marked = torch.empty(n, dtype=torch.int32, device=values.device)
        product = (values, hidden, weight, *rest)
        linear_kernels.linear_exponentials(partial, kept, *product, tile=tile)
        linear_kernels.finish_rows(values, partial, V, rest[0], marked)
        # Nearly always there is none, and these launches end at once.
        listed = marked.argsort(descending=True, stable=True), marked.sum()
        linear_kernels.linear_exponentials(partial, None, *product, tile=tile, listed=listed)
        linear_kernels.finish_rows(values, partial, V, rest[0], marked, again=True)
        if kept is not None:
            linear_kernels.linear_exponentials(partial, kept, *product, tile=tile, listed=listed)

    def differentiate(
        self, head: Head, values: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """-> dlogits (n, V), and None; or exponentials, their factors (n,) and the targets' own elements (n,).

        scale: of the slopes of fp16."""
        n = len(values)
        V, _ = head.weight.shape
        block = tiling.GRADIENT
        if self.exponentials is not None:
            e = self.exponentials
            factor = values.new_empty(n)
            own = values.new_empty(n)  # each aligned, whatever n is
            rest = (head.target.contiguous(), head.temperature, arguments(head)[-1])
            row_kernels.close_rows(factor, own, values, e, V, *rest, self.way.bonus, block)
            return e[:, :V], (factor, own)
        assert self.logits is not None
        if scale is not None:
            values[:, DLOGPROB : DENTROPY + 1] *= scale
        out = self.logits if self.dlogits is None else self.dlogits[:n]
        row_kernels.row_gradient(out, values, self.logits, V, *arguments(head), block=block)
        return out[:, :V], None

    @staticmethod
    def _of(x: Tensor | None, n: int) -> Tensor | None:
        return None if x is None else x[:n]


def arguments(head: Head) -> tuple[Tensor, Tensor | None, float, float | None, Tensor | None]:
    """The last arguments of the row kernels."""
    bias = None if head.bias is None else head.bias.contiguous()
    temperature = None if head.row_temperature is None else head.row_temperature.contiguous()
    return head.target.contiguous(), bias, head.temperature, head.softcap, temperature
