"""The objectives implemented a second time, token by token, straight from the formulas, as the tests' reference.

Nothing here uses the package's surrogates. Values are autograd graphs of 0-d tensors, so derivatives come for free;
what the mathematics holds constant in the backward pass is detached.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlplus import Objective


def _clip(t: SimpleNamespace) -> Tensor:
    gain = torch.minimum(t.r * t.A, t.r.clamp(1 - t.o.clip_low, 1 + t.o.clip_high) * t.A)
    if t.o.dual_clip is not None and t.A < 0:
        gain = torch.maximum(gain, t.l.new_tensor(t.o.dual_clip * t.A))
    return -gain


def _sapo(t: SimpleNamespace) -> Tensor:
    tau = t.o.tau_pos if t.A > 0 else t.o.tau_neg
    return -t.A * 4 / (tau * (1 + (tau * (1 - t.r)).exp()))


def _dppo(t: SimpleNamespace) -> Tensor:
    moved = (t.p - t.p_old).item()
    dropped = moved > t.o.clip_high if t.A > 0 else moved < -t.o.clip_low
    return 0 * t.l if dropped else -min(t.r.item(), t.o.ratio_cap) * t.A * t.l


def _mixture(t: SimpleNamespace) -> Tensor:
    share = t.o.mixture_share
    return share * (t.estimate if t.p_omega is None else t.p_omega) + (1 - share) * t.p_old


# A token's loss, by surrogate; demonstrated tokens have the exploration weight beside it.
INTERNAL: dict[str, Callable[[SimpleNamespace], Tensor]] = {
    "ratio": lambda t: -t.A * t.r,
    "clip": _clip,
    "reinforce": lambda t: -t.A * t.l,
    "cispo": lambda t: -min(t.r.item(), 1 + t.o.clip_high) * t.A * t.l,
    "sapo": _sapo,
    "dppo": _dppo,
}
EXTERNAL: dict[str, Callable[[SimpleNamespace], Tensor]] = {
    "mis": lambda t: -t.A * t.p / _mixture(t),
    "proxy": lambda t: -t.A * t.r,  # not p / p_old, where both may be too small for a number
    "omega": lambda t: -t.A * t.p / (1.0 if t.p_omega is None else t.p_omega),
    "bayes": lambda t: -t.A * t.p / t.estimate,
    "shaped": lambda t: -t.A * t.p / (t.p + t.o.kappa * (1.0 if t.p_omega is None else t.p_omega)),
    "nll": lambda t: -t.l,
    "dft": lambda t: -t.p.item() * t.l,
    "none": lambda t: 0 * t.l,
}
FEATURES: dict[str, dict[str, Any]] = {  # fields of the objective, one combination an entry
    "plain": {},
    "no-gamma": {"gamma": 0.0},
    "asymmetric-dual": {
        **{"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "ratio_cap": 1.6},
        **{"tau_pos": 2.0, "tau_neg": 0.7, "kappa": 0.3, "external_coef": 0.6, "mixture_share": 0.125},
    },
    "kl": {"kl_coef": 0.7},
    "kl-k2": {"kl_coef": 0.7, "kl_estimator": "k2"},
    "kl-unbiased": {"kl_coef": 0.7, "kl_estimator": "k3-unbiased"},
    "entropy": {"entropy_coef": 0.4},
    "mismatch": {"mismatch_cap": 1.2},
    "mask": {"mismatch_cap": 1.105, "mismatch_low": 0.9, "mismatch_mode": "mask"},
    "all": {
        **{"gamma": 1.7, "dual_clip": 1.1, "kl_coef": 0.3, "kl_estimator": "k3-unbiased", "entropy_coef": 0.2},
        **{"mismatch_cap": 1.5, "mismatch_low": 0.8, "external_coef": 2.0},
    },
}
OPTIONAL = ("old_logprob", "behavior_logprob", "ref_logprob", "engine_logprob", "entropy_weight")


def all_objectives(features: Iterable[str] = FEATURES) -> list[tuple[str, str, str]]:
    """Every surrogate of both kinds; their losses add up, so not every pair of them."""
    pairs = [(internal, "mis") for internal in INTERNAL] + [
        ("ratio", external) for external in EXTERNAL if external != "mis"
    ]
    return [(*pair, feature) for pair, feature in product(pairs, features)]


def sample_constants(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Per-token inputs of every kind: signs, zero advantages, rows of weight 0, ratios on both sides of the clip."""
    g = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    constants = {
        "old_logprob": -0.05 - 4 * rand(),
        "advantage": torch.where(rand() < 0.15, 0.0, 4 * rand() - 2),
        "token_weight": torch.where(rand() < 0.25, 0.0, 0.01 + rand()),
        "behavior_logprob": -0.05 - 4 * rand(),
        "ref_logprob": -0.05 - 4 * rand(),
        "engine_logprob": -0.05 - 4 * rand(),
        "entropy_weight": torch.where(rand() < 0.3, 0.0, rand()),
    }
    for name in ("token_weight", "entropy_weight"):
        constants[name][..., ::7] = 0.0  # rows that count for nothing at all
    near = rand() < 0.5  # half of the engine's logprobs are close to the trainer's
    constants["engine_logprob"] = torch.where(
        near, constants["old_logprob"] + 0.1 * rand(), constants["engine_logprob"]
    )
    for rows, gap in ((slice(1, 4), 0.098), (slice(4, 7), -0.104)):  # ratios of 1.103 and 0.901: only one is 10% off
        constants["engine_logprob"][..., rows] = constants["old_logprob"][..., rows] - gap
    return {k: v.to(dtype) for k, v in constants.items()} | {"external": rand() < 0.5}


def token_loss(o: Objective, l: Tensor, external: bool, A: float, old: float | None, behavior: float | None) -> Tensor:  # noqa: E741
    """The surrogate loss of one token as a differentiable function of its logprob."""
    l_old = l.detach() if old is None else l.new_tensor(old)
    p, p_old = l.exp(), l_old.exp()
    p_omega = None if behavior is None else l.new_tensor(behavior).exp()
    token = SimpleNamespace(
        o=o, l=l, A=A, r=(l - l_old).exp(), p=p, p_old=p_old, p_omega=p_omega, estimate=(p_old + 1) / 2
    )
    if not external:
        return INTERNAL[o.internal](token)
    return (1 - p.detach().clamp(max=1.0)) ** o.gamma * EXTERNAL[o.external](token)


def policy_loss(
    o: Objective, logprob: Tensor, entropy: Tensor | None, c: dict[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """The loss of flat (N,) inputs, differentiable in logprob and entropy, and the statistics that a user expects."""
    losses, stats = token_losses(o, logprob, entropy, c)
    return losses.sum(), stats


def token_losses(
    o: Objective, logprob: Tensor, entropy: Tensor | None, c: dict[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Like `policy_loss`, but a loss (N,) per token."""
    rows = {
        name: None if c.get(name) is None else c[name].tolist()
        for name in (*OPTIONAL, "advantage", "token_weight", "external")
    }
    terms = {name: list((0 * logprob).unbind()) for name in ("internal", "external", "kl", "entropy")}
    stats = dict.fromkeys(
        ("tokens", "tokens_internal", "tokens_external", "entropy", "prob_internal", "prob_external"), 0.0
    )
    if c.get("engine_logprob") is not None:
        stats |= dict.fromkeys(("mismatch_abs", "mismatch_outside_10pct", "mismatch_truncated"), 0.0)
    stats["kl_old"] = stats["entropy_internal"] = 0.0
    for t, l in enumerate(logprob):  # noqa: E741
        here = {name: None if row is None else row[t] for name, row in rows.items()}
        m, kind = here["token_weight"], "external" if here["external"] else "internal"
        m_entropy = m if here["entropy_weight"] is None else here["entropy_weight"]
        if m_entropy and o.entropy_coef and entropy is not None:
            terms["entropy"][t] = -o.entropy_coef * m_entropy * entropy[t]
        if not m:
            continue
        loss = token_loss(o, l, here["external"], here["advantage"], here["old_logprob"], here["behavior_logprob"])
        old = l.item() if here["old_logprob"] is None else here["old_logprob"]
        if kind == "internal" and here["engine_logprob"] is not None:
            weight = l.new_tensor(old - here["engine_logprob"]).exp().item()
            stats["mismatch_abs"] += abs(old - here["engine_logprob"])
            stats["mismatch_outside_10pct"] += not 0.9 <= weight <= 1.1
            if o.mismatch_cap is not None:
                bounded = min(max(weight, o.mismatch_low), o.mismatch_cap)
                stats["mismatch_truncated"] += weight != bounded
                loss = loss * (bounded if weight == bounded or o.mismatch_mode == "truncate" else 0)
        terms[kind][t] = m * loss * (o.external_coef if kind == "external" else 1)
        if o.kl_coef:
            terms["kl"][t] = o.kl_coef * m * kl_estimate(o, l, here["ref_logprob"], None if kind == "external" else old)
        stats["tokens"] += 1
        stats[f"tokens_{kind}"] += 1
        stats[f"prob_{kind}"] += l.exp().item()
        stats["entropy"] += 0.0 if entropy is None else entropy[t].item()
        if kind == "internal":
            stats["entropy_internal"] += 0.0 if entropy is None else entropy[t].item()
            stats["kl_old"] += (l - old).exp().item() - (l.item() - old) - 1
    stacked = {name: torch.stack([*losses, logprob.sum() * 0]) for name, losses in terms.items()}  # also of no tokens
    stats |= {f"loss_{name}": losses.sum().item() for name, losses in stacked.items()}
    return sum(stacked.values(), logprob.new_zeros(()))[:-1], stats


def kl_estimate(o: Objective, l: Tensor, ref: float, old: float | None) -> Tensor:  # noqa: E741
    """Schulman, "Approximating KL Divergence"; DeepSeek-V3.2. old None: a token that no policy sampled."""
    d = ref - l
    if o.kl_estimator == "k2":
        return d**2 / 2
    k3 = d.exp() - d - 1
    return k3 if o.kl_estimator == "k3" else (l - (l.item() if old is None else old)).exp() * k3


def logprob_and_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0, logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(N, H), (V, H), (N,) -> (N,), (N,), from the whole logits, in the inputs' dtype; temperature also (N,)."""
    z = logit_scale * (hidden @ weight.T + (0.0 if bias is None else bias))
    if logit_softcap is not None:
        z = logit_softcap * (z / logit_softcap).tanh()
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = z - z.logsumexp(-1, keepdim=True)
    return logp[torch.arange(len(target)), target], -(logp.exp() * logp).sum(-1)
