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

from rlplus.loss.head.head import (
    Gradients,
    Head,
    RunningStatistics,
    Statistics,
    add_dweight,
    cap_slope,
    capped,
    dhidden,
    fp16_scale,
    fp16_weights,
    raw_logits,
    scaled,
)
from rlplus.loss.objective.divergence import teacher_classes, value_and_gradient
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import FLOOR, MISMATCH_STATS, STATS, TokenConstants, token_loss


def policy_loss(
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
    N, dtype = len(head.target), head.dtype
    logprob, entropy = (head.hidden.new_empty(N, dtype=dtype) for _ in range(2))
    loss = head.hidden.new_zeros((), dtype=dtype)
    names = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    stats = head.hidden.new_zeros(len(names), dtype=dtype)
    grads = Gradients.zeros(head, needs, weight_grad)
    gradient = any(g.numel() for g in grads)
    scale = _fp16_scale(head, fp16_weights(constants, objective))
    if scale is not None and weight_grad is not None:
        weight_grad.mul_(scale)  # a power of two: exact, and undone at the end
    for rows in _chunks(head, scratch_bytes):
        part = constants.rows(rows)
        logp, p, logprob[rows], entropy[rows], slope = statistics(head, rows, gradient)
        out = token_loss(logprob[rows], entropy[rows], part, objective)
        loss += out.loss
        stats += torch.stack(list(out.stats.values()))
        if gradient:
            dentropy = out.dentropy if objective.entropy_coef else None
            _backward(head, rows, (logp, p, slope), out.dlogprob, dentropy, entropy[rows], scale, grads)
        del logp, p, slope  # else there are four buffers while the next chunk's are made
    return loss, logprob, entropy, stats, _unscaled(grads, scale).finish(head, weight_grad)


def new_stored(head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Memory for what `logprob_backward` needs of so many rows: logits before the softcap (count, V), and nothing."""
    return tuple(head.hidden.new_empty(count, width, dtype=head.dtype) for width in (len(head.weight), 0))  # type: ignore[return-value]


def logprob(head: Head, scratch_bytes: float, stored: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,). stored: of all rows, which are written there; None: they are not kept."""
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    for rows in _chunks(head, scratch_bytes):
        x = None
        if stored is not None:
            x = stored[0][rows] = scaled(raw_logits(head.rows(rows)), head.rows(rows))
        _, _, logprob[rows], entropy[rows], _ = statistics(head, rows, False, x)
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
    grads, scale = Gradients.zeros(head, needs, weight_grad), _fp16_scale(head, [dlogprob, dentropy])
    for rows in _chunks(head, scratch_bytes):
        x = None if stored is None else stored[0][rows].clone()
        logp, p, _, entropy, slope = statistics(head, rows, True, x)
        _backward(head, rows, (logp, p, slope), dlogprob[rows], dentropy[rows], entropy, scale, grads)
        del logp, p, slope
    return _unscaled(grads, scale).finish(head, weight_grad)


def divergence(
    head: Head,
    teacher: Head,
    weights: Tensor,
    beta: float,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """-> divergence (N,), gradients of sum(weights * divergence), as in `policy_loss`. beta: of `divergence.py`."""
    values, scale = head.hidden.new_empty(len(head.target), dtype=head.dtype), _fp16_scale(head, [weights])
    grads = Gradients.zeros(head, needs, weight_grad)
    gradient = any(g.numel() for g in grads)
    for rows in _chunks(head, scratch_bytes / 3):  # six buffers in the place of two
        part = head.rows(rows)
        logp, _, _, slope = _log_probabilities(part, gradient)
        logq = _log_probabilities(teacher.rows(rows), gradient=False)[0]
        values[rows], dz = value_and_gradient(logp, logq.to(head.dtype), beta)
        if gradient:
            _add_weighted(part, rows, (dz, logp, slope), weights[rows], scale, grads)
        del logp, logq, slope, dz
    return values, _unscaled(grads, scale).finish(head, weight_grad)


def topk_divergence(
    head: Head,
    tokens: Tensor,
    logprobs: Tensor,
    weights: Tensor,
    beta: float,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """As `divergence`, from the teacher's tokens and logprobs (N, k).

    The others are a class of their own, whose slope is shared in proportion to their probabilities.
    """
    values, scale = head.hidden.new_empty(len(head.target), dtype=head.dtype), _fp16_scale(head, [weights])
    grads = Gradients.zeros(head, needs, weight_grad)
    gradient, V, k = any(g.numel() for g in grads), len(head.weight), tokens.shape[1]
    for rows in _chunks(head, scratch_bytes):
        part, at = head.rows(rows), tokens[rows].clamp(0, V - 1)
        z, slope = _logits(part, gradient)
        memory = torch.empty_like(z)
        classes = [z.gather(1, at)]
        if k < V:
            top = z.scatter_(1, at, -torch.inf).amax(1, keepdim=True).clamp_(min=FLOOR)
            total = torch.exp(z.sub_(top), out=memory).sum(1, keepdim=True)  # 1 or more, or 0 where all are -inf
            total.clamp_(min=torch.finfo(total.dtype).tiny)
            classes.append(top + total.log())
        logq = teacher_classes(logprobs[rows], V).to(head.dtype).clamp_(min=FLOOR)
        values[rows], dclasses = value_and_gradient(_log_softmax(torch.cat(classes, 1))[0], logq, beta)
        if gradient:
            if k < V:
                memory.mul_(dclasses[:, k:] / total)
            memory.scatter_(1, at, dclasses[:, :k])
            _add_weighted(part, rows, (memory, z, slope), weights[rows], scale, grads)
        del z, slope, memory
    return values, _unscaled(grads, scale).finish(head, weight_grad)


def _chunks(head: Head, scratch_bytes: float) -> Iterator[slice]:
    N, (V, H) = len(head.target), head.weight.shape
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


def _backward(
    head: Head,
    rows: slice,
    matrices: tuple[Tensor, Tensor, Tensor | None],
    dlogprob: Tensor,
    dentropy: Tensor | None,
    entropy: Tensor,
    scale: Tensor | None,
    grads: Gradients,
) -> None:
    """Write dlogprob (onehot - p) - dentropy p (log p + entropy) over logp and add the chunk to the gradients."""
    logp, p, slope = matrices
    active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
    if scale is not None:
        dlogprob, dentropy = dlogprob * scale, None if dentropy is None else dentropy * scale
    torch.exp(logp, out=p)
    head = head.rows(rows)
    dz = _row_gradient(head, logp, p, dlogprob, dentropy, entropy)
    if slope is not None:
        dz *= slope
    _add(head, rows, dz, p, active, scale, grads)


def _add_weighted(
    head: Head, rows: slice, matrices: tuple[Tensor, Tensor, Tensor | None], weights: Tensor,
    scale: Tensor | None, grads: Gradients,
) -> None:  # fmt: skip
    """`_add` weights * dz, from the derivatives by z; matrices: dz, memory and slope of the softcap (n, V)."""
    dz, memory, slope = matrices
    dz *= ((weights if scale is None else weights * scale) / head.divisor)[:, None]
    if slope is not None:
        dz *= slope
    _add(head, rows, dz, memory, weights != 0, scale, grads)


def _add(
    head: Head, rows: slice, dz: Tensor, memory: Tensor, active: Tensor, scale: Tensor | None, grads: Gradients
) -> None:
    """Add the products of a chunk's dz (n, V), which may be overwritten, as `memory` (n, V) is; head: of the chunk.

    active (n,): rows with a gradient. `scale` multiplies the gradients of weight and bias.
    """
    hidden = head.hidden
    keep: Tensor | slice = rows
    if dz.device.type == "cpu":  # leave rows without a gradient out of the GEMMs
        index = active.nonzero().squeeze(1)
        if len(index) < len(active):
            dz, hidden = torch.index_select(dz, 0, index, out=memory[: len(index)]), hidden[index]
            keep = index + rows.start
    else:  # counting them would wait for the device
        dz, hidden = dz.masked_fill_(~active[:, None], 0.0), hidden.masked_fill(~active[:, None], 0.0)
    if grads.hidden.numel():
        gradient = dhidden(dz, head)
        if scale is not None:
            gradient /= scale
        grads.hidden[keep] = gradient.to(grads.hidden.dtype)
    if grads.weight.numel():
        add_dweight(grads.weight, dz, hidden)
    if grads.bias.numel():
        grads.bias.add_(dz.sum(0))


def _fp16_scale(head: Head, slopes: list[Tensor]) -> Tensor | None:
    """The factor of the logits' gradient before it is rounded to fp16, which happens on GPUs only."""
    return fp16_scale(*slopes) if head.mixed and head.hidden.dtype == torch.float16 else None


def _unscaled(grads: Gradients, scale: Tensor | None) -> Gradients:
    if scale is not None:
        grads.weight.div_(scale)
        grads.bias.div_(scale)
    return grads


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
