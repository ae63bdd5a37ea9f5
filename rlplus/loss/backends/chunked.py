"""The `torch` backend: chunks of tokens, one pass, three GEMMs, any device; the full logits never exist.

Per chunk: logits in fp32 (fp64 for fp64 inputs), log-softmax in place, logprob and entropy of every row, the
objective, the logits' gradient written over the logits, and the two GEMMs that take it to hidden and weight.

Scratch: two buffers (rows, V) of the accumulation dtype, so rows = max_scratch_mb * 10^6 / (8 V) in fp32. On a GPU
with half-precision inputs a third, of the gradient in that dtype, and for each row copies of its hidden state and of
its gradient; with a softcap another, of its slope. The dW accumulator (V, H) is not counted.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import PolicyCall, PolicyResult, Slopes, Stored
from rlplus.loss.backends.drawn_gradients import draw, gradients_of
from rlplus.loss.head.gradient_sum import Gradients, GradientSum, Want
from rlplus.loss.head.head import (
    Head,
    RunningStatistics,
    Statistics,
    cap_slope,
    capped,
    raw_logits,
    scaled,
)
from rlplus.loss.objective.divergence import teacher_classes, value_and_gradient
from rlplus.loss.objective.tokens import FLOOR, stat_names, token_loss


def policy_loss(call: PolicyCall) -> PolicyResult:
    head, constants, objective, want = call
    logprob = head.new_column()
    entropy = head.new_column()
    loss = head.hidden.new_zeros((), dtype=head.dtype)
    stats = head.hidden.new_zeros(len(stat_names(constants)), dtype=head.dtype)
    grads = GradientSum(head, want, call.factors)
    for rows in _chunks(head, want.scratch_bytes):
        logp, p, logprob[rows], entropy[rows], slope = statistics(head, rows, want.some)
        out = token_loss(logprob[rows], entropy[rows], constants.rows(rows), objective)
        loss += out.loss
        stats += torch.stack(list(out.stats.values()))
        if want.some:
            dentropy = out.dentropy if objective.entropy_coef else None
            _add(grads, rows, (logp, p, slope), out.dlogprob, dentropy, entropy[rows])
        del logp, p, slope  # else there are four buffers while the next chunk's are made
    return PolicyResult(loss, logprob, entropy, stats, grads.finish())


def new_stored(head: Head, count: int) -> Stored:
    """Logits before the softcap (count, V), and nothing."""
    return tuple(head.hidden.new_empty(count, width, dtype=head.dtype) for width in (len(head.weight), 0))  # type: ignore[return-value]


def logprob(head: Head, scratch_bytes: float, stored: Stored | None = None) -> tuple[Tensor, Tensor]:
    logprob = head.new_column()
    entropy = head.new_column()
    for rows in _chunks(head, scratch_bytes):
        x = None
        if stored is not None:
            x = scaled(raw_logits(head.rows(rows)), head.rows(rows))
            stored[0][rows] = x
        _, _, logprob[rows], entropy[rows], _ = statistics(head, rows, False, x)
    return logprob, entropy


def logprob_backward(head: Head, slopes: Slopes, want: Want, stored: Stored | None = None) -> Gradients:
    grads = GradientSum(head, want, list(slopes))
    for rows in _chunks(head, want.scratch_bytes):
        x = None if stored is None else stored[0][rows].clone()
        logp, p, _, entropy, slope = statistics(head, rows, True, x)
        _add(grads, rows, (logp, p, slope), *slopes.rows(rows), entropy)
        del logp, p, slope
    return grads.finish()


def divergence(head: Head, teacher: Head, weights: Tensor, beta: float, want: Want) -> tuple[Tensor, Gradients]:
    """-> divergence (N,), gradients of sum(weights * divergence). beta: as in `objective/divergence.py`."""
    values = head.hidden.new_empty(len(head.target), dtype=head.dtype)
    grads = gradients_of(head, want, [weights], draw)
    for rows in _chunks(head, want.scratch_bytes / 3):  # six buffers in the place of two
        part = head.rows(rows)
        logp, _, _, slope = _log_probabilities(part, want.some)
        logq = _log_probabilities(teacher.rows(rows), gradient=False)[0]
        values[rows], dz = value_and_gradient(logp, logq.to(head.dtype), beta)
        if want.some:
            _add_weighted(grads, rows, (dz, logp, slope), weights[rows])
        del logp, logq, slope, dz
    return values, grads.finish()


def topk_divergence(
    head: Head, tokens: Tensor, logprobs: Tensor, weights: Tensor, beta: float, want: Want
) -> tuple[Tensor, Gradients]:
    """As `divergence`, from the teacher's tokens and logprobs (N, k).

    The others are a class of their own, whose slope is shared in proportion to their probabilities.
    """
    values = head.hidden.new_empty(len(head.target), dtype=head.dtype)
    grads = gradients_of(head, want, [weights], draw)
    V = len(head.weight)
    k = tokens.shape[1]
    for rows in _chunks(head, want.scratch_bytes / (1 if head.uniform is None else 2)):  # a draw takes as much
        part = head.rows(rows)
        at = tokens[rows].clamp(0, V - 1)
        z, slope = _logits(part, want.some)
        memory = torch.empty_like(z)
        classes = [z.gather(1, at)]
        if k < V:
            top = z.scatter_(1, at, -torch.inf).amax(1, keepdim=True).clamp_(min=FLOOR)
            total = torch.exp(z.sub_(top), out=memory).sum(1, keepdim=True)  # 1 or more, or 0 where all are -inf
            total.clamp_(min=torch.finfo(total.dtype).tiny)
            classes.append(top + total.log())
        logq = teacher_classes(logprobs[rows], V).to(head.dtype).clamp_(min=FLOOR)
        values[rows], dclasses = value_and_gradient(_log_softmax(torch.cat(classes, 1))[0], logq, beta)
        if want.some:
            if k < V:
                memory.mul_(dclasses[:, k:] / total)
            memory.scatter_(1, at, dclasses[:, :k])
            _add_weighted(grads, rows, (memory, z, slope), weights[rows])
        del z, slope, memory
    return values, grads.finish()


def _chunks(head: Head, scratch_bytes: float) -> Iterator[slice]:
    N = len(head.target)
    V, H = head.weight.shape
    row = V * scratch_per_logit(*head.logits)
    if head.hidden.is_cuda:
        row += 2 * H * (head.hidden.dtype.itemsize + head.dtype.itemsize)
    return slices(N, scratch_bytes / row)


def slices(N: int, rows: float) -> Iterator[slice]:
    """About so many of N rows at a time."""
    size = max(1, int(rows))
    return (slice(start, min(start + size, N)) for start in range(0, N, size))


def statistics(
    head: Head, rows: slice, gradient: bool, x: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """log p (n, V), memory for p (n, V), logprob (n,), entropy (n,), slope (n, V) of the softcap.

    logprob is NaN where the target is no token; slope is None without a softcap or a gradient. x: logits before the
    softcap, which are overwritten; None: they are computed.
    """
    head = head.rows(rows)
    logp, p, entropy, slope = _log_probabilities(head, gradient, x)
    known = (head.target >= 0) & (head.target < logp.shape[1])
    logprob = logp.gather(1, head.target.where(known, 0)[:, None]).squeeze(1)
    return logp, p, logprob.masked_fill(~known, torch.nan), entropy, slope


def _log_probabilities(
    head: Head, gradient: bool, x: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """log p (n, V), memory for p (n, V), entropy (n,), slope (n, V) as in `_statistics`."""
    z, slope = _logits(head, gradient, x)
    return *_log_softmax(z), slope


def _logits(head: Head, gradient: bool, x: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """z (n, V), and the slope (n, V) of the softcap."""
    if x is None:
        x = scaled(raw_logits(head), head)
    slope = cap_slope(x, head) if gradient else None
    return capped(x, head), slope


def _log_softmax(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p over z (n, V), memory for p (n, V), entropy (n,)."""
    top, at = z.max(-1, keepdim=True)
    logsum, entropy, p = _row_statistics(z.sub_(top).clamp_(min=FLOOR), at)
    return z.sub_(logsum[:, None]), p, entropy


def _row_statistics(z: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log sum e^z and entropy (n,) of z (n, V), whose largest, at `at` (n, 1), is 0; memory like z.

    The exponentials are summed without the largest, a 1 that would take their digits: a logprob near 0 keeps its
    relative accuracy. No matrix product: its precision would be the caller's choice.
    """
    e = z.exp()
    largest = e.gather(1, at).squeeze(1)  # 0 where all are -inf
    rest = e.scatter_(1, at, 0.0).sum(-1) + (largest - 1)
    logsum = rest.log1p()
    return logsum, logsum - e.mul_(z).sum(-1) / (1 + rest), e


def _add(
    grads: GradientSum, rows: slice, matrices: tuple[Tensor, Tensor, Tensor | None], dlogprob: Tensor,
    dentropy: Tensor | None, entropy: Tensor,
) -> None:  # fmt: skip
    """Add a chunk; matrices: log p, p and slope, of which log p is overwritten by the logits' gradient,
    dlogprob (onehot - p) - dentropy p (log p + entropy)."""
    logp, p, slope = matrices
    active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
    dentropy = None if dentropy is None else grads.scaled(dentropy)
    torch.exp(logp, out=p)
    head = grads.head.rows(rows)
    dz = _row_gradient(head, logp, p, grads.scaled(dlogprob), dentropy, entropy)
    if slope is not None:
        dz *= slope
    grads.add(rows, head, dz, active, p)


def _add_weighted(
    grads: GradientSum, rows: slice, matrices: tuple[Tensor, Tensor, Tensor | None], weights: Tensor
) -> None:
    """Add weights * dz, from the derivatives by z; matrices: dz, memory and slope of the softcap (n, V)."""
    dz, memory, slope = matrices
    head = grads.head.rows(rows)
    dz *= (grads.scaled(weights) / head.divisor)[:, None]
    if slope is not None:
        dz *= slope
    grads.add(rows, head, dz, weights != 0, memory)


def _row_gradient(
    head: Head, logp: Tensor, p: Tensor, dlogprob: Tensor, dentropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Written over logp (n, V), or over a block of its columns, relative to whose start targets are given then."""
    c = dlogprob / head.divisor
    here = (head.target >= 0) & (head.target < logp.shape[1])
    at = head.target.where(here, 0)[:, None]
    logprob = logp.gather(1, at)
    own = c[:, None] * -torch.expm1(logprob)  # c - c p would cancel near p = 1
    if dentropy is None:
        dz = torch.mul(p, -c[:, None], out=logp)
    else:
        bonus = (-dentropy / head.divisor)[:, None]
        own += bonus * (logprob + entropy[:, None]) * p.gather(1, at)
        dz = logp.add_(entropy[:, None]).mul_(bonus).sub_(c[:, None]).mul_(p)
    return dz.scatter_(1, at, torch.where(here[:, None], own, dz.gather(1, at)))


# ---- the rows of a split head, for rlplus.loss.backends.sharded

OVERWRITES = True


def scratch_per_logit(dtype: torch.dtype, device: str, capped: bool = False) -> int:
    """Two buffers, three with a softcap, and on a GPU another in half precision."""
    wide = torch.promote_types(dtype, torch.float32)
    return (3 if capped else 2) * wide.itemsize + (dtype.itemsize if device == "cuda" and dtype != wide else 0)


def block_logits(head: Head) -> Tensor:
    return raw_logits(head)


def block_statistics(head: Head, z: Tensor) -> Statistics:
    z = capped(scaled(z, head), head)
    top, at = z.max(-1, keepdim=True)
    z = z.sub_(top.masked_fill(top == -torch.inf, 0.0)).clamp_(min=FLOOR)
    logsum, entropy, _ = _row_statistics(z, at)
    z_target = z.gather(1, head.target.clamp(0, z.shape[1] - 1)[:, None]).squeeze(1)
    return Statistics(top.squeeze(1), logsum, z_target - logsum, entropy)


def running_statistics(head: Head) -> RunningStatistics:
    return RunningStatistics(head, block_statistics)


def known_rows(head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> tuple[Any, ...]:
    active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
    return rows, dlogprob, dentropy, ~active[:, None] if head.hidden.is_cuda else None


def block_gradient(head: Head, z: Tensor, known: tuple[Any, ...]) -> Tensor:
    rows, dlogprob, dentropy, without = known
    x = scaled(z, head)
    slope = cap_slope(x, head)
    logp = capped(x, head).sub_(rows.reference[:, None]).sub_(rows.logsum[:, None]).clamp_(min=FLOOR)
    dz = _row_gradient(head, logp, logp.exp(), dlogprob, dentropy, rows.entropy)
    if slope is not None:
        dz *= slope
    return dz if without is None else dz.masked_fill_(without, 0.0)  # a CUDA graph includes every row
