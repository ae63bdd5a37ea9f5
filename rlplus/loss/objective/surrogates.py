"""The surrogates of sampled and of demonstrated tokens, by name.

Each is a scalar function of the token's logprob, given with its derivative. These tables are the only list of them:
names, checks of settings and the definition of the loss are derived from it. Only the Triton kernel repeats the
formulas.

Symbols: p = exp(logprob), p_old = exp(old_logprob), r = p / p_old, A = advantage.

Imports no torch, so that settings are checked without it: a formula calls methods of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, log1p
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from rlplus.loss.objective.objective import Objective
    from rlplus.loss.objective.tokens import TokenConstants

    Terms = tuple[Tensor, Tensor, Tensor | bool, Tensor | bool]


class Internal(NamedTuple):
    """A surrogate of sampled tokens.

    terms: logprob (n,), the tokens' constants, the objective -> loss and its derivative, (n,) each, and where a lower
    and an upper bound changed the ratio. reads: the fields of `Objective` that are for such surrogates.
    """

    terms: Callable[[Tensor, TokenConstants, Objective], Terms]
    reads: tuple[str, ...] = ()


class External(NamedTuple):
    """A surrogate of demonstrated tokens.

    terms: logprob (n,), the tokens' constants, the objective -> g and its derivative, (n,) each; None: no loss.
    weighted: the loss is -A (1 - p)^gamma g, with g an importance weight; else -(1 - p)^gamma g for every advantage,
    with the derivative as the weight. reads: the fields of `Objective` that are for such surrogates.
    """

    terms: Callable[[Tensor, TokenConstants, Objective], tuple[Tensor, Tensor]] | None
    reads: tuple[str, ...] = ()
    weighted: bool = True


def log_ratio(logprob: Tensor, c: TokenConstants) -> Tensor:
    """log r; 0 on the current policy, unless its logprob is NaN or infinite: log r is NaN then, and so is the loss."""
    return logprob - _old(logprob, c)


def _old(logprob: Tensor, c: TokenConstants) -> Tensor:
    return logprob if c.old_logprob is None else c.old_logprob


def _ratio(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-A r (RL-PLUS eq. 1)."""
    loss = -c.advantage * log_ratio(logprob, c).exp()
    return loss, loss, False, False


def _clip(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-min(A r, A clip(r)) (PPO; RL-PLUS eq. 2), with dual_clip at most -dual_clip A where A < 0."""
    A = c.advantage
    r = log_ratio(logprob, c).exp()
    gain = r * A
    bound = r.clamp(1 - o.clip_low, 1 + o.clip_high) * A
    clipped = bound < gain
    gain = bound.where(clipped, gain)
    if o.dual_clip is not None:
        floor = o.dual_clip * A
        below = (A < 0) & (gain < floor)
        gain = floor.where(below, gain)
        clipped = clipped | below
    return -gain, (-A * r).masked_fill(clipped, 0.0), clipped & (r < 1), clipped & (r > 1)


def _reinforce(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-A log p."""
    return -c.advantage * logprob, -c.advantage, False, False


def _cispo(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-A sg(min(r, 1 + clip_high)) log p (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; no lower bound, as there)."""
    r = log_ratio(logprob, c).exp()
    slope = -c.advantage * r.clamp(max=1 + o.clip_high)
    return slope * logprob, slope, False, r > 1 + o.clip_high


def _sapo(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-A (4 / tau) sigmoid(tau (r - 1)) (soft adaptive policy optimization, arXiv 2511.20347)."""
    A = c.advantage
    r = log_ratio(logprob, c).exp()
    tau = A.new_full(A.shape, o.tau_neg).masked_fill(A > 0, o.tau_pos)
    gate = (tau * (r - 1)).sigmoid()
    rest = (tau * (1 - r)).sigmoid()
    slope = (4 * r * gate * rest).masked_fill(rest == 0, 0.0)  # the gate closes faster than any ratio grows
    return -A * 4 / tau * gate, -A * slope, False, False


def _dppo(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-A sg(min(r, ratio_cap)) log p; 0 where p - p_old has left its bounds in the direction of A.

    Divergence PPO with the binary total variation, arXiv 2602.04879.
    """
    A = c.advantage
    moved = logprob.exp() - _old(logprob, c).exp()
    low = (A < 0) & (moved < -o.clip_low)
    high = (A > 0) & (moved > o.clip_high)
    slope = (-A * log_ratio(logprob, c).exp().clamp(max=o.ratio_cap)).masked_fill(low | high, 0.0)
    return slope * logprob, slope, low, high


INTERNAL = {
    "ratio": Internal(_ratio),
    "clip": Internal(_clip, reads=("clip_low", "clip_high", "dual_clip")),
    "reinforce": Internal(_reinforce),
    "cispo": Internal(_cispo, reads=("clip_high",)),
    "sapo": Internal(_sapo, reads=("tau_pos", "tau_neg")),
    "dppo": Internal(_dppo, reads=("clip_low", "clip_high", "ratio_cap")),
}


def _mis(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """p / (s p_omega + (1 - s) p_old), s = 1/2 in the paper: 2 p / (p_omega + p_old) (RL-PLUS eq. 4).

    An unknown p_omega is estimated as the Bayes-optimal (p_old + 1) / 2.
    """
    old = _old(logprob, c)
    s = o.mixture_share
    if c.behavior_logprob is None:
        g = logprob.exp() / (s / 2 + (1 - s / 2) * old.exp())
    else:
        g = (logprob - (log(s) + c.behavior_logprob).logaddexp(log1p(-s) + old)).exp()
    return g, g


def _proxy(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """r: the old policy replaces the demonstrations' author."""
    g = log_ratio(logprob, c).exp()
    return g, g


def _omega(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """p / p_omega, with p_omega = 1 where it is unknown."""
    g = logprob.exp() if c.behavior_logprob is None else (logprob - c.behavior_logprob).exp()
    return g, g


def _bayes(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """p over the Bayes-optimal estimate alone."""
    g = 2 * logprob.exp() / (_old(logprob, c).exp() + 1)
    return g, g


def _shaped(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """w / (w + kappa), w = p / p_omega (LUFFY; ExGRPO), with p_omega = 1 where it is unknown."""
    w, _ = _omega(logprob, c, o)
    g = 1 / (1 + o.kappa / w)
    return g, g / (1 + w / o.kappa)


def _nll(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """log p."""
    return logprob, logprob.new_ones(logprob.shape)


def _dft(logprob: Tensor, c: TokenConstants, o: Objective) -> tuple[Tensor, Tensor]:
    """sg(p) log p (dynamic fine-tuning, arXiv 2508.05629)."""
    p = logprob.exp()
    return p * logprob, p


EXTERNAL = {
    "mis": External(_mis, reads=("mixture_share",)),
    "proxy": External(_proxy),
    "omega": External(_omega),
    "bayes": External(_bayes),
    "shaped": External(_shaped, reads=("kappa",)),
    "nll": External(_nll, weighted=False),
    "dft": External(_dft, weighted=False),
    "none": External(None),
}
