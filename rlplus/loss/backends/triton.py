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
from rlplus.loss.backends import PolicyCall, PolicyResult, Slopes, Stored
from rlplus.loss.backends.triton_chunks import Work, arguments
from rlplus.loss.backends.ways import Way, way_of, width
from rlplus.loss.head.gradient_sum import Gradients, GradientSum, Index, Want, gradient_dtype
from rlplus.loss.head.head import Head, Statistics, dhidden, dweight, raw_logits
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import STATS, TokenConstants, may_have_gradient, stat_names

LOGPROB = names.LOGPROB.value
ENTROPY = names.ENTROPY.value
REFERENCE = names.REFERENCE.value
LOGSUM = names.LOGSUM.value
SLOPE = names.SLOPE.value
WIDTH = names.WIDTH.value
DLOGPROB = names.DLOGPROB.value
DENTROPY = names.DENTROPY.value
PARTIALS = linear_kernels.PARTIALS.value
LOWEST = elementwise.LOWEST.value


def policy_loss(call: PolicyCall) -> PolicyResult:
    head, constants, objective, want = call
    columns, given = token_columns(constants)
    surrogates = (coefficients(objective), given, choices(objective))
    logprob = head.new_column()
    entropy = head.new_column()
    sums = [logprob.new_zeros(1, token_kernels.SUMS.value)]
    grads = ChunkGradients(head, want, call.factors)
    with on_device(head.hidden.device):
        for which, differentiated in sets(may_have_gradient(constants, objective), want.some):
            way = way_of(head, differentiated, bonus=objective.entropy_coef != 0)
            work = Work(head, way, which, want.scratch_bytes)
            for rows, part, values in work.chunks():
                sums.append(token_kernels.token_loss(values, columns[rows], *surrogates))
                logprob[rows] = values[:, LOGPROB]
                entropy[rows] = values[:, ENTROPY]
                if differentiated:
                    grads.add_chunk(work, rows, part, values)
    stats = torch.cat(sums).sum(0)
    loss = stats[STATS.index("loss_internal") : STATS.index("loss_entropy") + 1].sum()
    return PolicyResult(loss, logprob, entropy, stats[: len(stat_names(constants))].clone(), grads.finish())


def new_stored(head: Head, count: int) -> Stored:
    """Exponentials or logits, and values."""
    rows = head.hidden.new_empty(count, width(head), dtype=stored_way(head).exponentials or head.dtype)
    rows[:, len(head.weight) :] = 0  # no kernel writes there
    return rows, head.hidden.new_empty(count, WIDTH, dtype=head.dtype)


def stored_way(head: Head, bonus: bool = True) -> Way:
    """A way that serves whatever slopes come: behind a softcap an entropy's need logits."""
    return way_of(head, True, bonus or head.softcap is not None)


def logprob(head: Head, scratch_bytes: float, stored: Stored | None = None) -> tuple[Tensor, Tensor]:
    logprob = head.new_column()
    entropy = head.new_column()
    way = way_of(head, False) if stored is None else stored_way(head)
    with on_device(head.hidden.device):
        for rows, _, values in Work(head, way, None, scratch_bytes, stored).chunks():
            logprob[rows] = values[:, LOGPROB]
            entropy[rows] = values[:, ENTROPY]
    return logprob, entropy


def logprob_backward(head: Head, slopes: Slopes, want: Want, stored: Stored | None = None) -> Gradients:
    grads = ChunkGradients(head, want, list(slopes))
    with on_device(head.hidden.device):
        which, _ = sets((slopes.logprob != 0) | (slopes.entropy != 0), True)[0]
        bonus = _capturing(head.hidden.device) or bool((slopes.entropy != 0).any())
        way = way_of(head, True, bonus) if stored is None else stored_way(head, bonus)
        work = Work(head, way, which, want.scratch_bytes, stored)
        for rows, part, values in work.chunks() if stored is None else work.stored_chunks():
            values[:, DLOGPROB], values[:, DENTROPY] = slopes.rows(rows)
            grads.add_chunk(work, rows, part, values)
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
        self.head = head
        self.values = head.hidden.new_empty(n, WIDTH, dtype=head.dtype)
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
        values = self.values
        head = self.head
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


# ---- the arguments of the kernel of the objective


def token_columns(c: TokenConstants) -> tuple[Tensor, token_kernels.Given]:
    """The per-token constants as one (N, 8) tensor, and which of the optional ones are given."""
    given = token_kernels.Given(c.old_logprob is not None, c.behavior_logprob is not None, c.engine_logprob is not None)
    filled = c._replace(
        external=c.external.to(c.advantage.dtype),
        entropy_weight=c.token_weight if c.entropy_weight is None else c.entropy_weight,
    )
    absent = torch.zeros_like(c.advantage)
    return torch.stack([absent if x is None else x for x in filled], 1), given


def choices(objective: Objective) -> token_kernels.Choices:
    if objective.internal not in token_kernels.INTERNAL:
        raise ValueError(
            "backend 'triton' has built-in token losses only: want backend reference, torch or cpp for the registered "
            f"one; got internal {objective.internal!r}"
        )
    return token_kernels.Choices(*(getattr(objective, name) for name in token_kernels.Choices._fields))


def coefficients(objective: Objective) -> token_kernels.Coefficients:
    values = (getattr(objective, name) for name in token_kernels.Coefficients._fields)
    return token_kernels.Coefficients(*(float("inf") if v is None else float(v) for v in values))


# ---- gradients


class ChunkGradients(GradientSum):
    """The inputs' gradients from exponentials, whose rows have factors, or from the gradient of the logits."""

    at_target: Tensor | None = None  # (N,): the gradients of the targets' logits that are not in the products

    def add_chunk(self, work: Work, rows: Index, head: Head, values: Tensor) -> None:
        """Add a chunk, whose slopes may be scaled in `values`."""
        live = (values[:, DLOGPROB : DENTROPY + 1] != 0).any(1)
        dlogits, closed = work.differentiate(head, values, self.scale)
        factor = None
        if closed is not None:
            factor, own = closed
            new = own.new_zeros(len(self.head.target)) if self.at_target is None else self.at_target
            new[rows] = own
            self.at_target = new
        if self.want.needs.hidden:
            gradient = dhidden(dlogits, head)
            if closed is not None:
                own_tokens.finish_hidden(gradient, *closed, head.weight, head.target.contiguous())
            self.set_hidden(rows, gradient)
            del gradient  # its memory is the scratch of what follows
        if self.want.weight:
            hidden = head.hidden.where(live[:, None], 0.0)
            hidden = (hidden if factor is None else hidden * factor[:, None]).to(dlogits.dtype)
            if self.weight is None and work.count == len(values) and hidden.dtype == torch.bfloat16:
                self.weight = torch.mm(dlogits.t(), hidden)  # complete; not fp16, where scaled values may overflow
            else:
                self.add_weight(dlogits, hidden)
        if self.want.needs.bias:
            row = live[:, None] if factor is None else factor[:, None]
            self.bias.add_(dweight(dlogits, row.to(dlogits.dtype)).squeeze(1))

    def finish(self) -> Gradients:
        if self.at_target is not None:
            assert self.scale is None, "fp16 has no exponentials"
            with on_device(self.at_target.device):
                if self.weight is not None:
                    own_tokens.add_to_weight(self.weight, self.at_target, self.head.hidden, self.head.target)
                if self.want.needs.bias:
                    one = self.at_target.new_ones(len(self.at_target), 1)
                    own_tokens.add_to_weight(self.bias[:, None], self.at_target, one, self.head.target)
        return super().finish()


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
