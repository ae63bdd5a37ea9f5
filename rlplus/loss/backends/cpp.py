"""The `cpp` backend: the one pass of `chunked` on the CPU, with the native kernels in csrc/.

One buffer (rows, V) of fp32 holds a chunk's logits and, in the place of rows without a gradient, the gradients of the
chunks before it. When little room is left, the two backward GEMMs process all of them at once: they stay large even if
few rows of a chunk have a gradient. Between the two row kernels the objective is `token_loss` itself.

Scratch: rows = min(CHUNK_ROWS, max_scratch_mb * 10^6 / (4 V)). Every chunk's GEMMs read and pack the whole weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import PolicyCall, PolicyResult, Slopes, Stored
from rlplus.loss.backends.native import (
    CHUNK_ROWS,
    ENTROPY,
    LOGPROB,
    PANEL_ROWS,
    dense,
    fill_logits,
    gemm_of,
    give_back,
    int64,
    native,
    pointer,
    row_gradient,
    row_statistics,
    take_scratch,
    wide_bias,
)
from rlplus.loss.head.gradient_sum import Gradients, GradientSum, Want
from rlplus.loss.head.head import Head, RunningStatistics, Statistics, dhidden
from rlplus.loss.objective.tokens import stat_names, token_loss

GRADIENT_COLUMNS = 128  # columns of dz that are transposed at a time
GRADIENT_WIDTH = 448  # columns of hidden at a time: with 512 rows half of a second-level cache
DEPTH_STEP = 64  # rows of dz are filled up with zeros to a multiple of it
DEPTH = 32  # bf16 values in a row of an AMX tile, as in csrc/rows.cpp

SlopesOf = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""rows, logprob (n,), entropy (n,) -> dlogprob (n,), dentropy (n,) or None."""


def policy_loss(call: PolicyCall) -> PolicyResult:
    head, constants, objective, want = call
    loss = head.hidden.new_zeros((), dtype=head.dtype)
    stats = loss.new_zeros(len(stat_names(constants)))

    def slopes(rows: slice, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        out = token_loss(logprob, entropy, constants.rows(rows), objective)
        loss.add_(out.loss)
        stats.add_(torch.stack(list(out.stats.values())))
        return out.dlogprob, out.dentropy if objective.entropy_coef else None

    one = _OnePass(head, want)
    one.run(slopes)
    return PolicyResult(loss, one.logprob, one.entropy, stats, one.finish())


def new_stored(head: Head, count: int) -> Stored:
    """Logits (count, V) and statistics (count, 4)."""
    new = head.hidden.new_empty
    return new(count, len(head.weight), dtype=torch.float32), new(count, 4, dtype=torch.float32)


def logprob(head: Head, scratch_bytes: float, stored: Stored | None = None) -> tuple[Tensor, Tensor]:
    if stored is None:
        one = _OnePass(head, Want(scratch_bytes))
        one.run(None)
        return one.logprob, one.entropy
    z, statistics = stored
    gemm = gemm_of(head)
    bias = wide_bias(head)
    head = _dense(head)
    size = CHUNK_ROWS[head.hidden.dtype]
    for start in range(0, len(z), size):
        rows = slice(start, min(start + size, len(z)))
        part = head.rows(rows)
        statistics[rows] = row_statistics(fill_logits(part, gemm, z[rows]), part, bias)
    return statistics[:, LOGPROB].clone(), statistics[:, ENTROPY].clone()


def logprob_backward(head: Head, slopes: Slopes, want: Want, stored: Stored | None = None) -> Gradients:
    one = _OnePass(head, want, stored)
    one.run(lambda rows, *_: slopes.rows(rows))
    return one.finish()


class _OnePass:
    """The chunk buffer, the gradient rows that wait at its front, and the outputs.

    stored: logits and statistics of all rows; None: they are computed.
    """

    def __init__(self, head: Head, want: Want, stored: Stored | None = None) -> None:
        N = len(head.target)
        V = len(head.weight)
        rows = max(1, min(N, CHUNK_ROWS[head.hidden.dtype], int(want.scratch_bytes // (4 * V))))
        self.library = native()
        self.want = want
        self.stored = stored
        self.head = _dense(head)
        self.bias = wide_bias(head)
        self.gemm = gemm_of(head)
        self.grads = GradientSum(head, want, None)
        shape = head.weight.shape if want.weight else torch.Size([0])
        sum_size = shape.numel() if self.gemm and want.weight_grad is None else 0
        self.scratch = take_scratch(rows * V + sum_size)
        self.buffer = self.scratch[: rows * V].view(rows, V)
        # dweight of bf16 inputs accumulates in fp32 and is rounded into this buffer.
        self.rounded = head.hidden.new_empty(shape if sum_size else (0,))
        self.dweight = (
            want.weight_grad if want.weight_grad is not None else self.scratch[rows * V :][:sum_size].view(-1)
        )
        self.started = want.weight_grad is not None  # whether dweight has its first term
        self.logprob = head.new_column()
        self.entropy = head.new_column()
        self.waiting = head.target[:0]  # the tokens whose gradient rows are at the front of the buffer

    def run(self, slopes: SlopesOf | None) -> None:
        start = 0
        N = len(self.logprob)
        rows = len(self.buffer)
        while start < N:
            if 4 * (rows - len(self.waiting)) < rows:
                self._multiply(last=False)
            filled = len(self.waiting)
            part = slice(start, min(N, start + rows - filled))
            memory = self.buffer[filled : filled + part.stop - start]
            z, statistics = self._logits(part, memory)
            self.logprob[part] = statistics[:, LOGPROB]
            self.entropy[part] = statistics[:, ENTROPY]
            if slopes is not None:
                slope = slopes(part, self.logprob[part], self.entropy[part])
                if self.want.some:
                    self._gradient(part, z, memory, statistics, *slope)
            start = part.stop
        if self.want.some:
            self._multiply(last=True)
        give_back(self.scratch)

    def _logits(self, rows: slice, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (n, V), in `memory` unless they are stored, and statistics (n, 4)."""
        if self.stored is not None:
            return self.stored[0][rows], self.stored[1][rows]
        head = self.head.rows(rows)
        z = fill_logits(head, self.gemm, memory)
        return z, row_statistics(z, head, self.bias)

    def finish(self) -> Gradients:
        if self.gemm is not None and self.want.needs.weight:
            self.grads.weight = self.rounded
        return self.grads.finish()

    def _gradient(
        self, rows: slice, z: Tensor, out: Tensor, statistics: Tensor, dlogprob: Tensor, dentropy: Tensor | None
    ) -> None:
        """Write the gradients of the rows that have one to the front of out, which may be z."""
        active = dlogprob != 0
        if dentropy is not None:
            active |= dentropy != 0
        source = _slots(active)
        head = self.head.rows(rows)
        narrow = self.gemm is not None
        row_gradient(z, out, source, head, self.bias, statistics, dlogprob, dentropy, narrow)
        self.waiting = torch.cat([self.waiting, source + rows.start])

    def _multiply(self, last: bool) -> None:
        """Add the contributions of the waiting rows, if any, to the gradients of hidden, weight and bias."""
        index = self.waiting
        dz = self.buffer[: len(self.waiting)]
        self.waiting = index[:0]
        if self.gemm is not None:
            dz = dz.view(torch.bfloat16)[:, : dz.shape[1]]
        if self.want.needs.hidden:
            self.grads.set_hidden(index, _dhidden(dz, self.head))
        if self.want.weight:
            self._add_dweight(dz, self.head.hidden[index], last)
        if self.want.needs.bias:
            self.grads.bias.add_(dz.sum(0, dtype=torch.float32))

    def _add_dweight(self, dz: Tensor, hidden: Tensor, last: bool) -> None:
        if self.gemm is None:
            self.grads.add_weight(dz, hidden)
            return
        first = not self.started
        self.started = True
        last = last and self.want.weight_grad is None  # then the sum is rounded to `rounded`, and not kept
        n = len(hidden)
        depth = max(1, -(-n // DEPTH_STEP)) * DEPTH_STEP
        self.library.rlplus_dweight_bf16(
            *self.gemm, pointer(dz), int64(dz.stride(0)), pointer(hidden), int64(n), int64(depth),
            *map(int64, reversed(self.head.weight.shape)), pointer(self.dweight), pointer(self.rounded),
            *map(int64, (GRADIENT_COLUMNS, PANEL_ROWS, GRADIENT_WIDTH)), int(first), int(last), torch.get_num_threads(),
        )  # fmt: skip


# ---- the rows of a split head, for rlplus.loss.backends.sharded

OVERWRITES = False


def scratch_per_logit(dtype: torch.dtype, device: str, capped: bool = False) -> int:
    """One buffer: the gradient overwrites the logits."""
    return torch.promote_types(dtype, torch.float32).itemsize


def block_logits(head: Head) -> Tensor:
    head = head._replace(hidden=dense(head.hidden), weight=dense(head.weight))
    z = head.hidden.new_empty(len(head.hidden), len(head.weight), dtype=torch.float32)
    return fill_logits(head, gemm_of(head), z)


def block_statistics(head: Head, z: Tensor) -> Statistics:
    top, rest, logprob, entropy = row_statistics(z, head, wide_bias(head)).unbind(1)
    return Statistics(top / head.divisor, rest.log1p(), logprob, entropy)


def running_statistics(head: Head) -> RunningStatistics:
    return RunningStatistics(head, block_statistics)


def known_rows(head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
    known = torch.stack([rows.reference * head.divisor, rows.logsum.expm1(), rows.logprob, rows.entropy], 1)
    return torch.arange(len(known)), known, dlogprob, dentropy


def block_gradient(head: Head, z: Tensor, known: tuple[Any, ...]) -> Tensor:
    """In fp32, as its products are: a product of bf16 matrices is rounded to bf16, and chunks are added up."""
    source, statistics, dlogprob, dentropy = known
    row_gradient(z, z, source, head, wide_bias(head), statistics, dlogprob, dentropy, narrow=False)
    return z


def _dhidden(dz: Tensor, head: Head) -> Tensor:
    if dz.dtype != head.weight.dtype:
        return dhidden(dz, head)
    # The vendor's kernel for AMX may read up to DEPTH - 1 values past a row. `row_gradient` leaves zeros there where
    # the row's memory, V fp32 logits, has room for them.
    V = dz.shape[1]
    return torch.mm(dz if V >= DEPTH - 1 else torch.nn.functional.pad(dz, (0, DEPTH - V))[:, :V], head.weight)


def _dense(head: Head) -> Head:
    return head._replace(hidden=dense(head.hidden), weight=dense(head.weight), target=head.target.contiguous())


def _slots(active: Tensor) -> Tensor:
    """The row whose gradient goes to each slot: active rows stay if they can, others replace inactive rows."""
    rows = active.nonzero().squeeze(1)
    slots = torch.arange(len(rows), device=active.device)
    slots[~active[: len(rows)]] = rows[rows >= len(rows)]
    return slots
