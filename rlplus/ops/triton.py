"""The `triton` backend: the vendor's GEMMs and Triton row kernels, one pass, three GEMMs; CUDA, or the interpreter.

Per chunk of tokens: logits in fp32 by one GEMM, statistics of the rows, the objective, and the gradient of the logits
in the dtype of the inputs, of the rows that have one. These rows of all chunks fill one gradient buffer; when the next
chunk might not fit, two GEMMs take what is there to hidden and weight.

How many rows are active the host must know to size these GEMMs. The count is copied to the host behind each chunk and
awaited only when the GEMM of the next chunk is under way, so the device does not run dry.

Scratch. A row of logits takes 4 V bytes; a row of gradients V elements of the inputs' dtype and 8 H bytes or more. A
chunk of logits reads W once, 2 V H bytes in bf16; a filling of the buffer reads W, and adds to an fp32 dW through an
fp32 product, 18 V H bytes. Under a given sum of both buffers the traffic is least at sqrt(18), about 4, rows of
gradients a row of logits. At max_scratch_mb = 1250, H = 3584, V = 151,936 in bf16: 512 rows of logits, 2432 of
gradients. The dW accumulator (V, H) is not counted.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rlplus.kernels import linear_logprob as row_kernels
from rlplus.kernels import policy_loss as token_kernels
from rlplus.objective import MISMATCH_STATS, STATS, Objective, TokenConstants
from rlplus.ops.chunked import (
    VOCABULARY_BLOCK,
    Gradients,
    Head,
    Statistics,
    _logits,
    add_dweight,
    dhidden,
    drop_smallest,
    fp16_scale,
)

LOGPROB, ENTROPY = row_kernels.LOGPROB.value, row_kernels.ENTROPY.value
MAX, LOGSUM = row_kernels.MAX.value, row_kernels.LOGSUM.value
DLOGPROB, DENTROPY, WIDTH = row_kernels.DLOGPROB.value, row_kernels.DENTROPY.value, row_kernels.WIDTH.value
GRADIENTS_PER_LOGITS = 4  # rows of the two buffers
TILE = 128  # rows that a GEMM handles together: larger buffers are multiples of it


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
    columns, given = _columns(constants)
    surrogates = (_coefficients(objective), given, objective.internal, objective.external)
    values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
    sums = [values.new_zeros(1, token_kernels.SUMS.value)]
    with _on(head.hidden.device):
        rows, capacity = plan(head, scratch_bytes, gradient)
        buffer = GradientBuffer(head, needs, capacity, _weights(constants, objective), weight_grad)
        for chunk in _chunks(head, rows):
            value, logits = values[chunk], _logits(head.hidden[chunk], head)
            row_kernels.row_statistics(value, logits, *_rest(head, chunk))
            sums.append(token_kernels.token_loss(value, columns[chunk], *surrogates))
            if gradient:
                value[:, DLOGPROB] = drop_smallest(value[:, DLOGPROB], value[:, LOGPROB], grad_filter)
                buffer.add(chunk, value, logits)
            del logits  # its memory is the next chunk's
        grads = buffer.finish()
    stats = torch.cat(sums).sum(0)
    loss = stats[STATS.index("loss_internal") : STATS.index("loss_entropy") + 1].sum()
    names = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    return loss, values[:, LOGPROB].clone(), values[:, ENTROPY].clone(), stats[: len(names)].clone(), grads


def logprob(head: Head, scratch_bytes: float) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,)."""
    values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
    with _on(head.hidden.device):
        rows, _ = plan(head, scratch_bytes, gradient=False)
        for chunk in _chunks(head, rows):
            logits = _logits(head.hidden[chunk], head)
            row_kernels.row_statistics(values[chunk], logits, *_rest(head, chunk))
            del logits
    return values[:, LOGPROB].clone(), values[:, ENTROPY].clone()


def logprob_backward(
    head: Head, dlogprob: Tensor, dentropy: Tensor, scratch_bytes: float, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum(dlogprob * logprob + dentropy * entropy); recomputes the logits."""
    values = head.hidden.new_empty(len(head.target), WIDTH, dtype=head.dtype)
    values[:, DLOGPROB], values[:, DENTROPY] = dlogprob, dentropy
    with _on(head.hidden.device):
        rows, capacity = plan(head, scratch_bytes, any(needs))
        buffer = GradientBuffer(head, needs, capacity, [dlogprob, dentropy])
        for chunk in _chunks(head, rows):
            logits = _logits(head.hidden[chunk], head)
            row_kernels.row_statistics(values[chunk], logits, *_rest(head, chunk))
            buffer.add(chunk, values[chunk], logits)
            del logits
        return buffer.finish()


# ---- a block of the vocabulary, for rlplus.ops.least


def block_bytes(head: Head) -> int:
    """Scratch of a logit and of its gradient."""
    return head.dtype.itemsize + _gradient_dtype(head).itemsize


def block_logits(head: Head) -> Tensor:
    return _logits(head.hidden, head)


def block_statistics(head: Head, z: Tensor) -> Statistics:
    values = z.new_empty(len(z), WIDTH)
    with _on(z.device):
        row_kernels.row_statistics(values, z, *_rest(head, slice(None)))
    return Statistics(values[:, MAX], values[:, LOGSUM], values[:, LOGPROB], values[:, ENTROPY])


def block_gradient(head: Head, z: Tensor, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> Tensor:
    columns = {LOGPROB: rows.logprob, ENTROPY: rows.entropy, MAX: rows.max, LOGSUM: rows.logsum, DLOGPROB: dlogprob}
    columns[DENTROPY] = torch.zeros_like(dlogprob) if dentropy is None else dentropy
    values = torch.stack([columns[i] for i in range(WIDTH)], 1)
    dz = z.new_empty(z.shape, dtype=_gradient_dtype(head))
    with _on(z.device):
        row_kernels.row_gradient(dz, torch.arange(len(z), device=z.device), values, z, *_rest(head, slice(None)))
    return dz


def block_dhidden(dz: Tensor, head: Head) -> Tensor:
    return dhidden(dz, head)


def plan(head: Head, scratch_bytes: float, gradient: bool) -> tuple[int, int]:
    """Rows of logits a chunk, and rows of the gradient buffer (0 without `gradient`); see the module."""
    N, (V, H) = len(head.target), head.weight.shape
    logits = V * head.dtype.itemsize
    row = V * _gradient_dtype(head).itemsize + H * (2 * head.hidden.dtype.itemsize + head.dtype.itemsize)
    if not gradient:
        return min(_tiles(scratch_bytes / logits), max(N, 1)), 0
    if head.hidden.dtype != head.dtype:
        scratch_bytes -= min(V, VOCABULARY_BLOCK) * H * head.dtype.itemsize  # what is added to dW
    rows = _tiles(scratch_bytes / (logits + GRADIENTS_PER_LOGITS * row))
    capacity = max(rows, _tiles((scratch_bytes - rows * logits) / row))
    return min(rows, max(N, 1)), min(capacity, N)


def _tiles(rows: float) -> int:
    return max(1, int(rows) if rows < TILE else int(rows) // TILE * TILE)


class GradientBuffer:
    """Gathers the logits' gradients of active rows over chunks and takes them to hidden, weight and bias, many at once.

    Between calls `filled` rows are in use, which only the device knows; `seen` is a copy for the host, on its way. In a
    CUDA graph nothing can be awaited: there every row takes part, those without a gradient as zeros.

    weights (N,): something that the slopes are proportional to. weight_grad: as in `policy_loss`.
    """

    def __init__(
        self,
        head: Head,
        needs: list[bool],
        capacity: int,
        weights: list[Tensor],
        weight_grad: Tensor | None = None,
    ) -> None:
        self.head, self.capacity, device = head, capacity, head.hidden.device
        self.weight_grad, self.grads = weight_grad, Gradients.zeros(head, needs, weight_grad)
        self.dlogits = head.hidden.new_empty(capacity, len(head.weight), dtype=_gradient_dtype(head))
        self.scale = fp16_scale(*weights) if self.dlogits.dtype == torch.float16 else None
        if self.scale is not None and weight_grad is not None:
            weight_grad.mul_(self.scale)  # a power of two: exact, and undone at the end
        # Which token a row belongs to; one element more for tokens that have none.
        self.token = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self.active = torch.zeros(len(head.target), dtype=torch.bool, device=device)
        self.filled = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen, self.event, self.fixed = self.filled, None, _capturing(device)
        if self.fixed:
            self.seen = torch.zeros(1, dtype=torch.int64)
        elif device.type == "cuda":
            self.seen, self.event = torch.zeros(1, dtype=torch.int64, pin_memory=True), torch.cuda.Event()

    def add(self, chunk: slice, values: Tensor, logits: Tensor) -> None:
        """Take in the rows of a chunk that have a gradient; their slopes may be scaled in `values`.

        The logits should be under way: here the host waits.
        """
        filled = self._filled()
        if filled + len(values) > self.capacity:
            self._empty(filled)
        active = self.active[chunk] = (values[:, DLOGPROB] != 0) | (values[:, DENTROPY] != 0)
        taken = torch.ones_like(active) if self.fixed else active
        slot = (self.filled + taken.cumsum(0) - 1).where(taken, -1)
        token = torch.arange(chunk.start, chunk.stop, device=slot.device)
        self.token.scatter_(0, slot.where(taken, self.capacity), token)
        if self.scale is not None:
            values[:, DLOGPROB:] *= self.scale
        row_kernels.row_gradient(self.dlogits, slot, values, logits, *_rest(self.head, chunk))
        self.filled += taken.sum()
        if self.fixed:
            self.seen += len(values)
        elif self.event is not None:
            self.seen.copy_(self.filled, non_blocking=True)
            self.event.record()

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of hidden, weight and bias where needed."""
        self._empty(self._filled())
        if self.scale is not None:
            self.grads.weight.div_(self.scale)
            self.grads.bias.div_(self.scale)
        return self.grads.finish(self.head, self.weight_grad)

    def _filled(self) -> int:
        if self.event is not None:
            self.event.synchronize()
        return int(self.seen)

    def _empty(self, filled: int) -> None:
        if filled:
            dlogits, token = self.dlogits[:filled], self.token[:filled]
            if self.grads.hidden.numel():
                gradient = dhidden(dlogits, self.head)
                if self.scale is not None:
                    gradient /= self.scale
                self.grads.hidden.index_copy_(0, token, gradient.to(self.grads.hidden.dtype))
            if self.grads.weight.numel():
                hidden = self.head.hidden[token]
                if self.fixed:
                    hidden.masked_fill_(~self.active[token, None], 0.0)
                add_dweight(self.grads.weight, dlogits, hidden)
            if self.grads.bias.numel():
                self.grads.bias.add_(dlogits.sum(0, dtype=self.grads.bias.dtype))
        self.filled.zero_()
        if self.fixed:
            self.seen.zero_()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _gradient_dtype(head: Head) -> torch.dtype:
    """That of the backward GEMMs: the inputs', but fp32 where no GEMM from half precision to fp32 exists."""
    return head.hidden.dtype if head.hidden.is_cuda else head.dtype


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _chunks(head: Head, rows: int) -> Iterator[slice]:
    N = len(head.target)
    return (slice(start, min(start + rows, N)) for start in range(0, N, rows))


def _rest(head: Head, chunk: slice) -> tuple[Tensor, Tensor | None, float]:
    """The last arguments of the row kernels."""
    return head.target[chunk].contiguous(), None if head.bias is None else head.bias.contiguous(), head.temperature


def _columns(c: TokenConstants) -> tuple[Tensor, token_kernels.Given]:
    """The per-token constants as one (N, 8) tensor, and which of the optional ones are there."""
    given = token_kernels.Given(c.old_logprob is not None, c.behavior_logprob is not None, c.engine_logprob is not None)
    filled = c._replace(
        external=c.external.to(c.advantage.dtype),
        entropy_weight=c.token_weight if c.entropy_weight is None else c.entropy_weight,
    )
    absent = torch.zeros_like(c.advantage)
    return torch.stack([absent if x is None else x for x in filled], 1), given


def _weights(c: TokenConstants, objective: Objective) -> list[Tensor]:
    return [c.token_weight] + ([c.entropy_weight] if objective.entropy_coef and c.entropy_weight is not None else [])


def _coefficients(objective: Objective) -> token_kernels.Coefficients:
    values = (getattr(objective, name) for name in token_kernels.Coefficients._fields)
    return token_kernels.Coefficients(*(float("inf") if v is None else float(v) for v in values))
