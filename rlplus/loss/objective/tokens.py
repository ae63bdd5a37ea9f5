"""The contribution of one token to the loss and its gradient: the definition that every backend must match.

Every objective is a scalar function of the token's logprob and per-token constants, so its derivative is known as soon
as the row's logsumexp is. This allows one pass over the logits to compute both loss and gradient. The surrogates are in
`surrogates.py`.

Symbols: p = exp(logprob), p_old = exp(old_logprob), r = p / p_old, A = advantage, m = token_weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.surrogates import EXTERNAL, INTERNAL, log_ratio

FLOOR = -1e30  # stands in for log 0: exp(FLOOR) = 0, yet 0 * FLOOR is not NaN


class TokenConstants(NamedTuple):
    """Everything that a token's loss depends on besides the policy; each (N,), `external` bool, the others floating.

    None: old_logprob = the current policy, behavior_logprob unknown, no reference policy, no engine logprob,
    entropy_weight = token_weight.
    """

    advantage: Tensor
    token_weight: Tensor
    external: Tensor
    old_logprob: Tensor | None = None
    behavior_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    engine_logprob: Tensor | None = None
    entropy_weight: Tensor | None = None

    def rows(self, index: slice | Tensor) -> "TokenConstants":
        """The constants of some tokens."""
        return TokenConstants(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]


class TokenLoss(NamedTuple):
    """loss: weighted sum, 0-d. dlogprob, dentropy (N,): its derivatives. stats: 0-d sums and counts."""

    loss: Tensor
    dlogprob: Tensor
    dentropy: Tensor
    stats: dict[str, Tensor]


STATS = (
    "tokens",
    "tokens_internal",
    "tokens_external",
    "active_rows",
    "loss_internal",
    "loss_external",
    "loss_kl",
    "loss_entropy",
    "entropy",
    "entropy_internal",
    "prob_internal",
    "prob_external",
    "ratio_external",
    "kl_old",
    "kl_ref",
    "clipped_low",
    "clipped_high",
)
MISMATCH_STATS = ("mismatch_abs", "mismatch_outside_10pct", "mismatch_truncated")


def stat_names(constants: TokenConstants) -> tuple[str, ...]:
    """The names of `TokenLoss.stats`, in order."""
    return STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS


def token_loss(logprob: Tensor, entropy: Tensor, constants: TokenConstants, objective: Objective) -> TokenLoss:
    """logprob, entropy (N,) fp32 or fp64, constants of the same dtype -> loss, its derivatives, statistics.

    Rows of weight 0 are left out by selection: their contents, NaN included, affect nothing.
    Source: RL-PLUS eq. 1-7; decision 002 for what the paper leaves open.
    """
    c = constants
    o = objective
    zero = torch.zeros_like(logprob)
    on = c.token_weight != 0
    internal = on & ~c.external
    external = on & c.external

    loss_int, slope_int, low, high = _internal(logprob, c, o)
    mismatch, weight_int, outside = _mismatch(logprob, c, o)
    loss_ext, slope_ext, ratio_ext = _external(logprob, c, o)

    internal_on = internal & (weight_int != 0)  # selected: a masked token may have an infinite loss
    loss_int = torch.where(internal_on, c.token_weight * weight_int * loss_int, zero)
    loss_ext = torch.where(external, c.token_weight * loss_ext, zero)
    slope = torch.where(c.external, slope_ext, torch.where(weight_int != 0, weight_int * slope_int, zero))
    loss_kl, slope, log_ref = _with_kl(logprob, slope, zero, c, o)
    dlogprob = torch.where(on, c.token_weight * slope, zero)

    loss_entropy, dentropy = _entropy_bonus(entropy, c, o)

    p = logprob.exp()
    drift = log_ratio(logprob, c)

    def total(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values, zero).sum()

    one = torch.ones_like(logprob)
    sums = (
        total(one, on),
        total(one, internal),
        total(one, external),
        total(one, (dlogprob != 0) | (dentropy != 0)),
        loss_int.sum(),
        loss_ext.sum(),
        loss_kl.sum(),
        loss_entropy.sum(),
        total(entropy, on),
        total(entropy, internal),
        total(p, internal),
        total(p, external),
        total(ratio_ext, external),
        total(torch.expm1(drift) - drift, internal),
        total(log_ref, internal),
        total(one, internal & low),
        total(one, internal & high),
    )
    stats = dict(zip(STATS, sums, strict=True))
    if c.engine_logprob is not None:
        stats |= _mismatch_stats(mismatch, outside, internal)
    loss = stats["loss_internal"] + stats["loss_external"] + stats["loss_kl"] + stats["loss_entropy"]
    return TokenLoss(loss, dlogprob, dentropy, stats)


def _with_kl(
    logprob: Tensor, slope: Tensor, zero: Tensor, c: TokenConstants, o: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the KL penalty, the slope with it, and log p - log p_ref; zeros, but for the slope, without one."""
    if not o.kl_coef:
        return zero, slope, zero
    assert c.ref_logprob is not None
    kl, slope_kl = _kl(logprob, c.ref_logprob, c, o)
    loss = torch.where(c.token_weight != 0, c.token_weight * o.kl_coef * kl, zero)
    return loss, slope + o.kl_coef * slope_kl, logprob - c.ref_logprob


def may_have_gradient(constants: TokenConstants, objective: Objective) -> Tensor:
    """(N,) bool: False where the logits' gradient is 0 whatever the policy is."""
    c = constants
    o = objective
    surrogate = EXTERNAL[objective.external]
    internal = external = c.advantage != 0
    if surrogate.terms is None:
        external = torch.zeros_like(c.external)
    elif not surrogate.weighted:
        external = torch.ones_like(c.external)
    some = torch.where(c.external, external, internal)
    if o.kl_coef:
        some = torch.ones_like(some)
    some = some & (c.token_weight != 0)
    if o.entropy_coef:
        some = some | ((c.token_weight if c.entropy_weight is None else c.entropy_weight) != 0)
    return some


def _internal(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and dloss/dlogprob of a sampled token, and where a lower and an upper bound changed its ratio."""
    loss, slope, low, high = INTERNAL[o.internal].terms(logprob, c, o)
    # Not by multiplication: an advantage of 0 is exactly 0 whatever the ratio overflows to.
    silent = c.advantage == 0
    return torch.where(silent, 0.0, loss), torch.where(silent, 0.0, slope), ~silent & low, ~silent & high


def _kl(logprob: Tensor, ref: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """The estimate of KL(policy || reference) and its derivative (Schulman, "Approximating KL Divergence", 2020).

    k3-unbiased is r k3 with the gradient of r too (DeepSeek-V3.2, arXiv 2512.02556). A demonstration has no
    policy that sampled it: its r is the current policy's, 1.
    """
    d = ref - logprob
    if o.kl_estimator == "k2":
        return d * d / 2, -d
    k3 = torch.expm1(d) - d
    if o.kl_estimator == "k3":
        return k3, -torch.expm1(d)
    r = torch.where(c.external, 1.0, log_ratio(logprob, c).exp())
    return r * k3, -r * d


def _entropy_bonus(entropy: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """Its loss, and the derivative by the entropy."""
    zero = torch.zeros_like(entropy)
    if not o.entropy_coef:
        return zero, zero
    weight = c.token_weight if c.entropy_weight is None else c.entropy_weight
    slope = torch.where(weight != 0, -o.entropy_coef * weight, zero)
    return torch.where(weight != 0, slope * entropy, zero), slope


def _mismatch(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """old_logprob - engine_logprob, the importance weight that corrects for it, and where that left its bounds."""
    one = torch.ones_like(logprob)
    never = torch.zeros_like(c.external)
    if c.engine_logprob is None:
        return torch.zeros_like(logprob), one, never
    gap = (logprob if c.old_logprob is None else c.old_logprob) - c.engine_logprob
    if o.mismatch_cap is None:
        return gap, one, never
    weight = gap.exp()
    outside = (weight < o.mismatch_low) | (weight > o.mismatch_cap)
    if o.mismatch_mode == "mask":
        return gap, torch.where(outside, 0.0, weight), outside
    return gap, weight.clamp(o.mismatch_low, o.mismatch_cap), outside


def _mismatch_stats(gap: Tensor, outside: Tensor, internal: Tensor) -> dict[str, Tensor]:
    values = (gap.abs(), (torch.expm1(gap).abs() > 0.1).to(gap.dtype), outside.to(gap.dtype))
    return {k: torch.where(internal, v, 0.0).sum() for k, v in zip(MISMATCH_STATS, values, strict=True)}


def exploration_weight(logprob: Tensor, gamma: float) -> Tensor:
    """(1 - p)^gamma (...) of demonstrated tokens (RL-PLUS eq. 6), without a gradient of its own."""
    # -expm1 keeps 1 - p accurate near p = 1; a logprob that rounding put above 0 counts as p = 1.
    return (-torch.expm1(logprob.clamp(max=0.0))) ** gamma


def _external(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dloss/dlogprob and weight of a demonstrated token (RL-PLUS eq. 4-6)."""
    surrogate = EXTERNAL[o.external]
    if surrogate.terms is None:
        zero = torch.zeros_like(logprob)
        return zero, zero, zero
    explore = exploration_weight(logprob, o.gamma) * o.external_coef
    g, slope = surrogate.terms(logprob, c, o)
    if not surrogate.weighted:
        return -explore * g, -explore * slope, slope
    A = c.advantage
    silent = c.advantage == 0
    return torch.where(silent, 0.0, -A * explore * g), torch.where(silent, 0.0, -A * explore * slope), g
