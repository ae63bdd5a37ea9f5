"""Divergences of a student from a teacher: the definition in plain PyTorch, which every backend must match.

With the student's probabilities p and the teacher's q of the tokens of a vocabulary, and m = beta q + (1 - beta) p,

    reverse_kl   sum p log(p / q)
    forward_kl   sum q log(q / p)
    jsd          beta sum q log(q / m) + (1 - beta) sum p log(p / m)

the generalised Jensen-Shannon divergence of Agarwal et al., "On-Policy Distillation of Language Models" (2024), eq. 1,
with the roles that TRL gives beta: 0 is the forward and 1 the reverse divergence, which it approaches, divided by beta
and by 1 - beta, from inside. So a single number is the kind of a divergence.
"""

import torch
from torch import Tensor

KINDS = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}


def beta_of(kind: object, beta: object) -> float:
    """The number that stands for a kind, and for a jsd with this beta; None: its default."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"want kind one of {', '.join(KINDS)}; got {kind!r}")
    if beta is None:
        return KINDS[kind]
    if kind != "jsd":
        raise ValueError(f"want beta with kind 'jsd' only; got beta={beta!r} with {kind!r}")
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta <= 1:
        raise ValueError(f"want beta in [0, 1], where 0 is forward_kl and 1 reverse_kl; got {beta!r}")
    return float(beta)


def divergence(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """(N,) from finite log probabilities (N, V) of the student and the teacher; differentiable in both."""
    d = logp - logq
    if beta == 1:
        return (logp.exp() * d).sum(-1)
    if beta == 0:
        return -(logq.exp() * d).sum(-1)
    of_p, of_q = log_ratios(d, beta)
    return (beta * logq.exp() * of_q + (1 - beta) * logp.exp() * of_p).sum(-1)


def log_ratios(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / m) and log(q / m) of d = log(p / q). Where p and q are near, both are; log m - log p would cancel."""
    up, down = d.clamp(min=0), d.clamp(max=0)
    rest = torch.where(d > 0, ((-up).expm1() * beta).log1p(), (down.expm1() * (1 - beta)).log1p())
    return down - rest, -up - rest


def value_and_gradient(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence (N,) and its derivative by the student's logits (N, V), without autograd; logp is overwritten.

        forward_kl p - q        reverse_kl p (log(p / q) - K)        jsd (1 - beta) p (log(p / m) - K)

    K = sum p log(p / q), or of p / m. Sums have terms that are not negative: with log(p / q) comes q - p, whose sum
    is 0, so that small divergences are not differences of larger numbers.
    """
    d = logp - logq
    gap = torch.maximum(logp, logq).exp_().mul_(d.abs().neg_().expm1_().neg_()).copysign_(d)  # p - q
    if beta == 0:
        return (gap - d.mul_(logq.exp())).sum(-1), gap
    p = logp.exp_()
    if beta == 1:
        value = (p * d).sub_(gap).sum(-1)
        return value, d.sub_(value[:, None]).mul_(p)
    of_p, of_q = log_ratios(d, beta)
    value = (of_q.mul_(logq.exp()).mul_(beta) + (of_p * p).mul_(1 - beta)).sum(-1)
    mean = (of_p * p).sub_(gap.mul_(beta)).sum(-1)
    return value, of_p.sub_(mean[:, None]).mul_(p).mul_(1 - beta)
