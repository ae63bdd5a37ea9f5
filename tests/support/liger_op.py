"""pytest plugin: Liger's tests of `triton_grpo_loss` with rlplus in its place, on the CPU.

Liger's function takes logits, ours hidden states and a head's weight. With the identity as hidden states, a row per
token, and the transposed logits as weight, the product is the logits, and the weight's gradient is theirs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss, token_weights
from rlplus.integrations.trl_loss import Batch, two_step_loss
from rlplus.loss import TokenConstants
from rlplus.loss.objective.tokens import token_loss

REDUCTIONS = {"grpo": "sequence", "sapo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module: Any = item.module  # type: ignore[attr-defined]
        module.triton_grpo_loss, module.fused_selective_log_softmax = grpo_loss, selective_log_softmax
        if "rejects_unsupported" in item.name:
            item.add_marker(pytest.mark.skip(reason="not applicable: the message of a refusal of Liger's"))


def selective_log_softmax(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return linear_logprob(*_head(logits), ids[:, 1 - logits.shape[1] :], temperature=temperature)[0]


def grpo_loss(
    logits: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    vllm_is_ratio: Tensor | None = None,
    num_items_in_batch: float | None = None,
    use_bias_correction_kl: bool = False,
    **bounds: Any,
) -> Any:
    """`triton_grpo_loss` with its arguments and results, but for the metrics, which no test reads."""
    objective = _objective(loss_type, eps_low, eps_high, beta, use_bias_correction_kl, **bounds)
    mask = mask.float()
    weight = _weight(mask, loss_type, max_completion_length, num_items_in_batch) if reduce else mask
    factor = 1.0 if vllm_is_ratio is None else vllm_is_ratio.reshape(len(mask), -1)
    if importance_sampling_level == "sequence":
        assert reduce
        inputs = {"old_per_token_logps": old, "ref_per_token_logps": ref, "importance_sampling_ratio": factor}
        batch = Batch(inputs | {"advantages": advantages}, mask, torch.zeros_like(mask, dtype=torch.bool), weight)
        logprob, entropy = linear_logprob(*_head(logits), ids, temperature=temperature)
        return two_step_loss(batch, objective, logprob, entropy, 1, True)[0], []
    tokens = {"old_logprob": old, "ref_logprob": ref, "advantage": (advantages[:, None] * factor).expand(mask.shape)}

    hidden, matrix = _head(logits)

    def fused(matrix: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(
            hidden, matrix, ids, token_weight=weight * mask, temperature=temperature, objective=objective, **tokens
        ).loss

    if reduce:
        return fused(matrix, weight), []
    logprob, _ = linear_logprob(hidden, matrix.detach(), ids, temperature=temperature)
    values, kl = _values(logprob, mask, objective, tokens)
    return PerToken.apply(matrix, values, fused), kl if beta else None, None


class PerToken(torch.autograd.Function):
    """Losses of tokens. Their weights in a sum are known in the backward pass, where the fused operation has them."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, values: Tensor, fused: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(matrix, values)
        ctx.fused = fused
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        matrix, values = (t.detach() for t in ctx.saved_tensors)
        with torch.enable_grad():
            loss = ctx.fused(matrix.requires_grad_(), grads[0])
        torch.testing.assert_close(loss, (grads[0] * values).sum(), rtol=1e-4, atol=1e-3)
        return torch.autograd.grad(loss, matrix)[0], None, None


def _head(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L + 1, V) -> hidden (B, L, B L) and weight (V, B L), whose product is the logits but for the last ones."""
    rows = logits[:, :-1]
    matrix = rows.flatten(0, 1).T.contiguous()
    return torch.eye(matrix.shape[1], dtype=matrix.dtype).view(*rows.shape[:2], -1), matrix


def _objective(
    loss_type: str,
    eps_low: float,
    eps_high: float,
    beta: float,
    unbiased: bool,
    delta: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Objective:
    if loss_type == "vespo":
        pytest.skip("not applicable: rlplus has no vespo")
    kl: dict[str, Any] = {"kl_coef": beta, "kl_estimator": "k3-unbiased" if unbiased else "k3"}
    if loss_type == "sapo":
        return Objective("sapo", tau_pos=sapo_temperature_pos, tau_neg=sapo_temperature_neg, **kl)
    if loss_type == "cispo":
        if eps_high < 1:
            pytest.skip("not applicable: the bound of a cispo weight is at least 1 in rlplus")
        return Objective("cispo", clip_high=eps_high - 1, **kl)
    return Objective("clip", clip_low=eps_low, clip_high=eps_high, dual_clip=delta, **kl)


def _weight(mask: Tensor, loss_type: str, longest: int | None, items: float | None) -> Tensor:
    if loss_type == "luspo":
        return mask * mask.sum(-1, keepdim=True) / mask.numel()
    if loss_type == "dr_grpo":
        return token_weights(mask.bool(), "constant", max_length=longest)
    weight = token_weights(mask.bool(), REDUCTIONS[loss_type])  # type: ignore[arg-type]
    return weight if items is None else weight * mask.sum() / items


def _values(
    logprob: Tensor, mask: Tensor, objective: Objective, tokens: dict[str, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Losses (B, L) of tokens and their KL: sums in which one token has a weight."""
    flat = {name: None if value is None else value.flatten() for name, value in tokens.items()}
    constants = TokenConstants(external=torch.zeros(mask.numel(), dtype=torch.bool), token_weight=mask, **flat)
    logprob = logprob.flatten()

    def one(weight: Tensor) -> tuple[Tensor, Tensor]:
        done = token_loss(logprob, torch.zeros_like(logprob), constants._replace(token_weight=weight), objective)
        return done.loss, done.stats["loss_kl"]

    loss, kl = torch.vmap(one)(mask.flatten().diag())
    return loss.view(mask.shape), kl.view(mask.shape) / (objective.kl_coef or 1.0)
