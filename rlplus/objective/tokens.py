"""What one token adds to the loss and to its gradient: the definition that every backend must match.

Every objective is a scalar function of the token's logprob and per-token constants, so its derivative is known the
moment the row's logsumexp is. That is what lets one pass over the logits finish the loss and leave the gradient. The
surrogates stand in `surrogates.py`.

Symbols: p = exp(logprob), p_old = exp(old_logprob), r = p / p_old, A = advantage, m = token_weight.
"""

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.objective.presets import Objective
from rlplus.objective.surrogates import EXTERNAL, INTERNAL, log_ratio


class TokenConstants(NamedTuple):
    """Everything but the policy that a token's loss depends on; each (N,), `external` bool, the others floating.

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
    "clipped",
)
MISMATCH_STATS = ("mismatch_abs", "mismatch_outside_10pct", "mismatch_truncated")


def token_loss(logprob: Tensor, entropy: Tensor, constants: TokenConstants, objective: Objective) -> TokenLoss:
    """logprob, entropy (N,) fp32 or fp64, constants of the same dtype -> loss, its derivatives, statistics.

    Rows of weight 0 are left out by selection: whatever stands there, NaN included, reaches nothing.
    Source: RL-PLUS eq. 1-7; DECISIONS.md for what the paper leaves open.
    """
    c, o = constants, objective
    zero = torch.zeros_like(logprob)
    on = c.token_weight != 0
    internal, external = on & ~c.external, on & c.external

    loss_int, slope_int, clipped = _internal(logprob, c, o)
    mismatch, weight_int = _mismatch(logprob, c, o)
    loss_ext, slope_ext, ratio_ext = _external(logprob, c, o)

    loss_int = torch.where(internal, c.token_weight * weight_int * loss_int, zero)
    loss_ext = torch.where(external, c.token_weight * loss_ext, zero)
    slope = torch.where(internal, weight_int * slope_int, slope_ext)
    loss_kl = zero
    if o.kl_coef:
        assert c.ref_logprob is not None
        d = c.ref_logprob - logprob
        loss_kl = torch.where(on, c.token_weight * o.kl_coef * (torch.expm1(d) - d), zero)
        slope = slope - o.kl_coef * torch.expm1(d)
    dlogprob = torch.where(on, c.token_weight * slope, zero)

    loss_entropy = dentropy = zero
    if o.entropy_coef:
        weight = c.token_weight if c.entropy_weight is None else c.entropy_weight
        dentropy = torch.where(weight != 0, -o.entropy_coef * weight, zero)
        loss_entropy = torch.where(weight != 0, dentropy * entropy, zero)

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
        total(one, internal & clipped),
    )
    stats = dict(zip(STATS, sums, strict=True))
    if c.engine_logprob is not None:
        stats |= _mismatch_stats(mismatch, internal, o)
    return TokenLoss(sum(sums[5:8], sums[4]), dlogprob, dentropy, stats)


def _internal(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and dloss/dlogprob of a sampled token, and whether clipping took its gradient."""
    loss, slope, clipped = INTERNAL[o.internal].terms(logprob, c, o)
    # Not by multiplication: an advantage of 0 is exactly 0 whatever the ratio overflows to.
    silent = c.advantage == 0
    return torch.where(silent, 0.0, loss), torch.where(silent, 0.0, slope), ~silent & clipped


def _mismatch(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """old_logprob - engine_logprob, and the truncated importance weight that corrects for it."""
    if c.engine_logprob is None:
        return torch.zeros_like(logprob), torch.ones_like(logprob)
    gap = (logprob if c.old_logprob is None else c.old_logprob) - c.engine_logprob
    if o.mismatch_cap is None:
        return gap, torch.ones_like(logprob)
    return gap, gap.exp().clamp(max=o.mismatch_cap)


def _mismatch_stats(gap: Tensor, internal: Tensor, o: Objective) -> dict[str, Tensor]:
    outside = torch.expm1(gap).abs() > 0.1
    truncated = torch.zeros_like(internal) if o.mismatch_cap is None else gap > log(o.mismatch_cap)
    values = (gap.abs(), outside.to(gap.dtype), truncated.to(gap.dtype))
    return {k: torch.where(internal, v, 0.0).sum() for k, v in zip(MISMATCH_STATS, values, strict=True)}


def _external(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dloss/dlogprob and weight of a demonstrated token (RL-PLUS eq. 4-6)."""
    surrogate = EXTERNAL[o.external]
    if surrogate.terms is None:
        zero = torch.zeros_like(logprob)
        return zero, zero, zero
    # -expm1 keeps 1 - p accurate near p = 1; a logprob that rounding put above 0 counts as p = 1.
    explore = (-torch.expm1(logprob.clamp(max=0.0))) ** o.gamma
    g, slope = surrogate.terms(logprob, c, o)
    if not surrogate.weighted:
        return -explore * g, -explore * slope, slope
    A, silent = c.advantage, c.advantage == 0
    return torch.where(silent, 0.0, -A * explore * g), torch.where(silent, 0.0, -A * explore * slope), g
