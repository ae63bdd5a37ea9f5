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

from rlplus.common.lazy import import_function

if TYPE_CHECKING:
    from torch import Tensor

    from rlplus.loss.objective.objective import Objective
    from rlplus.loss.objective.tokens import TokenConstants

    Terms = tuple[Tensor, Tensor, Tensor | bool, Tensor | bool]
    TokenLossFunction = Callable[[Tensor, TokenConstants], tuple[Tensor, Tensor]]


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


# ---- a user's


def register_token_loss(name: str, function: TokenLossFunction, *, check_slope: bool = True) -> None:
    """Make `function` the internal surrogate of that name: `Objective(internal=name)`.

    function: logprob (N,) and a `TokenConstants` -> loss (N,), slope (N,): what sampled tokens of weight 1 add to the
    loss, and its derivative with respect to logprob. It is called without autograd, in fp32 or fp64, on all tokens;
    tokens of weight 0, of advantage 0 and demonstrated ones are left out afterwards. old_logprob is always given (by
    default it is logprob); the other constants may be None.
    check_slope: compare the slope with finite differences now, on 64 random tokens in fp64. False for a loss that holds
    a factor constant, as "cispo" does.

    Backends: reference, torch and cpp. `Objective(internal="module:function")` registers a function automatically, with
    the check; a run's configuration can name it this way.
    Raises ValueError for a name that is taken and for a slope that is not the derivative.
    """
    if name in INTERNAL:
        raise ValueError(f"want a new name for a token loss; got {name!r}")
    if check_slope:
        _check_slope(name, function)

    def terms(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
        loss, slope = function(logprob, c._replace(old_logprob=logprob) if c.old_logprob is None else c)
        return loss, slope, False, False

    INTERNAL[name] = Internal(terms)


def find_token_loss(name: object) -> None:
    """Import and register "module:function" unless it is registered; ValueError if it does not exist."""
    if not isinstance(name, str) or name in INTERNAL or name.count(":") != 1:
        return
    try:
        function = import_function(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"internal surrogate {name!r}: want module:function; {error}") from error
    register_token_loss(name, function)


def _check_slope(name: str, function: TokenLossFunction) -> None:
    import torch

    from rlplus.loss.objective.tokens import TokenConstants

    n = 64
    step = 1e-6
    generator = torch.Generator().manual_seed(0)
    logprob, old, behavior, reference, engine = -0.05 - 4 * torch.rand(5, n, generator=generator, dtype=torch.float64)
    advantage = torch.linspace(-2, 2, n, dtype=torch.float64)
    one = torch.ones_like(logprob)
    external = torch.zeros(n, dtype=torch.bool)
    constants = TokenConstants(advantage, one, external, old, behavior, reference, engine, one)
    loss, slope = function(logprob, constants)
    for what, value in (("loss", loss), ("slope", slope)):
        if not (isinstance(value, torch.Tensor) and value.shape == (n,) and value.dtype == torch.float64):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"token loss {name!r}: want {what} like logprob, {torch.float64} ({n},); got {got}")
    above, _ = function(logprob + step, constants)
    below, _ = function(logprob - step, constants)
    want = (above - below) / (2 * step)
    error = (slope - want).abs() - 1e-5 * (1 + want.abs())
    if not (error <= 0).all():
        worst = int(error.nan_to_num(nan=torch.inf).argmax())
        raise ValueError(
            f"token loss {name!r}: want slope the derivative of loss; got {slope[worst]:.6g} where finite differences "
            f"give {want[worst]:.6g}, at logprob {logprob[worst]:.4g} and advantage {advantage[worst]:.4g}. Pass "
            "check_slope=False for a loss that holds a factor constant"
        )
