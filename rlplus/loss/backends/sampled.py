"""backward="sampled": an unbiased backward pass over few logits, for the price of the forward pass.

A row's gradient by its logits is a (1{j = y} - p_j), and h p_j (log p_j + entropy) less for an entropy, with the slopes
a and h of logprob and entropy. It is linear in the probabilities, so each p_j may be replaced by a random w_j of the
same mean: the target's element is exact, as is each other p_j of at least the threshold; a smaller one is kept with
probability p_j / threshold and counts as the threshold. That is threshold sampling (Duffield, Lund & Thorup 2005), the
sparsest unbiased choice for its variance, at most threshold * p_j (Wangni et al. 2018). It is systematic along the row:
one uniform number a row, and an element is kept where the running sum of the small p passes a multiple.

The elements do not depend on the loss: they are drawn while a chunk's logits are there, and the gradients are sums over
a few rows of the weight and of the hidden states, by `pair_sums`. No logit is computed twice, and no GEMM follows.

A row that is so flat that more than MOST elements would be kept has the threshold 1 / MOST, which is decided from its
probabilities and not from what was drawn: it stays unbiased.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlplus.loss.backends import PolicyCall, PolicyResult, Slopes
from rlplus.loss.backends.pair_sums import PairGradients, add_over_ranks
from rlplus.loss.head.gradient_sum import Gradients, Index, Want
from rlplus.loss.head.head import Head
from rlplus.loss.objective.tokens import may_have_gradient, token_loss

MOST = 512  # elements of a row, besides the target's
ONE = 2**40  # a threshold, in the whole numbers of running sums


class Drawn(NamedTuple):
    """The draw from a chunk. row, token (M,) int64 in order of rows, w (M,), log p (M,), and dz / dx (M,) of the
    softcap or None; own_slope (n,): the same of the target, or None.

    Per row (n,): logprob, entropy; variance, the sum of the variances of w; square, the sum of squares of
    logprob's gradient by z; flat, bool: whether its threshold was raised. variance and square may be estimates without
    a bias, and variance then below 0.
    """

    logprob: Tensor
    entropy: Tensor
    row: Tensor
    token: Tensor
    w: Tensor
    logp: Tensor
    slope: Tensor | None
    own_slope: Tensor | None
    variance: Tensor
    square: Tensor
    flat: Tensor


class Drawer(Protocol):
    """The part of a backend."""

    def draws(self, head: Head, on: Tensor, scratch_bytes: float) -> Iterator[tuple[Index, Drawn]]:
        """Chunks of the head's rows, by slice or index, and what was drawn. on (N,) bool: rows that keep elements."""


class Elements(NamedTuple):
    """The logits that have a gradient, targets included: row, token (M,), in order of rows, and by how much each grows
    with the slope of its row's logprob and of its entropy, (M,). 24 bytes each, which max_scratch_mb does not count."""

    row: Tensor
    token: Tensor
    of_logprob: Tensor
    of_entropy: Tensor


class Forward(NamedTuple):
    """Per row (N,): logprob, entropy, and as in `Drawn` variance, square, flat. elements: of rows that keep some.

    Of a split head the elements are this rank's, and all else is known to all ranks. drawn (0-d): how many there are on
    all ranks.
    """

    logprob: Tensor
    entropy: Tensor
    variance: Tensor
    square: Tensor
    flat: Tensor
    elements: Elements
    drawn: Tensor


def policy_loss(drawer: Drawer, call: PolicyCall) -> PolicyResult:
    """As a backend's; SAMPLED_STATS follow the other stats."""
    head, constants, objective, want = call
    on = may_have_gradient(constants, objective)
    known = forward(drawer, head, on & want.some, want.scratch_bytes)
    out = token_loss(known.logprob, known.entropy, constants, objective)
    stats = [*out.stats.values(), *_noise(head, known, on, out.dlogprob)]
    grads = gradients(head, known.elements, Slopes(out.dlogprob, out.dentropy), want)
    return PolicyResult(out.loss, known.logprob, known.entropy, torch.stack(stats), grads)


def forward(drawer: Drawer, head: Head, on: Tensor, scratch_bytes: float) -> Forward:
    """Logprobs and entropies of all rows, and the elements of the rows `on` (N,) bool."""
    N = len(head.target)
    new = head.hidden.new_zeros
    known = Forward(
        logprob=new(N, dtype=head.dtype),
        entropy=new(N, dtype=head.dtype),
        variance=new(N, dtype=head.dtype),
        square=new(N, dtype=head.dtype),
        flat=new(N, dtype=torch.bool),
        elements=_none(head),
        drawn=new((), dtype=head.dtype),
    )
    parts = [known.elements]
    number = torch.arange(N, device=head.hidden.device)
    for rows, drawn in drawer.draws(head, on, scratch_bytes):
        for name in ("logprob", "entropy", "variance", "square", "flat"):
            getattr(known, name)[rows] = getattr(drawn, name)
        parts.append(_elements(head.rows(rows), drawn, on[rows], number[rows]))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    order = columns[0].argsort(stable=True)
    known.drawn.add_(len(order))
    if head.group:
        flat = known.flat.to(head.dtype)
        for x in (known.variance, known.square, known.drawn, flat):
            add_over_ranks(head, x)
        known.flat.copy_(flat > 0)
    return known._replace(elements=Elements(*(column[order] for column in columns)))


def gradients(head: Head, elements: Elements, slopes: Slopes, want: Want) -> Gradients:
    """Gradients of sum(slopes.logprob * logprob + slopes.entropy * entropy); rows whose slopes are 0 have none."""
    a, h = slopes.rows(elements.row)
    dz = torch.where(a == 0, 0.0, a * elements.of_logprob) + torch.where(h == 0, 0.0, h * elements.of_entropy)
    grads = PairGradients(head, want)
    grads.add_pairs(slice(None), head, elements.row, elements.token, dz)
    return grads.finish()


def _none(head: Head) -> Elements:
    number = head.target[:0]
    value = head.hidden.new_empty(0, dtype=head.dtype)
    return Elements(number, number, value, value)


def _elements(head: Head, drawn: Drawn, on: Tensor, number: Tensor) -> Elements:
    """The rows' own elements, then the drawn ones, with factors of temperature and softcap. number (n,): the rows'."""
    V = len(head.weight)
    token = (head.target >= 0) & (head.target < V)
    # A row that is no number has an element where its target is none, too: an entropy's gradient must show it.
    own = (on & (token | (~drawn.entropy.isfinite() & (V > 0)))).nonzero().squeeze(1)
    logp = drawn.logprob[own]
    entropy = drawn.entropy[own]
    factor = torch.ones_like(drawn.logprob) / head.divisor
    own_factor = factor[own] if drawn.own_slope is None else factor[own] * drawn.own_slope[own]
    row = torch.cat([own, drawn.row])
    bonus = drawn.w * (drawn.logp + drawn.entropy[drawn.row])
    scale = factor[drawn.row] if drawn.slope is None else factor[drawn.row] * drawn.slope
    of_logprob = torch.cat([-torch.expm1(logp) * own_factor, -drawn.w * scale])
    of_entropy = torch.cat([-logp.exp() * (logp + entropy) * own_factor, -bonus * scale])
    target = head.target.where(token, 0)[own]
    return Elements(number[row], torch.cat([target, drawn.token]), of_logprob, of_entropy)


SAMPLED_STATS = ("sampled_variance", "sampled_square", "sampled_elements", "sampled_flat")


def _noise(head: Head, known: Forward, on: Tensor, dlogprob: Tensor) -> list[Tensor]:
    """Sums: of the variance and of the square of the gradient by the logits that logprobs have, of elements, of flat
    rows. The root of the first two's ratio is the relative error to expect, but for an entropy bonus and a softcap."""
    counts = on & (dlogprob != 0)
    a = dlogprob.masked_fill(~on, 0.0) / head.divisor
    each = [torch.where(counts, a * a * x, 0.0).sum().clamp(min=0) for x in (known.variance, known.square)]
    numbers = (known.drawn, (known.flat & counts).sum())
    return [*each, *(known.logprob.new_zeros(()) + number for number in numbers)]


# ---- the rule in PyTorch


class Chosen(NamedTuple):
    """row, token, w (M,): the elements that are kept, in order of rows; variance (n,): of a row's w; flat (n,) bool:
    whether its threshold was raised."""

    row: Tensor
    token: Tensor
    w: Tensor
    variance: Tensor
    flat: Tensor


def choose(p: Tensor, on: Tensor, uniform: Tensor, threshold: float) -> Chosen:
    """Elements of rows p (n, V) >= 0 whose sums are 1 or less, in rows `on`; uniform (n,) in [0, 1)."""
    small = p < threshold
    many = (~small).sum(1) + p.masked_fill(~small, 0.0).sum(1, dtype=torch.float64) / threshold
    flat = on & (many > MOST)
    raised = torch.full_like(many, max(threshold, 1 / MOST))
    level = torch.where(flat, raised, threshold)[:, None]
    small = p < level
    tail = p.masked_fill(~small, 0.0)
    # Whole numbers: a GPU's cumulative sum of floats differs in bits from run to run.
    shares = tail.to(level.dtype).div_(level).mul_(ONE).round_().long()
    steps = shares.cumsum_(1).add_((uniform.double() * ONE).long()[:, None]).div_(ONE, rounding_mode="floor")
    kept = ~small
    kept[:, 0] |= steps[:, 0] > 0
    kept[:, 1:] |= steps[:, 1:] > steps[:, :-1]
    row, token = kept.logical_and_(on[:, None]).nonzero(as_tuple=True)
    w = torch.where(small[row, token], level.to(p.dtype)[row, 0], p[row, token])
    return Chosen(row, token, w, (tail * (level.to(p.dtype) - tail)).sum(1), flat)
