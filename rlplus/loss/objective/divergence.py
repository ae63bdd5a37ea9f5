"""Divergences of a student from a teacher: the definition in plain PyTorch, which every backend must match.

With the student's probabilities p and the teacher's q of the tokens of a vocabulary, and m = beta q + (1 - beta) p,

    reverse_kl   sum p log(p / q)
    forward_kl   sum q log(q / p)
    jsd          beta sum q log(q / m) + (1 - beta) sum p log(p / m)

the generalised Jensen-Shannon divergence of Agarwal et al., "On-Policy Distillation of Language Models" (2024), eq. 1,
with the roles that TRL gives beta: 0 is the forward and 1 the reverse divergence, which it approaches, divided by beta
and by 1 - beta, from inside. So a single number is the kind of a divergence.

Where only k tokens of the teacher are known, p and q are distributions over k + 1 classes: each of those tokens, and
all others together.
"""

import torch
from torch import Tensor

from rlplus.loss.objective.inputs import check_values
from rlplus.loss.objective.tokens import FLOOR

EXCESS = 1e-3  # by which a teacher's probabilities may add up to more than 1
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
    """(N,) from finite log probabilities (N, V) of the student and the teacher; differentiable in both.

    Of p log(p / q) and of q log(q / p) is taken what each token adds beside p - q, whose sum is 0: near models have
    divergences far below the rounding of the terms themselves.
    """
    d = logp - logq
    if beta == 1:
        return (logp.exp() * d - _gap(logp, logq, d)).sum(-1)
    if beta == 0:
        return (_gap(logp, logq, d) - logq.exp() * d).sum(-1)
    of_p, of_q = log_ratios(d, beta)
    return (beta * logq.exp() * of_q + (1 - beta) * logp.exp() * of_p).sum(-1)


def _gap(logp: Tensor, logq: Tensor, d: Tensor) -> Tensor:
    """p - q of d = log(p / q), to the digits of d."""
    return torch.where(d > 0, -logp.exp() * (-d.relu()).expm1(), logq.exp() * d.clamp(max=0).expm1())


def log_ratios(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / m) and log(q / m) of d = log(p / q). Where p and q are near, both are; log m - log p would cancel."""
    up = d.relu()  # without a slope at d = 0, which is that of `down` alone, as below
    down = d.clamp(max=0)
    rest = torch.where(d > 0, ((-up).expm1() * beta).log1p(), (down.expm1() * (1 - beta)).log1p())
    return down - rest, -up - rest


def value_and_gradient(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence (N,) and its derivative by the student's logits (N, V), without autograd; logp is overwritten.

    - "forward_kl": p - q
    - "reverse_kl": p (log(p / q) - K)
    - "jsd": (1 - beta) p (log(p / m) - K)

    K = sum p log(p / q), or of p / m. The terms of a divergence are not negative: with log(p / q) comes q - p, whose
    sum is 0, so that small divergences are not differences of larger numbers.
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
    mean = (of_p * p).sum(-1)
    return value, of_p.sub_(mean[:, None]).mul_(p).mul_(1 - beta)


# ---- k tokens of the teacher and their logprobs


def check_topk(tokens: Tensor, logprobs: Tensor, V: int, on: Tensor) -> None:
    """Check the teacher's tokens and logprobs (N, k) of the rows `on` (N,). V: the size of the vocabulary."""
    inside = ((tokens >= 0) & (tokens < V)).all(1)
    where = "wherever the token's weight is not 0"
    check_values(inside | ~on, f"want teacher_topk tokens in [0, {V}) {where}; got one outside")
    ordered = tokens.sort(1).values
    once = (ordered[:, 1:] != ordered[:, :-1]).all(1)
    check_values(once | ~on, f"want each of a row's teacher_topk tokens once {where}; got one twice")
    # Rounding a logprob changes p by eps / 2 |log p| p: in the sum by eps / 2 times an entropy, at most log k nats.
    most = 1 + max(EXCESS, 4 * torch.finfo(logprobs.dtype).eps)
    message = f"want teacher_topk logprobs in nats, of probabilities that add up to at most 1 {where}; got more than "
    check_values((logprobs.double().exp().sum(1) <= most) | ~on, message + f"{most:g}, or NaN")


def teacher_classes(logprobs: Tensor, V: int) -> Tensor:
    """log q (n, k + 1) of the teacher's tokens and of all others together, from logprobs (n, k); fp32 or wider.

    The others' probability is 1 - sum q of the tokens, summed without the largest one's 1, and at least the epsilon of
    the logprobs' dtype: engines know it no better, and a rest of 0 by rounding would make all other tokens impossible.
    Then q is divided by its sum. With k = V there are no others, and log q is (n, V).
    """
    known = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    top, at = known.max(1, keepdim=True)
    missing = -(top.expm1() + known.exp().scatter(1, at, 0.0).sum(1, keepdim=True))
    if logprobs.shape[1] == V:
        return known - (-missing).log1p()
    rest = missing.clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([known, rest.log()], 1) - (rest - missing).log1p()


def student_classes(z: Tensor, tokens: Tensor) -> Tensor:
    """Logits (n, k + 1) of the teacher's tokens (n, k) and of all others together, from z (n, V); differentiable."""
    known = z.gather(1, tokens)
    if tokens.shape[1] == z.shape[1]:
        return known
    return torch.cat([known, z.scatter(1, tokens, FLOOR).clamp(min=FLOOR).logsumexp(1, keepdim=True)], 1)
