"""Tokens that a sampler kept: the policy renormalised over some tokens of each row, from the logits of those alone.

With top-p, top-k or min-p a token was sampled from softmax(z) over the row's kept tokens, so that is the policy whose
logprobs count. All backends but `reference` compute it here, in fp32 (fp64); rows without kept tokens take the
backend's own way in the same call. With a mean of k kept tokens the work falls from N V H to N k H.

Pairs of a row and one of its kept tokens, in order of rows, are taken a few at a time, so that copies of their hidden
states and rows of the weight fit max_scratch_mb. Sums over a row's pairs, and over those of a token, are bags of
`embedding_bag`, in a fixed order: the same inputs give the same bits, on CUDA too. There the host waits for the number
of rows and of pairs with a gradient, which a CUDA graph cannot.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplus.loss import MISMATCH_STATS, STATS, Objective, TokenConstants, token_loss
from rlplus.loss.head import FLOOR, Head, cap_slope, capped, drop_smallest, scaled
from rlplus.loss.inputs import check_values

Grads = tuple[Tensor, Tensor, Tensor]
CACHED_BYTES = 4e6  # copies on a CPU: with 1250 MB of them it took twice as long, at 8 and at 64 tokens a row


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
    own: Tensor
    logsum: Tensor
    logprob: Tensor
    entropy: Tensor


def check(head: Head, V: int, on: Tensor) -> None:
    """Check the kept tokens, and that the target is among them where the row is `on`."""
    offsets, tokens = head.kept_offsets, head.kept_tokens
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


def policy_loss(
    whole: Callable[..., Any],
    head: Head,
    constants: TokenConstants,
    objective: Objective,
    grad_filter: float,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Grads]:
    """whole(head, constants, needs, weight_grad): the loss of rows with the whole vocabulary. Returns as it does."""
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    stats = logprob.new_zeros(len(STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS))
    loss, grads = logprob.new_zeros(()), _Gradients(head, needs, weight_grad)
    dense, some = _sets(head)
    if len(dense):
        part = whole(_dense(head, dense), constants.rows(dense), *grads.wanted())
        loss, logprob[dense], entropy[dense], stats, of_whole = part
        grads.take(dense, *of_whole)
    if len(some):
        part_head, pairs = _kept(head, some)
        rows = _statistics(part_head, pairs, scratch_bytes)
        logprob[some], entropy[some] = rows.logprob, rows.entropy
        out = token_loss(rows.logprob, rows.entropy, constants.rows(some), objective)
        loss, stats = loss + out.loss, stats + torch.stack(list(out.stats.values()))
        dlogprob = drop_smallest(out.dlogprob, rows.logprob, grad_filter)
        grads.add(some, part_head, pairs, rows, (dlogprob, out.dentropy), scratch_bytes)
    return loss, logprob, entropy, stats, grads.finish()


def logprob(whole: Callable[..., Any], head: Head, scratch_bytes: float) -> tuple[Tensor, Tensor]:
    """whole(head, scratch_bytes): logprob and entropy of rows with the whole vocabulary. Returns as it does."""
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    dense, some = _sets(head)
    if len(dense):
        logprob[dense], entropy[dense] = whole(_dense(head, dense), scratch_bytes)
    if len(some):
        rows = _statistics(*_kept(head, some), scratch_bytes)
        logprob[some], entropy[some] = rows.logprob, rows.entropy
    return logprob, entropy


def logprob_backward(
    whole: Callable[..., Any],
    head: Head,
    dlogprob: Tensor,
    dentropy: Tensor,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> Grads:
    """whole(head, dlogprob, dentropy, needs, weight_grad): the gradients of rows with the whole vocabulary."""
    grads, (dense, some) = _Gradients(head, needs, weight_grad), _sets(head)
    if len(dense):
        grads.take(dense, *whole(_dense(head, dense), dlogprob[dense], dentropy[dense], *grads.wanted()))
    if len(some):
        part_head, pairs = _kept(head, some)
        rows = _statistics(part_head, pairs, scratch_bytes)
        grads.add(some, part_head, pairs, rows, (dlogprob[some], dentropy[some]), scratch_bytes)
    return grads.finish()


def mask(head: Head) -> Tensor:
    """(N, V) bool: where the policy has probability; for the `reference` backend."""
    offsets, tokens = head.kept_offsets, head.kept_tokens
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


def _spans(head: Head, count: int, scratch_bytes: float) -> Iterator[slice]:
    """Pairs at a time: each takes a copy of its hidden state and of its token's row of the weight, in fp32 (fp64)."""
    if not head.hidden.is_cuda:
        scratch_bytes = min(scratch_bytes, CACHED_BYTES)
    step = max(1, int(scratch_bytes // (2 * head.hidden.shape[1] * head.dtype.itemsize)))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _statistics(head: Head, pairs: Pairs, scratch_bytes: float) -> _Rows:
    x = head.hidden.new_empty(len(pairs.row), dtype=head.dtype)
    for span in _spans(head, len(x), scratch_bytes):
        product = head.hidden.index_select(0, pairs.row[span]).to(head.dtype)
        x[span] = product.mul_(head.weight.index_select(0, pairs.token[span])).sum(-1)
    own_temperature = None if head.row_temperature is None else head.row_temperature[pairs.row]
    bias = None if head.bias is None else head.bias[pairs.token][:, None]
    each = head._replace(bias=bias, row_temperature=own_temperature)  # a pair each, not a row
    slope = cap_slope(scaled(x[:, None], each), each)
    z = capped(x[:, None], each).squeeze(1)
    own = pairs.token == head.target[pairs.row]
    n = len(head.target)
    top = z.new_full((n,), -torch.inf).scatter_reduce_(0, pairs.row, z, "amax")
    z = (z - top.masked_fill(top == -torch.inf, 0.0)[pairs.row]).clamp_(min=FLOOR)
    e = z.exp()
    # Without the target, whose 1 would take the digits of the others where it is nearly sure.
    terms, index = torch.stack([e.masked_fill(own, 0.0), e * z], 1), torch.arange(len(z), device=z.device)
    rest, moment = _bags(terms, index, None, pairs.offsets).unbind(1)
    hit = z.new_full((n,), torch.nan).index_put_((pairs.row[own],), z[own])
    e_hit = hit.exp().nan_to_num(0.0)
    logsum = (rest + (e_hit - 1)).log1p().masked_fill(top == -torch.inf, torch.nan)
    entropy = logsum - moment / (rest + e_hit)
    return _Rows(z, None if slope is None else slope.squeeze(1), own, logsum, (hit - logsum).clamp(min=FLOOR), entropy)


def _bags(table: Tensor, index: Tensor, factors: Tensor | None, offsets: Tensor) -> Tensor:
    """Sums of the table's rows (., H) at index (P,) times factors (P,), in their dtype: (len(offsets) - 1, H)."""
    if factors is not None and table.dtype != factors.dtype:
        table, index = table.index_select(0, index).to(factors.dtype), torch.arange(len(index), device=index.device)
    return torch.nn.functional.embedding_bag(
        index, table, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True
    )


class _Gradients:
    """The inputs' gradients: of the rows with the whole vocabulary, which come first, and of the others."""

    def __init__(self, head: Head, needs: list[bool], weight_grad: Tensor | None) -> None:
        self.head, self.needs, self.weight_grad = head, needs, weight_grad
        self.weight = weight_grad  # or a sum in fp32 (fp64), or complete in hidden's dtype
        self.hidden = head.hidden.new_zeros(head.hidden.shape if needs[0] else (0,))
        self.bias = head.hidden.new_zeros(len(head.weight) if needs[2] else 0, dtype=head.dtype)

    def wanted(self) -> tuple[list[bool], Tensor | None]:
        """The last arguments of the function that computes the first."""
        if self.weight is None and self.needs[1]:
            self.weight = self.head.hidden.new_zeros(self.head.weight.shape, dtype=self.head.dtype)
        return [self.needs[0], False, self.needs[2]], self.weight

    def take(self, which: Tensor, dhidden: Tensor, _: Tensor, dbias: Tensor) -> None:
        """The gradients of the rows with the whole vocabulary; that of weight was added already."""
        if self.needs[0]:
            self.hidden[which] = dhidden
        if self.needs[2]:
            self.bias += dbias

    def add(
        self, which: Tensor, head: Head, pairs: Pairs, rows: _Rows, slopes: tuple[Tensor, Tensor], scratch_bytes: float
    ) -> None:
        """The gradients of the rows with kept tokens."""
        dz = _pair_gradient(head, pairs, rows, *slopes)
        live = dz.nonzero().squeeze(1)
        row, token, dz = pairs.row[live], pairs.token[live], dz[live]
        spans = list(_spans(head, len(dz), scratch_bytes))
        if self.needs[0]:
            total = head.hidden.new_zeros(head.hidden.shape, dtype=head.dtype)
            _add_sums(total, row, dz, head.weight, token, spans)
            self.hidden[which] = total.to(self.hidden.dtype)
        order = token.argsort(stable=True)
        row, token, dz = row[order], token[order], dz[order]
        if self.weight is not None:
            _add_sums(self.weight, token, dz, head.hidden, row, spans)
        elif self.needs[1]:  # a sum for the tokens that there are: for all it would take most of the time
            tokens, number = token.unique_consecutive(return_inverse=True)
            total = head.hidden.new_zeros(len(tokens), head.hidden.shape[1], dtype=head.dtype)
            _add_sums(total, number, dz, head.hidden, row, spans)
            self.weight = head.hidden.new_zeros(head.weight.shape)
            self.weight[tokens] = total.to(self.weight.dtype)
        if self.needs[2]:
            one = dz.new_ones(1, 1)
            _add_sums(self.bias[:, None], token, dz, one, torch.zeros_like(row), [slice(None)])

    def finish(self) -> Grads:
        """-> gradients of hidden, weight and bias where needed; weight's is not returned if it is in `weight_grad`."""
        weight = self.head.hidden.new_empty(0) if self.weight is None or self.weight_grad is not None else self.weight
        return self.hidden, weight.to(self.head.hidden.dtype), self.bias


def _pair_gradient(head: Head, pairs: Pairs, rows: _Rows, dlogprob: Tensor, dentropy: Tensor) -> Tensor:
    """The loss's derivative by x (P,), 0 in rows whose slopes are, whatever their contents."""
    logp = rows.z - rows.logsum[pairs.row]
    a, h, p = dlogprob[pairs.row], dentropy[pairs.row], logp.exp()
    dz = torch.where(rows.own, -a * logp.expm1(), -a * p) - h * p * (logp + rows.entropy[pairs.row])
    divisor = head.divisor
    dz = dz / (divisor[pairs.row] if isinstance(divisor, Tensor) else divisor)
    if rows.slope is not None:
        dz = dz * rows.slope
    return torch.where((a != 0) | (h != 0), dz, 0.0)


def _add_sums(total: Tensor, key: Tensor, dz: Tensor, table: Tensor, index: Tensor, spans: Iterable[slice]) -> None:
    """total[k] += sum of dz times the table's rows at index, over the pairs whose key (P,), sorted, is k."""
    for span in spans:
        which, counts = key[span].unique_consecutive(return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        total[which] += _bags(table, index[span], dz[span], offsets)
