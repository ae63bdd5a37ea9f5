"""The `reference` backend: whole logits and autograd. For tests and small inputs; exact in fp64."""

from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import kept_tokens
from rlplus.loss.guard.scope import full_precision
from rlplus.loss.head.head import Head, scaled
from rlplus.loss.objective.definition import policy_loss
from rlplus.loss.objective.divergence import divergence, student_classes, teacher_classes
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import FLOOR, TokenConstants, token_loss


@torch.library.custom_op("rlplus::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in full precision, in the backward pass too; an op because torch.compile cannot trace the setting."""
    with full_precision(a.device):
        return a @ b.T


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad
    return product(grad, b.T) if needs_a else None, product(grad.T, a.T) if needs_b else None


product.register_fake(lambda a, b: a.new_empty(len(a), len(b)))
product.register_autograd(_product_backward, setup_context=_keep_factors)


class _Rounded(torch.autograd.Function):
    """x rounded to the values of a dtype; the gradient is not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(torch.promote_types(dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Floor(torch.autograd.Function):
    """max(logp, FLOOR) with the derivative of logp, so that the slope of an impossible token reaches the others."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor) -> Tensor:
        return logp.clamp(min=FLOOR)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def log_probabilities(head: Head) -> Tensor:
    """log p (N, V), at least FLOOR; differentiable."""
    return _Floor.apply(_log_softmax(_logits(head)))


def _logits(head: Head) -> Tensor:
    weight = _Rounded.apply(head.weight, head.hidden.dtype)
    bias = None if head.bias is None else _Rounded.apply(head.bias, head.hidden.dtype)
    z = scaled(product(head.hidden.to(head.dtype), weight), head._replace(bias=bias))
    if head.softcap is not None:
        z = head.softcap * (z / head.softcap).tanh()
    if head.row_temperature is not None:
        z = z / head.row_temperature[:, None]
    if head.kept_offsets is not None:
        z = torch.where(kept_tokens.mask(head), z, -torch.inf)
    return z


def logprob_and_entropy(head: Head) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), NaN where the target is no token, and entropy (N,), in nats; differentiable."""
    logp = log_probabilities(head)
    known = (head.target >= 0) & (head.target < len(head.weight))
    logprob = logp.gather(1, head.target.where(known, 0)[:, None]).squeeze(1)
    return torch.where(known, logprob, torch.nan), -(logp.exp() * logp).sum(-1)


def linear_logprob(head: Head) -> tuple[Tensor, Tensor]:
    """As `logprob_and_entropy`. Rows without a target whose entropy is NaN change no gradient."""
    with torch.no_grad():
        usable = (head.target >= 0) | logprob_and_entropy(head)[1].isfinite()
    logprob, entropy = logprob_and_entropy(_only(head, usable))
    return logprob, entropy.where(usable, torch.nan)


def _log_softmax(z: Tensor) -> Tensor:
    """log softmax of z (N, V). That of a nearly sure token keeps its digits: the others' sum is not added to its 1."""
    logp = z.log_softmax(-1)
    top = z.argmax(-1, keepdim=True)
    largest = z.gather(-1, top)
    others = z.scatter(-1, top, -torch.inf)
    usual = largest.isfinite() & (others.amax(-1, keepdim=True) > -torch.inf)
    rest = others.where(usual, 0.0).logsumexp(-1, keepdim=True) - largest.where(usual, 0.0)
    return logp.scatter(-1, top, torch.where(usual, -torch.nn.functional.softplus(rest), logp.gather(-1, top)))


def linear_policy_loss(
    head: Head, constants: TokenConstants, objective: Objective
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """-> loss (differentiable), logprob (N,), entropy (N,), stats."""
    with torch.no_grad():
        logprob, entropy = logprob_and_entropy(head)
        row = token_loss(logprob, entropy, constants, objective)
    counts = constants.token_weight != 0
    if constants.entropy_weight is not None and objective.entropy_coef:
        counts = counts | (constants.entropy_weight != 0)
    live_logprob, live_entropy = logprob_and_entropy(_only(head, counts))
    large = row.dlogprob != 0
    live_logprob = torch.where(large, live_logprob, live_logprob.detach())
    loss, stats = policy_loss(live_logprob, entropy=live_entropy, objective=objective, **constants._asdict())
    return loss, logprob, entropy, stats


def linear_divergence(head: Head, teacher: Head, weights: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """-> loss (differentiable in the head), divergence (N,)."""
    counts = weights != 0
    with torch.no_grad():
        values = divergence(log_probabilities(head), log_probabilities(teacher).to(head.dtype), beta)
        teacher_logp = log_probabilities(_only(teacher, counts)).to(head.dtype)
    live = divergence(log_probabilities(_only(head, counts)), teacher_logp, beta)
    return (weights * live).sum(), values


def linear_topk_divergence(
    head: Head, tokens: Tensor, logprobs: Tensor, weights: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """-> loss (differentiable in the head), divergence (N,)."""
    counts = weights != 0
    V = len(head.weight)

    def of(head: Head, logprobs: Tensor) -> Tensor:
        logp = _Floor.apply(_log_softmax(student_classes(_logits(head), tokens.clamp(0, V - 1))))
        return divergence(logp, teacher_classes(logprobs, V).to(head.dtype).clamp(min=FLOOR), beta)

    with torch.no_grad():
        values = of(head, logprobs)
    live = of(_only(head, counts), torch.where(counts[:, None], logprobs, 0.0))
    return (weights * live).sum(), values


def _only(head: Head, counts: Tensor) -> Head:
    """The head with zeros in the place of the other rows, so that their contents cannot affect a gradient."""
    return head._replace(
        hidden=torch.where(counts[:, None], head.hidden, 0.0), target=torch.where(counts, head.target, 0),
        row_temperature=None if head.row_temperature is None else torch.where(counts, head.row_temperature, 1.0),
    )  # fmt: skip


def scratch_per_logit(dtype: torch.dtype, device: str, capped: bool = False) -> int:
    """Eight, by measurement: logits, log-softmax, the others' logits, probabilities, and what their gradients need."""
    return 8 * torch.promote_types(dtype, torch.float32).itemsize
