"""The objective of every token: loss terms, statistics, and the slopes that the gradient of the logits needs.

The definition is `rlplus.loss.token_loss`; names and formulas are the same, and so is what becomes of NaN and of
rows of weight 0: they are left out by selection. fp32 arithmetic. Memory traffic: 56 bytes read or written a token,
nothing beside the logits, which is why the objective is a kernel of its own and not the end of `finish_rows`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlplus.kernels.elementwise import _expm1
from rlplus.kernels.row_values import DENTROPY, DLOGPROB, ENTROPY, LOGPROB, WIDTH

LAUNCH = {"BLOCK_N": 128, "num_warps": 4}

# Columns of `constants`: the fields of `TokenConstants`.
ADVANTAGE = tl.constexpr(0)
TOKEN_WEIGHT = tl.constexpr(1)
EXTERNAL_TOKEN = tl.constexpr(2)
OLD_LOGPROB = tl.constexpr(3)
BEHAVIOR_LOGPROB = tl.constexpr(4)
REF_LOGPROB = tl.constexpr(5)
ENGINE_LOGPROB = tl.constexpr(6)
ENTROPY_WEIGHT = tl.constexpr(7)
CONSTANTS = tl.constexpr(8)
SUMS = tl.constexpr(20)


class Coefficients(NamedTuple):
    """The numbers of an `rlplus.Objective`; inf means None."""

    external_coef: float
    gamma: float
    mixture_share: float
    kappa: float
    clip_low: float
    clip_high: float
    dual_clip: float
    ratio_cap: float
    tau_pos: float
    tau_neg: float
    kl_coef: float
    entropy_coef: float
    mismatch_cap: float
    mismatch_low: float


class Choices(NamedTuple):
    """The names in an `rlplus.Objective`."""

    internal: str
    external: str
    kl_estimator: str
    mismatch_mode: str


class Given(NamedTuple):
    """Which of the optional constants are given."""

    old: bool
    behavior: bool
    engine: bool


def token_loss(values: Tensor, constants: Tensor, coefficients: Coefficients, given: Given, choices: Choices) -> Tensor:
    """Fill the columns DLOGPROB and DENTROPY of values (n, WIDTH) fp32; -> sums (blocks, 20) fp32, to be added up.

    constants (n, 8) fp32: advantage, token_weight, external (0 or 1), old_logprob, behavior_logprob, ref_logprob,
    engine_logprob, entropy_weight; anything in the columns that are not given. The sums are
    `rlplus.loss`'s STATS, then MISMATCH_STATS.
    """
    n = len(values)
    if values.shape != (n, WIDTH.value) or constants.shape != (n, CONSTANTS.value):
        got = f"{tuple(values.shape)}, {tuple(constants.shape)}"
        raise ValueError(f"want values (n, {WIDTH.value}), constants (n, {CONSTANTS.value}); got {got}")
    blocks = triton.cdiv(n, LAUNCH["BLOCK_N"])
    sums = torch.empty(blocks, SUMS.value, dtype=torch.float32, device=values.device)
    if n:
        terms = (INTERNAL[choices.internal], *EXTERNAL[choices.external], *choices[2:])
        _token_loss_kernel[(blocks,)](values, sums, constants, coefficients, n, *given, *terms, **LAUNCH)
    return sums


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


# The surrogates. Internal: -> loss, slope, and where a lower and an upper bound changed the ratio (A < A: nowhere).


@triton.jit
def _ratio(logprob, old, A, c):
    loss = -A * tl.exp(logprob - old)
    return loss, loss, A < A, A < A


@triton.jit
def _clip(logprob, old, A, c):
    r = tl.exp(logprob - old)
    low = 1.0 - c.clip_low
    high = 1.0 + c.clip_high
    gain = r * A
    bound = tl.where(r < low, low, tl.where(r > high, high, r)) * A
    clipped = bound < gain
    gain = tl.where(clipped, bound, gain)
    floor = c.dual_clip * A
    below = (A < 0) & (gain < floor)
    gain = tl.where(below, floor, gain)
    clipped = clipped | below
    return -gain, tl.where(clipped, 0.0, -A * r), clipped & (r < 1), clipped & (r > 1)


@triton.jit
def _reinforce(logprob, old, A, c):
    return -A * logprob, -A, A < A, A < A


@triton.jit
def _cispo(logprob, old, A, c):
    r = tl.exp(logprob - old)
    high = r > 1.0 + c.clip_high
    slope = -A * tl.where(high, 1.0 + c.clip_high, r)
    return slope * logprob, slope, A < A, high


@triton.jit
def _sapo(logprob, old, A, c):
    r = tl.exp(logprob - old)
    tau = tl.where(A > 0, c.tau_pos, c.tau_neg)
    gate = _sigmoid(tau * (r - 1.0))
    rest = _sigmoid(tau * (1.0 - r))
    return -A * 4.0 / tau * gate, -A * tl.where(rest == 0, 0.0, 4.0 * r * gate * rest), A < A, A < A


@triton.jit
def _dppo(logprob, old, A, c):
    r = tl.exp(logprob - old)
    moved = tl.exp(logprob) - tl.exp(old)
    low = (A < 0) & (moved < -c.clip_low)
    high = (A > 0) & (moved > c.clip_high)
    slope = tl.where(low | high, 0.0, -A * tl.where(r > c.ratio_cap, c.ratio_cap, r))
    return slope * logprob, slope, low, high


# External: -> g and its derivative.


@triton.jit
def _mis(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    s = c.mixture_share
    if BEHAVIOR:
        one = behavior + tl.log(s)
        other = old + tl.log(1.0 - s)
        gap = tl.where(one == other, 0.0, -tl.abs(one - other))
        logaddexp = tl.where(one > other, one, other) + tl.log(1.0 + tl.exp(gap))
        g = tl.exp(logprob - logaddexp)
    else:
        g = tl.exp(logprob) / (0.5 * s + (1.0 - 0.5 * s) * tl.exp(old))
    return g, g


@triton.jit
def _proxy(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    g = tl.exp(logprob - old)
    return g, g


@triton.jit
def _omega(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    g = tl.exp(logprob - behavior) if BEHAVIOR else tl.exp(logprob)
    return g, g


@triton.jit
def _bayes(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    g = 2.0 * tl.exp(logprob) / (tl.exp(old) + 1.0)
    return g, g


@triton.jit
def _shaped(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    w = tl.exp(logprob - behavior) if BEHAVIOR else tl.exp(logprob)
    g = 1.0 / (1.0 + c.kappa / w)
    return g, g / (1.0 + w / c.kappa)


@triton.jit
def _nll(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    return logprob, tl.full(logprob.shape, 1.0, tl.float32)


@triton.jit
def _dft(logprob, old, behavior, c, BEHAVIOR: tl.constexpr):
    p = tl.exp(logprob)
    return p * logprob, p


# The names are those in `rlplus.loss.objective.surrogates`; the external ones say whether the advantage weighs them.
INTERNAL = {"ratio": _ratio, "clip": _clip, "reinforce": _reinforce, "cispo": _cispo, "sapo": _sapo, "dppo": _dppo}
EXTERNAL = {
    "mis": (_mis, True),
    "proxy": (_proxy, True),
    "omega": (_omega, True),
    "bayes": (_bayes, True),
    "shaped": (_shaped, True),
    "nll": (_nll, False),
    "dft": (_dft, False),
    "none": (None, True),
}


@triton.jit
def _internal(logprob, old, A, c, TERMS: tl.constexpr):
    """Loss, slope, and where a lower and an upper bound changed the ratio."""
    loss, slope, low, high = TERMS(logprob, old, A, c)
    # Not by multiplication: an advantage of 0 is exactly 0 whatever the ratio overflows to.
    silent = A == 0
    return tl.where(silent, 0.0, loss), tl.where(silent, 0.0, slope), low & (A != 0), high & (A != 0)


@triton.jit
def _external(logprob, old, behavior, A, c, BEHAVIOR: tl.constexpr, TERMS: tl.constexpr, WEIGHTED: tl.constexpr):
    """Loss, slope, and weight of a demonstrated token."""
    if TERMS is None:
        loss = tl.zeros_like(A)
        slope = tl.zeros_like(A)
        weight = tl.zeros_like(A)
    else:
        rest = -_expm1(tl.where(logprob > 0, 0.0, logprob))  # 1 - p
        explore = c.external_coef * tl.where(c.gamma == 0, 1.0, tl.exp(c.gamma * tl.log(rest)))
        g, dg = TERMS(logprob, old, behavior, c, BEHAVIOR)
        if WEIGHTED:
            silent = A == 0
            loss = tl.where(silent, 0.0, -A * explore * g)
            slope = tl.where(silent, 0.0, -A * explore * dg)
            weight = g
        else:
            loss = -explore * g
            slope = -explore * dg
            weight = dg
    return loss, slope, weight


@triton.jit
def _k3(d):
    """e^d - 1 - d, an estimate of a divergence from a log ratio."""
    return _expm1(d) - d


@triton.jit
def _kl(logprob, old, ref, is_external, KL: tl.constexpr):
    """The estimate of the divergence from the reference policy, and its slope."""
    d = ref - logprob
    k3 = _k3(d)
    if KL == "k2":
        value = 0.5 * d * d
        slope = -d
    elif KL == "k3":
        value = k3
        slope = -_expm1(d)
    else:
        tl.static_assert(KL == "k3-unbiased")
        r = tl.where(is_external, 1.0, tl.exp(logprob - old))
        value = r * k3
        slope = -r * d
    return value, slope


@triton.jit
def _mismatch(old, engine, c, ENGINE: tl.constexpr, MISMATCH: tl.constexpr):
    """log(pi_old / pi_engine), the weight that it gives an internal token, and where that is not the ratio itself."""
    if ENGINE:
        gap = old - engine
        ratio = tl.exp(gap)
        below = ratio < c.mismatch_low
        above = ratio > c.mismatch_cap
        if MISMATCH == "mask":
            bounded = tl.where(below | above, 0.0, ratio)
        else:
            tl.static_assert(MISMATCH == "truncate")
            bounded = tl.where(below, c.mismatch_low, tl.where(above, c.mismatch_cap, ratio))
        has_cap = c.mismatch_cap < float("inf")
        weight = tl.where(has_cap, bounded, 1.0)
        outside = has_cap & (below | above)
    else:
        gap = tl.zeros_like(old)
        weight = tl.full(old.shape, 1.0, tl.float32)
        outside = old < old
    return gap, weight, outside


@triton.jit
def _store_sums(sums, terms):
    for i in tl.static_range(SUMS):
        tl.store(sums + i, tl.sum(terms[i], 0))


@triton.jit
def _entropy_bonus(weight, c):
    """Whether a token's entropy counts, and the derivative by it."""
    counts = (c.entropy_coef != 0) & (weight != 0)
    return counts, tl.where(counts, -c.entropy_coef * weight, 0.0)


@triton.jit
def _constants(row, here):
    """The constants of tokens, but for the old logprob."""
    A = tl.load(row + ADVANTAGE, here, 0.0)
    weight = tl.load(row + TOKEN_WEIGHT, here, 0.0)
    is_external = tl.load(row + EXTERNAL_TOKEN, here, 0.0) != 0
    behavior = tl.load(row + BEHAVIOR_LOGPROB, here, 0.0)
    ref = tl.load(row + REF_LOGPROB, here, 0.0)
    engine = tl.load(row + ENGINE_LOGPROB, here, 0.0)
    entropy_weight = tl.load(row + ENTROPY_WEIGHT, here, 0.0)
    return A, weight, is_external, behavior, ref, engine, entropy_weight


@triton.jit
def _token_loss_kernel(
    values, sums, constants, c, N, OLD: tl.constexpr, BEHAVIOR: tl.constexpr, ENGINE: tl.constexpr,
    INTERNAL_TERMS: tl.constexpr, EXTERNAL_TERMS: tl.constexpr, WEIGHTED: tl.constexpr,
    KL: tl.constexpr, MISMATCH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = n < N
    row = constants + n * CONSTANTS
    value = values + n * WIDTH
    logprob = tl.load(value + LOGPROB, here, 0.0)
    entropy = tl.load(value + ENTROPY, here, 0.0)
    A, weight, is_external, behavior, ref, engine, entropy_weight = _constants(row, here)
    old = tl.load(row + OLD_LOGPROB, here, 0.0) if OLD else logprob
    on = weight != 0
    internal = on & (is_external == 0)
    external = on & is_external

    loss_int, slope_int, low, high = _internal(logprob, old, A, c, INTERNAL_TERMS)
    loss_ext, slope_ext, ratio_ext = _external(logprob, old, behavior, A, c, BEHAVIOR, EXTERNAL_TERMS, WEIGHTED)
    gap, weight_int, outside = _mismatch(old, engine, c, ENGINE, MISMATCH)
    kept = weight_int != 0  # selected: a masked token may have an infinite loss
    kl, slope_kl = _kl(logprob, old, ref, is_external, KL)
    has_kl = c.kl_coef != 0
    slope = tl.where(is_external, slope_ext, tl.where(kept, weight_int * slope_int, 0.0))
    dlogprob = tl.where(on, weight * tl.where(has_kl, slope + c.kl_coef * slope_kl, slope), 0.0)
    has_entropy, dentropy = _entropy_bonus(entropy_weight, c)
    tl.store(value + DLOGPROB, dlogprob, here)
    tl.store(value + DENTROPY, dentropy, here)

    terms = (
        tl.where(on, 1.0, 0.0),
        tl.where(internal, 1.0, 0.0),
        tl.where(external, 1.0, 0.0),
        tl.where((dlogprob != 0) | (dentropy != 0), 1.0, 0.0),
        tl.where(internal & kept, weight * weight_int * loss_int, 0.0),
        tl.where(external, weight * loss_ext, 0.0),
        tl.where(on & has_kl, weight * c.kl_coef * kl, 0.0),
        tl.where(has_entropy, dentropy * entropy, 0.0),
        tl.where(on, entropy, 0.0),
        tl.where(internal, entropy, 0.0),
        tl.where(internal, tl.exp(logprob), 0.0),
        tl.where(external, tl.exp(logprob), 0.0),
        tl.where(external, ratio_ext, 0.0),
        tl.where(internal, _k3(logprob - old), 0.0),
        tl.where(internal & has_kl, logprob - ref, 0.0),
        tl.where(internal & low, 1.0, 0.0),
        tl.where(internal & high, 1.0, 0.0),
        tl.where(internal, tl.abs(gap), 0.0),
        tl.where(internal & (tl.abs(_expm1(gap)) > 0.1), 1.0, 0.0),
        tl.where(internal & outside, 1.0, 0.0),
    )
    _store_sums(sums + tl.program_id(0) * SUMS, terms)
