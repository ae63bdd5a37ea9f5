"""Tokens that a sampler kept: the policy renormalised over some tokens of each row, from the logits of those alone.

With top-p, top-k or min-p a token was sampled from softmax(z) over the row's kept tokens, so that is the policy whose
logprobs count. All backends but `reference` compute it here, in fp32 (fp64); rows without kept tokens take the
backend's own way in the same call. With a mean of k kept tokens the work falls from N V H to N k H.

Pairs of a row and one of its kept tokens are in order of rows; `pair_sums` adds them up. On CUDA the host waits for the
number of rows and of pairs with a gradient, which a CUDA graph cannot.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss.backends import PolicyCall, PolicyResult, Slopes
from rlplus.loss.backends.pair_sums import PairGradients, bags, spans
from rlplus.loss.backends.sampled import SAMPLED_STATS
from rlplus.loss.head.gradient_sum import Gradients, Want
from rlplus.loss.head.head import Head, cap_slope, capped, scaled
from rlplus.loss.objective.inputs import check_values
from rlplus.loss.objective.tokens import FLOOR, stat_names, token_loss


class Pairs(NamedTuple):
    """row, token (P,): the kept tokens of a head's rows, one or more of each; offsets (N + 1,): where a row's begin."""

    row: Tensor
    token: Tensor
    offsets: Tensor


class _Rows(NamedTuple):
    """z - top (P,), dz / dx (P,) or None, whether a pair is its row's target (P,), and (N,) each: log sum e^(z - top),
    logprob, entropy."""

    z: Tensor
    slope: Tensor | None
    is_target: Tensor
    logsum: Tensor
    logprob: Tensor
    entropy: Tensor


def check(head: Head, V: int, on: Tensor) -> None:
    """Check the kept tokens, and that the target is among them where the row is `on`."""
    offsets = head.kept_offsets
    tokens = head.kept_tokens
    assert offsets is not None
    assert tokens is not None
    rising = (offsets.diff() >= 0).all() & (offsets[0] == 0) & (offsets[-1] == len(tokens))
    check_values(rising, f"want kept offsets that rise from 0 to the number of tokens, {len(tokens)}; got others")
    check_values((tokens >= 0) & (tokens < V), f"want kept tokens in [0, {V}); got one outside")
    row = torch.repeat_interleave(offsets.diff(), output_size=len(tokens))
    key, _ = (row * V + tokens).sort()
    check_values(key[1:] != key[:-1], "want each kept token of a row once; got one twice")
    found = torch.zeros_like(head.target).index_add_(0, row, (tokens == head.target[row]).long()) > 0
    message = "want the target among its row's kept tokens; got one that is not"
    check_values(found | (offsets.diff() == 0) | ~on, message)


def policy_loss(whole: Callable[[PolicyCall], PolicyResult], call: PolicyCall) -> PolicyResult:
    """As a backend's. whole: computes rows with the whole vocabulary."""
    head, constants, objective, want = call
    logprob = head.new_column()
    entropy = head.new_column()
    names = stat_names(constants)
    stats = logprob.new_zeros(len(names) + (0 if head.uniform is None else len(SAMPLED_STATS)))
    loss = logprob.new_zeros(())
    grads = PairGradients(head, want)
    dense, some = _sets(head)
    if len(dense):
        part = whole(PolicyCall(_dense(head, dense), constants.rows(dense), objective, grads.wanted()))
        loss, logprob[dense], entropy[dense], stats, _ = part
        grads.take(dense, part.gradients)
    if len(some):
        part_head, pairs = _kept(head, some)
        rows = _statistics(part_head, pairs, want.scratch_bytes)
        logprob[some] = rows.logprob
        entropy[some] = rows.entropy
        out = token_loss(rows.logprob, rows.entropy, constants.rows(some), objective)
        loss = loss + out.loss
        stats[: len(names)] += torch.stack(list(out.stats.values()))
        dz = _pair_gradient(part_head, pairs, rows, Slopes(out.dlogprob, out.dentropy))
        grads.add_pairs(some, part_head, pairs.row, pairs.token, dz)
    return PolicyResult(loss, logprob, entropy, stats, grads.finish())


def logprob(
    whole: Callable[[Head, float], tuple[Tensor, Tensor]], head: Head, scratch_bytes: float
) -> tuple[Tensor, Tensor]:
    """As a backend's. whole: computes rows with the whole vocabulary."""
    logprob = head.new_column()
    entropy = head.new_column()
    dense, some = _sets(head)
    if len(dense):
        logprob[dense], entropy[dense] = whole(_dense(head, dense), scratch_bytes)
    if len(some):
        rows = _statistics(*_kept(head, some), scratch_bytes)
        logprob[some] = rows.logprob
        entropy[some] = rows.entropy
    return logprob, entropy


def logprob_backward(
    whole: Callable[[Head, Slopes, Want], Gradients], head: Head, slopes: Slopes, want: Want
) -> Gradients:
    """As a backend's. whole: computes rows with the whole vocabulary."""
    grads = PairGradients(head, want)
    dense, some = _sets(head)
    if len(dense):
        grads.take(dense, whole(_dense(head, dense), slopes.rows(dense), grads.wanted()))
    if len(some):
        part_head, pairs = _kept(head, some)
        rows = _statistics(part_head, pairs, want.scratch_bytes)
        dz = _pair_gradient(part_head, pairs, rows, slopes.rows(some))
        grads.add_pairs(some, part_head, pairs.row, pairs.token, dz)
    return grads.finish()


def mask(head: Head) -> Tensor:
    """(N, V) bool: where the policy has probability; for the `reference` backend."""
    offsets = head.kept_offsets
    tokens = head.kept_tokens
    assert offsets is not None
    assert tokens is not None
    lengths = offsets.diff()
    kept = (lengths == 0)[:, None].repeat(1, len(head.weight))
    kept[torch.arange(len(lengths), device=tokens.device).repeat_interleave(lengths), tokens] = True
    return kept


def _sets(head: Head) -> tuple[Tensor, Tensor]:
    """The numbers of rows with the whole vocabulary, and of those with kept tokens."""
    assert head.kept_offsets is not None
    some = head.kept_offsets.diff() > 0
    return (~some).nonzero().squeeze(1), some.nonzero().squeeze(1)


def _dense(head: Head, which: Tensor) -> Head:
    return head.whole_vocabulary().rows(which)


def _kept(head: Head, which: Tensor) -> tuple[Head, Pairs]:
    """The rows with kept tokens, and their pairs: all that there are, since other rows have none."""
    assert head.kept_offsets is not None
    assert head.kept_tokens is not None
    lengths = head.kept_offsets.diff()[which]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    row = torch.arange(len(which), device=which.device).repeat_interleave(lengths)
    return _dense(head, which), Pairs(row, head.kept_tokens, offsets)


def _statistics(head: Head, pairs: Pairs, scratch_bytes: float) -> _Rows:
    x = head.hidden.new_empty(len(pairs.row), dtype=head.dtype)
    for span in spans(head, len(x), scratch_bytes):
        product = head.hidden.index_select(0, pairs.row[span]).to(head.dtype)
        x[span] = product.mul_(head.weight.index_select(0, pairs.token[span])).sum(-1)
    temperature = None if head.row_temperature is None else head.row_temperature[pairs.row]
    bias = None if head.bias is None else head.bias[pairs.token][:, None]
    each = head._replace(bias=bias, row_temperature=temperature)  # a pair each, not a row
    slope = cap_slope(scaled(x[:, None], each), each)
    z = capped(x[:, None], each).squeeze(1)
    is_target = pairs.token == head.target[pairs.row]
    n = len(head.target)
    top = z.new_full((n,), -torch.inf).scatter_reduce_(0, pairs.row, z, "amax")
    z = (z - top.masked_fill(top == -torch.inf, 0.0)[pairs.row]).clamp_(min=FLOOR)
    e = z.exp()
    # Without the target, whose 1 would take the digits of the others where it is nearly sure.
    terms = torch.stack([e.masked_fill(is_target, 0.0), e * z], 1)
    index = torch.arange(len(z), device=z.device)
    rest, moment = bags(terms, index, None, pairs.offsets).unbind(1)
    hit = z.new_full((n,), torch.nan).index_put_((pairs.row[is_target],), z[is_target])
    e_hit = hit.exp().nan_to_num(0.0)
    logsum = (rest + (e_hit - 1)).log1p().masked_fill(top == -torch.inf, torch.nan)
    entropy = logsum - moment / (rest + e_hit)
    return _Rows(
        z, None if slope is None else slope.squeeze(1), is_target, logsum, (hit - logsum).clamp(min=FLOOR), entropy
    )


def _pair_gradient(head: Head, pairs: Pairs, rows: _Rows, slopes: Slopes) -> Tensor:
    """The loss's derivative by x (P,), 0 in rows whose slopes are, whatever their contents."""
    logp = rows.z - rows.logsum[pairs.row]
    a, h = slopes.rows(pairs.row)
    p = logp.exp()
    dz = torch.where(rows.is_target, -a * logp.expm1(), -a * p) - h * p * (logp + rows.entropy[pairs.row])
    divisor = head.divisor
    dz = dz / (divisor[pairs.row] if isinstance(divisor, Tensor) else divisor)
    if rows.slope is not None:
        dz = dz * rows.slope
    return torch.where((a != 0) | (h != 0), dz, 0.0)
