"""The `triton` backend: three GEMMs and, for bf16, nothing else that touches tokens x vocabulary; CUDA, or the
interpreter.

Rows whose gradient is 0 whatever the policy says are set apart first, and pass the first GEMM alone. The others come in
chunks: our first GEMM stores exponentials in the dtype of the inputs (rlplus/kernels/linear_logprob.py), the objective
gives each row a slope, and the vendor's GEMMs take the exponentials to dhidden and dweight, with the slopes as factors
of rows. The element of the target, which has most of a row's gradient, stays in fp32 and is added beside the GEMMs
(rlplus/kernels/own_tokens.py). A row of a chunk takes 2 V bytes of scratch and 10 H or more.

Other inputs have fp32 logits from the vendor's GEMM between: bf16 with a weight that lies the other way, whose
exponentials one more kernel makes; fp16, whose range exponentials leave, and a softcap with an entropy bonus, which
needs what the derivative of the softcap hides: there the gradient of the logits is computed from them; and fp32, in
place.

The host waits once, for the number of rows with a gradient (`logprob_backward` also for whether the entropy has one); a
CUDA graph, where it cannot, takes all rows.

`cost.rows_of_chunk` chooses the rows of a chunk: at max_scratch_mb = 1250,
H = 3584, V = 151,936, N = 16,384 in bf16 on an H200 they are 3584. The accumulator of dweight (V, H) is not counted;
for bf16 inputs and a single chunk there is none.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rlplus.kernels import elementwise, own_tokens, tiling
from rlplus.kernels import exponentials as row_kernels
from rlplus.kernels import linear_logprob as linear_kernels
from rlplus.kernels import policy_loss as token_kernels
from rlplus.kernels import row_values as names
from rlplus.loss.backends import token_arguments
from rlplus.loss.backends.triton_chunks import Index, Work, arguments
from rlplus.loss.backends.ways import Way, gradient_dtype, way_of, width
from rlplus.loss.head.head import (
    Gradients,
    Head,
    Statistics,
    add_dweight,
    dhidden,
    dweight,
    fp16_scale,
    fp16_weights,
    raw_logits,
)
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import MISMATCH_STATS, STATS, TokenConstants, may_have_gradient

LOGPROB, ENTROPY, REFERENCE = names.LOGPROB.value, names.ENTROPY.value, names.REFERENCE.value
LOGSUM, SLOPE, WIDTH = names.LOGSUM.value, names.SLOPE.value, names.WIDTH.value
DLOGPROB, DENTROPY = names.DLOGPROB.value, names.DENTROPY.value
PARTIALS, LOWEST = linear_kernels.PARTIALS.value, elementwise.LOWEST.value


def policy_loss(
    head: Head,
    constants: TokenConstants,
    objective: Objective,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """-> loss (0-d), logprob (N,), entropy (N,), stats (S,), gradients of hidden, weight and bias where needed.

    With `weight_grad` (V, H) fp32, the gradient of weight is added there.
    """
    gradient = any(needs) or weight_grad is not None
    columns, given = token_arguments.columns(constants)
    surrogates = (token_arguments.coefficients(objective), given, token_arguments.choices(objective))
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    sums = [logprob.new_zeros(1, token_kernels.SUMS.value)]
    grads = _Gradients(head, needs, fp16_weights(constants, objective), weight_grad)
    with on_device(head.hidden.device):
        for which, differentiated in sets(may_have_gradient(constants, objective), gradient):
            way = way_of(head, differentiated, bonus=objective.entropy_coef != 0)
            work = Work(head, way, which, scratch_bytes)
            for rows, part, values in work.chunks():
                sums.append(token_kernels.token_loss(values, columns[rows], *surrogates))
                logprob[rows], entropy[rows] = values[:, LOGPROB], values[:, ENTROPY]
                if differentiated:
                    grads.add(work, rows, part, values)
    stats = torch.cat(sums).sum(0)
    loss = stats[STATS.index("loss_internal") : STATS.index("loss_entropy") + 1].sum()
    kinds = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    return loss, logprob, entropy, stats[: len(kinds)].clone(), grads.finish()


def new_stored(head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Memory for what `logprob_backward` needs of so many rows: exponentials or logits, and values, (count, .)."""
    rows = head.hidden.new_empty(count, width(head), dtype=stored_way(head).exponentials or head.dtype)
    rows[:, len(head.weight) :] = 0  # no kernel writes there
    return rows, head.hidden.new_empty(count, WIDTH, dtype=head.dtype)


def stored_way(head: Head, bonus: bool = True) -> Way:
    """A way that serves whatever slopes come: behind a softcap an entropy's need logits."""
    return way_of(head, True, bonus or head.softcap is not None)


def logprob(head: Head, scratch_bytes: float, stored: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,). stored: of all rows, which are written there; None: they are not kept."""
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    way = way_of(head, False) if stored is None else stored_way(head)
    with on_device(head.hidden.device):
        for rows, _, values in Work(head, way, None, scratch_bytes, stored).chunks():
            logprob[rows], entropy[rows] = values[:, LOGPROB], values[:, ENTROPY]
    return logprob, entropy


def logprob_backward(
    head: Head,
    dlogprob: Tensor,
    dentropy: Tensor,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
    stored: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum(dlogprob * logprob + dentropy * entropy), as in `policy_loss`.

    stored: as `logprob` wrote it, of all rows; it is read. None: the logits are computed again.
    """
    grads = _Gradients(head, needs, [dlogprob, dentropy], weight_grad)
    with on_device(head.hidden.device):
        which, _ = sets((dlogprob != 0) | (dentropy != 0), True)[0]
        bonus = _capturing(head.hidden.device) or bool((dentropy != 0).any())
        way = way_of(head, True, bonus) if stored is None else stored_way(head, bonus)
        work = Work(head, way, which, scratch_bytes, stored)
        for rows, part, values in work.chunks() if stored is None else work.stored_chunks():
            values[:, DLOGPROB], values[:, DENTROPY] = dlogprob[rows], dentropy[rows]
            grads.add(work, rows, part, values)
        return grads.finish()


# ---- the rows of a split head, for rlplus.loss.backends.sharded

OVERWRITES = False


def scratch_per_logit(dtype: torch.dtype, device: str, capped: bool = False) -> int:
    """A logit and its gradient."""
    wide = torch.promote_types(dtype, torch.float32)
    return wide.itemsize + (wide if device == "cpu" else dtype).itemsize


def block_logits(head: Head) -> Tensor:
    return raw_logits(head)


class KernelStatistics:
    """Like `rlplus.loss.head.head.RunningStatistics`, with one kernel per block."""

    def __init__(self, head: Head) -> None:
        n = len(head.target)
        self.head, self.values = head, head.hidden.new_empty(n, WIDTH, dtype=head.dtype)
        with on_device(head.hidden.device):
            linear_kernels.target_logits(self.values, head.hidden, head.weight, *arguments(head))
        self.so_far = self.values.new_zeros(1, PARTIALS, n)
        self.so_far[0, 0] = self.values[:, REFERENCE]

    def take(self, block: Head, z: Tensor) -> None:
        with on_device(z.device):
            rest = arguments(block)
            row_kernels.row_exponentials(
                self.so_far, None, self.values, z, z.shape[1], *rest, block=tiling.STATISTICS, carry=True
            )

    def finish(self) -> Statistics:
        values, head = self.values, self.head
        with on_device(values.device):
            linear_kernels.finish_rows(values, self.so_far, len(head.weight), head.target.contiguous())
        reference = values[:, REFERENCE]
        reference = reference.masked_fill(reference <= LOWEST, -torch.inf)  # no logit above -inf, as others say it
        # Outputs of the operation may not share memory.
        known = (reference, values[:, LOGSUM], values[:, LOGPROB].clone(), values[:, ENTROPY].clone())
        return Statistics(*known)


running_statistics = KernelStatistics


def known_rows(head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> Tensor:
    columns = {LOGPROB: rows.logprob, ENTROPY: rows.entropy, REFERENCE: rows.reference, LOGSUM: rows.logsum}
    none = torch.zeros_like(dlogprob)
    columns |= {DLOGPROB: dlogprob, DENTROPY: none if dentropy is None else dentropy, SLOPE: none}
    return torch.stack([columns[i] for i in range(WIDTH)], 1)


def block_gradient(head: Head, z: Tensor, values: Tensor) -> Tensor:
    dz = z.new_empty(z.shape, dtype=gradient_dtype(head))
    with on_device(z.device):
        row_kernels.row_gradient(dz, values, z, z.shape[1], *arguments(head), block=tiling.GRADIENT)
    return dz


class _Gradients:
    """The inputs' gradients, summed over chunks.

    weights (N,): factors to which the slopes are proportional. weight_grad: as in `policy_loss`.
    """

    def __init__(self, head: Head, needs: list[bool], weights: list[Tensor], weight_grad: Tensor | None) -> None:
        # The first chunk writes the weight's gradient: zeros would be written and read once more.
        self.head, self.weight_grad, self.dweight = head, weight_grad, weight_grad
        self.needs_weight = needs[1] or weight_grad is not None
        self.own: Tensor | None = None  # (N,): the gradients of the targets' logits that are not in the products
        self.grads = Gradients.zeros(head, [needs[0], False, needs[2]])
        half = gradient_dtype(head) == torch.float16 and (any(needs) or weight_grad is not None)
        self.scale = fp16_scale(*weights) if half else None
        if self.scale is not None and weight_grad is not None:
            weight_grad.mul_(self.scale)  # a power of two: exact, and undone at the end

    def add(self, work: Work, rows: Index, head: Head, values: Tensor) -> None:
        """Add a chunk, whose slopes may be scaled in `values`."""
        live = (values[:, DLOGPROB : DENTROPY + 1] != 0).any(1)
        dlogits, closed = work.differentiate(head, values, self.scale)
        factor = None if closed is None else closed[0]
        if closed is not None:
            self.own = closed[1].new_zeros(len(self.head.target)) if self.own is None else self.own
            self.own[rows] = closed[1]
        if self.grads.hidden.numel():
            gradient = dhidden(dlogits, head)
            if closed is not None:
                own_tokens.finish_hidden(gradient, *closed, head.weight, head.target.contiguous())
            if self.scale is not None:
                gradient /= self.scale
            self.grads.hidden[rows] = gradient.to(self.grads.hidden.dtype)
            del gradient  # its memory is the scratch of what follows
        if self.needs_weight:
            scaled = head.hidden.where(live[:, None], 0.0)
            scaled = (scaled if factor is None else scaled * factor[:, None]).to(dlogits.dtype)
            self._add_dweight(dlogits, scaled, only=work.count == len(values))
        if self.grads.bias.numel():
            row = live[:, None] if factor is None else factor[:, None]
            self.grads.bias.add_(dweight(dlogits, row.to(dlogits.dtype)).squeeze(1))

    def _add_dweight(self, dlogits: Tensor, hidden: Tensor, only: bool) -> None:
        if self.dweight is not None:
            add_dweight(self.dweight, dlogits, hidden)
        elif only and hidden.dtype == torch.bfloat16:  # not fp16, where scaled values may overflow
            self.dweight = torch.mm(dlogits.t(), hidden)
        else:
            self.dweight = hidden.new_empty(self.head.weight.shape, dtype=self.head.dtype)
            add_dweight(self.dweight, dlogits, hidden, beta=0.0)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of hidden, weight and bias where needed."""
        total = self.dweight
        if total is None:
            total = self.head.hidden.new_zeros(self.head.weight.shape if self.needs_weight else (0,))
        if self.scale is not None:
            total.div_(self.scale)
            self.grads.bias.div_(self.scale)
        if self.own is not None:
            self._add_own(total, self.own)
        return self.grads._replace(weight=total).finish(self.head, self.weight_grad)

    def _add_own(self, total: Tensor, own: Tensor) -> None:
        with on_device(own.device):
            if self.needs_weight:
                own_tokens.add_to_weight(total, own, self.head.hidden, self.head.target)
            if self.grads.bias.numel():
                one = own.new_ones(len(own), 1)
                own_tokens.add_to_weight(self.grads.bias[:, None], own, one, self.head.target)


def sets(may: Tensor, gradient: bool) -> list[tuple[Tensor | None, bool]]:
    """The rows, those with a gradient apart: their numbers, None for all; and whether they are differentiated."""
    if not gradient or _capturing(may.device):
        return [(None, gradient)]
    count = int(may.sum())
    if count == len(may):
        return [(None, True)]
    order = (~may).argsort(stable=True)
    return [(order[:count], True), (order[count:], False)]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
