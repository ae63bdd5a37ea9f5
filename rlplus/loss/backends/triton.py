"""The `triton` backend: GEMMs and Triton row kernels, one pass, three GEMMs; CUDA, or the interpreter.

Per chunk of tokens: logits in fp32 by one GEMM, statistics of the rows, the objective, and the gradient of the logits
in the dtype of the inputs, for the rows that have one. These rows of all chunks fill one gradient buffer; when the next
chunk might not fit, two GEMMs compute its contributions to dhidden and dweight.

The first GEMM is the vendor's, and a kernel reads its logits; or, with a tiling that says so, it is our own with the
statistics in its epilogue: one read of the logits less, and for logprobs alone no logits at all. For bf16 inputs and a
loss without an entropy bonus it may store exponentials in two bytes instead (`rlplus.kernels.exponentials`): 6 bytes of
traffic per logit, where fp32 logits take 14 with the vendor's GEMM and 10 with ours. The other GEMMs are the vendor's.

The host must know the number of active rows to size these GEMMs. The count is copied to the host after each chunk and
awaited only when the GEMM of the next chunk is queued, so the device does not idle.

Scratch. A row of logits takes 4 V bytes; a row of gradients V elements of the inputs' dtype and 8 H bytes or more. A
chunk of logits reads W once, 2 V H bytes in bf16; an emptying of the buffer reads W, and reads and writes an fp32 dW,
10 V H bytes. `plan` chooses the two sizes that take the least time by `rlplus.loss.cost`, unless the tiling has timed
ones; the buffer is a whole number of chunks. At max_scratch_mb = 1250, H = 3584, V = 151,936, N = 16,384 in
bf16 on an H200: 768 rows of logits, 2304 of gradients, 124 V H bytes, 68 GB, against 54 TFLOP. The dW accumulator
(V, H) is not counted; if all rows with a gradient fit into the buffer at once and the inputs are bf16, there is none.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rlplus.kernels import active_rows as gathering
from rlplus.kernels import exponentials as exponential_kernels
from rlplus.kernels import linear_logprob as row_kernels
from rlplus.kernels import policy_loss as token_kernels
from rlplus.kernels.tiling import Block, Tile, Tiling
from rlplus.loss import MISMATCH_STATS, STATS, Objective, TokenConstants, cost, tuning
from rlplus.loss.backends import token_arguments
from rlplus.loss.head import (
    Gradients,
    Head,
    Statistics,
    add_dweight,
    dhidden,
    drop_smallest,
    fp16_scale,
    fp16_weights,
    logits_into,
    raw_logits,
)
from rlplus.loss.head import add_dhidden as add_dhidden  # rlplus.loss.backends.least uses it, and the block_ functions

LOGPROB, ENTROPY = row_kernels.LOGPROB.value, row_kernels.ENTROPY.value
MAX, LOGSUM = row_kernels.MAX.value, row_kernels.LOGSUM.value
DLOGPROB, DENTROPY, WIDTH = row_kernels.DLOGPROB.value, row_kernels.DENTROPY.value, row_kernels.WIDTH.value
LINE = 64  # buffers have a multiple of this many columns, so that rows start at multiples of 128 bytes


def policy_loss(
    head: Head,
    constants: TokenConstants,
    objective: Objective,
    grad_filter: float,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """-> loss (0-d), logprob (N,), entropy (N,), stats (S,), gradients of hidden, weight and bias where needed.

    With `weight_grad` (V, H) fp32, the gradient of weight is added there.
    """
    gradient = any(needs) or weight_grad is not None
    tiling = _tiling(head, exponentials=gradient and not objective.entropy_coef)
    columns, given = token_arguments.columns(constants)
    surrogates = (token_arguments.coefficients(objective), given, token_arguments.choices(objective))
    values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
    sums = [values.new_zeros(1, token_kernels.SUMS.value)]
    with _on(head.hidden.device):
        rows, capacity = plan(head, scratch_bytes, gradient, tiling)
        buffer = GradientBuffer(head, tiling, needs, capacity, fp16_weights(constants, objective), weight_grad)
        for chunk, logits in _chunks(head, rows, _stored(head, gradient, tiling)):
            value = values[chunk]
            tops = _statistics(head, chunk, value, logits, gradient, tiling)
            sums.append(token_kernels.token_loss(value, columns[chunk], *surrogates))
            if gradient:
                if grad_filter:
                    value[:, DLOGPROB] = drop_smallest(value[:, DLOGPROB], value[:, LOGPROB], grad_filter)
                buffer.add(chunk, value, logits, tops)
            del tops  # free it before the next chunk's are made
        grads = buffer.finish()
    stats = torch.cat(sums).sum(0)
    loss = stats[STATS.index("loss_internal") : STATS.index("loss_entropy") + 1].sum()
    names = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    return loss, values[:, LOGPROB].clone(), values[:, ENTROPY].clone(), stats[: len(names)].clone(), grads


def logprob(head: Head, scratch_bytes: float) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,)."""
    tiling = _tiling(head)
    values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
    with _on(head.hidden.device):
        rows, _ = plan(head, scratch_bytes, False, tiling)
        for chunk, logits in _chunks(head, rows, _stored(head, False, tiling)):
            _statistics(head, chunk, values[chunk], logits, False, tiling)
    return values[:, LOGPROB].clone(), values[:, ENTROPY].clone()


def logprob_backward(
    head: Head,
    dlogprob: Tensor,
    dentropy: Tensor,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum(dlogprob * logprob + dentropy * entropy), as in `policy_loss`; recomputes the logits."""
    tiling = _tiling(head)
    values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
    values[:, DLOGPROB], values[:, DENTROPY] = dlogprob, dentropy
    with _on(head.hidden.device):
        rows, capacity = plan(head, scratch_bytes, True, tiling)
        buffer = GradientBuffer(head, tiling, needs, capacity, [dlogprob, dentropy], weight_grad)
        for chunk, logits in _chunks(head, rows, head.dtype):
            _statistics(head, chunk, values[chunk], logits, True, tiling)
            buffer.add(chunk, values[chunk], logits)
        return buffer.finish()


# ---- a block of the vocabulary, for rlplus.loss.backends.least


def scratch_per_logit(dtype: torch.dtype, device: str, capped: bool = False) -> int:
    """A logit and its gradient."""
    wide = torch.promote_types(dtype, torch.float32)
    return wide.itemsize + (wide if device == "cpu" else dtype).itemsize


def block_logits(head: Head) -> Tensor:
    return raw_logits(head)


class RunningStatistics:
    """Like `rlplus.loss.head.RunningStatistics`, with one kernel per block."""

    def __init__(self, head: Head) -> None:
        n, device = len(head.target), head.hidden.device
        self.head, self.values = head, head.hidden.new_empty(n, WIDTH, dtype=head.dtype)
        self.so_far, self.block = row_kernels.begin_statistics(n, device), tuning.tiling_of(head).statistics

    def take(self, block: Head, z: Tensor) -> None:
        with _on(z.device):
            row_kernels.add_statistics(self.values, self.so_far, z, z.shape[1], *_rest(block), block=self.block)

    def finish(self) -> Statistics:
        values, head = self.values, self.head
        with _on(values.device):
            row_kernels.finish_statistics(values, self.so_far, len(head.weight), head.target.contiguous())
        # Outputs of the operation may not share memory.
        return Statistics(values[:, MAX], values[:, LOGSUM], values[:, LOGPROB].clone(), values[:, ENTROPY].clone())


running_statistics = RunningStatistics


def known_rows(head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> tuple[Tensor, Tensor, Block]:
    columns = {LOGPROB: rows.logprob, ENTROPY: rows.entropy, MAX: rows.max, LOGSUM: rows.logsum, DLOGPROB: dlogprob}
    columns[DENTROPY] = torch.zeros_like(dlogprob) if dentropy is None else dentropy
    values = torch.stack([columns[i] for i in range(WIDTH)], 1)
    return torch.arange(len(values), device=values.device), values, tuning.tiling_of(head).gradient


def block_gradient(head: Head, z: Tensor, known: tuple[Tensor, Tensor, Block]) -> Tensor:
    slot, values, block = known
    dz = z.new_empty(z.shape, dtype=_gradient_dtype(head))
    with _on(z.device):
        row_kernels.row_gradient(dz, slot, values, z, z.shape[1], *_rest(head), block=block)
    return dz


# ---- the sizes of the buffers


def plan(
    head: Head, scratch_bytes: float, gradient: bool, tiling: Tiling, machine: cost.Machine | None = None
) -> tuple[int, int]:
    """Rows of a chunk, and rows of the gradient buffer (0 without `gradient`). machine: None = the device's."""
    N, (row, gradient_row) = len(head.target), row_bytes(head, gradient, tiling)
    if not gradient:
        return min(cost.whole_tiles(scratch_bytes / row), max(N, 1)), 0
    timed = tiling.buffers
    if timed is not None and timed.scratch_bytes == scratch_bytes:
        return min(timed.rows, max(N, 1)), min(timed.rows * timed.chunks, N)
    return cost.buffers(machine or device_machine(head.hidden.device), head.shape, row, gradient_row, scratch_bytes)


def row_bytes(head: Head, gradient: bool, tiling: Tiling) -> tuple[int, int]:
    """Scratch of a row of logits, with or without a `gradient`, and of one of the gradient buffer."""
    (V, H), W, tile = head.weight.shape, _width(head), _tile(head, gradient, tiling)
    wide, narrow, stored = head.dtype.itemsize, head.hidden.dtype.itemsize, _stored(head, gradient, tiling)
    row = W * stored.itemsize if stored is not None else 0
    if tile is not None:
        row += 12 * -(-V // tile.BLOCK_V)
    return row, W * _gradient_dtype(head).itemsize + H * (2 * narrow + wide)


def device_machine(device: torch.device) -> cost.Machine:
    if device.type != "cuda":
        return cost.H200
    found = torch.cuda.get_device_properties(device)
    return (cost.A100 if found.major == 8 else cost.H200)._replace(processors=found.multi_processor_count)


class GradientBuffer:
    """Gathers the logits' gradients of active rows over chunks, and adds them to the inputs' gradients, many at once.

    Between calls `filled` rows are in use, a number that only the device knows; `seen` is its copy on the way to the
    host. In a CUDA graph the host cannot wait: there every row takes part, those without a gradient as zeros.

    weights (N,): factors to which the slopes are proportional. weight_grad: as in `policy_loss`.
    """

    def __init__(
        self,
        head: Head,
        tiling: Tiling,
        needs: list[bool],
        capacity: int,
        weights: list[Tensor],
        weight_grad: Tensor | None = None,
    ) -> None:
        self.head, self.tiling, self.capacity, device = head, tiling, capacity, head.hidden.device
        # The first emptying writes the weight's gradient: zeros would be written and read once more.
        self.weight_grad, self.dweight = weight_grad, weight_grad
        self.needs_weight = needs[1] or weight_grad is not None
        self.grads = Gradients.zeros(head, [needs[0], False, needs[2]])
        self.dlogits = head.hidden.new_empty(capacity, _width(head), dtype=_gradient_dtype(head))
        self.scale = fp16_scale(*weights) if self.dlogits.dtype == torch.float16 else None
        if self.scale is not None and weight_grad is not None:
            weight_grad.mul_(self.scale)  # a power of two: exact, and undone at the end
        self.token = torch.empty(capacity, dtype=torch.int64, device=device)  # which one a row belongs to
        self.filled = torch.zeros(1, dtype=torch.int64, device=device)
        self.active: Tensor | None = None
        self.seen, self.event, self.fixed = self.filled, None, _capturing(device)
        if self.fixed:
            self.seen = torch.zeros(1, dtype=torch.int64)
            self.active = torch.empty(len(head.target), dtype=torch.int32, device=device)
        elif device.type == "cuda":
            self.seen, self.event = torch.zeros(1, dtype=torch.int64, pin_memory=True), torch.cuda.Event()

    def add(self, chunk: slice, values: Tensor, logits: Tensor | None, tops: Tensor | None = None) -> None:
        """Add the rows of a chunk that have a gradient; their slopes may be scaled in `values`.

        With tops, logits are the exponentials of `rlplus.kernels.exponentials`.
        The host waits here, so the computation of the logits should be queued before.
        """
        assert logits is not None
        filled = self._filled()
        if filled + len(values) > self.capacity:
            self._empty(filled)
        slot = torch.empty(len(values), dtype=torch.int64, device=values.device)
        active = None if self.active is None else self.active[chunk]
        gathering.active_rows(slot, self.token, self.filled, values, chunk.start, self.scale, active)
        rows, V, block = self.head.rows(chunk), len(self.head.weight), self.tiling.gradient
        tile, rest = self.tiling.exponentials, _rest(rows)
        if tops is not None and tile is not None:
            kept, last = (logits, tops, tile.BLOCK_V), (V, rest[0], rows.temperature)
            exponential_kernels.row_gradient(self.dlogits, slot, values, *kept, *last, block=block)
        else:
            row_kernels.row_gradient(self.dlogits, slot, values, logits, V, *rest, block=block)
        if self.fixed:
            self.seen += len(values)
        elif self.event is not None:
            self.seen.copy_(self.filled, non_blocking=True)
            self.event.record()

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of hidden, weight and bias where needed."""
        self._empty(self._filled(), last=True)
        dweight = self.dweight
        if dweight is None:
            dweight = self.head.hidden.new_zeros(self.head.weight.shape if self.needs_weight else (0,))
        if self.scale is not None:
            dweight.div_(self.scale)
            self.grads.bias.div_(self.scale)
        return self.grads._replace(weight=dweight).finish(self.head, self.weight_grad)

    def _filled(self) -> int:
        if self.event is not None:
            self.event.synchronize()
        return int(self.seen)

    def _empty(self, filled: int, last: bool = False) -> None:
        if filled:
            dlogits, token = self.dlogits[:filled, : len(self.head.weight)], self.token[:filled]
            if self.grads.hidden.numel():
                gradient = dhidden(dlogits, self.head)
                if self.scale is not None:
                    gradient /= self.scale
                self.grads.hidden.index_copy_(0, token, gradient.to(self.grads.hidden.dtype))
            if self.needs_weight:
                hidden = self.head.hidden[token]
                if self.active is not None:
                    hidden.masked_fill_(self.active[token, None] == 0, 0.0)
                self._add_dweight(dlogits, hidden, last)
            if self.grads.bias.numel():
                self.grads.bias.add_(dlogits.sum(0, dtype=self.grads.bias.dtype))
        self.filled.zero_()
        if self.fixed:
            self.seen.zero_()

    def _add_dweight(self, dlogits: Tensor, hidden: Tensor, last: bool) -> None:
        if self.dweight is not None:
            add_dweight(self.dweight, dlogits, hidden)
        elif last and hidden.dtype == dlogits.dtype == torch.bfloat16:  # not fp16, where scaled values may overflow
            self.dweight = torch.mm(dlogits.t(), hidden)
        else:
            self.dweight = hidden.new_empty(self.head.weight.shape, dtype=self.head.dtype)
            add_dweight(self.dweight, dlogits, hidden, beta=0.0)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _gradient_dtype(head: Head) -> torch.dtype:
    """The dtype of the backward GEMMs: the inputs', but fp32 if no GEMM from half precision to fp32 exists."""
    return head.dtype if head.hidden.device.type == "cpu" else head.hidden.dtype


def _on(device: torch.device) -> AbstractContextManager:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _tiling(head: Head, exponentials: bool = False) -> Tiling:
    """The head's tiling; its `exponentials` are also its `loss`, or None where they are not wanted or not possible."""
    tiling = tuning.tiling_of(head)
    if tiling.exponentials is None or not exponentials:
        return tiling._replace(exponentials=None)
    if head.hidden.dtype != torch.bfloat16 or head.weight.stride(1) != 1:
        return tiling._replace(exponentials=None)
    return tiling._replace(loss=tiling.exponentials, buffers=None)


def _stored(head: Head, gradient: bool, tiling: Tiling) -> torch.dtype | None:
    """The dtype of the stored logits, fp16 of their exponentials; None if none are stored."""
    if gradient and tiling.exponentials is not None:
        return torch.float16
    return head.dtype if gradient or _tile(head, gradient, tiling) is None else None


def _tile(head: Head, gradient: bool, tiling: Tiling) -> Tile | None:
    """The tile of our first GEMM. None: the vendor's, also for a transposed weight, which ours would have to copy."""
    tile = tiling.loss if gradient else tiling.forward
    return tile if head.weight.stride(1) == 1 else None


def _width(head: Head) -> int:
    return -(-len(head.weight) // LINE) * LINE


def _chunks(head: Head, rows: int, stored: torch.dtype | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Chunks, each with a buffer of that dtype for its logits, which all share."""
    N = len(head.target)
    logits = None if stored is None else head.hidden.new_empty(rows, _width(head), dtype=stored)
    for start in range(0, N, rows):
        chunk = slice(start, min(start + rows, N))
        yield chunk, None if logits is None else logits[: chunk.stop - start]


def _statistics(
    head: Head, chunk: slice, values: Tensor, logits: Tensor | None, gradient: bool, tiling: Tiling
) -> Tensor | None:
    """Fill the columns of `values` that depend on the logits, and logits (n, W) unless they are None.

    -> the tops of exponentials, if they are what `logits` has.
    """
    head, tile = head.rows(chunk), _tile(head, gradient, tiling)
    V, rest = len(head.weight), _rest(head)
    if tile is not None:
        hidden, weight = head.hidden, head.weight
        if not hidden.is_cuda:  # the interpreter's bf16 is wrong
            hidden, weight = hidden.to(head.dtype), weight.to(head.dtype)
        tops = row_kernels.linear_statistics(values, logits, hidden.contiguous(), weight, *rest, tile=tile)
        return tops if gradient and tiling.exponentials is not None else None
    assert logits is not None
    if head.mixed:
        torch.mm(head.hidden, head.weight.t(), out_dtype=head.dtype, out=logits[:, :V])
    else:
        logits_into(head, logits[:, :V])
    row_kernels.row_statistics(values, logits, V, *rest, tiling=tiling)
    return None


def _rest(head: Head) -> tuple[Tensor, Tensor | None, float, float | None, Tensor | None]:
    """The last arguments of the row kernels."""
    bias, own = (None if x is None else x.contiguous() for x in (head.bias, head.row_temperature))
    return head.target.contiguous(), bias, head.temperature, head.softcap, own
