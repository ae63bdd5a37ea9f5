"""The policy loss on given logprobs."""

from typing import Any

import torch
from torch import Tensor

from rlplus.loss.objective.inputs import (
    check_constant_values,
    check_constants,
    check_differentiated_once,
    check_tensor,
    objective_of,
)
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import token_loss


class _Linearized(torch.autograd.Function):
    """A value whose derivatives with respect to logprob and entropy are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, dlogprob: Tensor, dentropy: Tensor, logprob: Tensor, entropy: Tensor) -> Tensor:
        ctx.save_for_backward(dlogprob, dentropy)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, Tensor, Tensor]:
        check_differentiated_once()
        dlogprob, dentropy = ctx.saved_tensors
        return None, None, None, grads[0] * dlogprob, grads[0] * dentropy


def policy_loss(
    logprob: Tensor,
    *,
    old_logprob: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    external: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_weight: Tensor | None = None,
    behavior_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    engine_logprob: Tensor | None = None,
    objective: Objective | str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of RL-PLUS eq. 7 (or another `objective`, or the name of its preset), from logprobs in nats.

    logprob (...) floating, differentiable; entropy (...) likewise, needed when objective.entropy_coef != 0.
    Every other array has logprob's shape and device, and is what `rlplus.linear_policy_loss` takes. old_logprob None
    means the current policy (ratio 1), external None that no token is external. Tokens of token_weight 0 contribute
    nothing, whatever their contents.

    Returns (loss, stats): loss 0-d, fp32 (fp64 for fp64 logprobs), differentiable once; stats 0-d sums and counts,
    detached, which add up over micro-batches and ranks.
    Raises ValueError for wrong shapes, dtypes, devices, missing inputs, non-finite weights, and in rows of
    non-zero weight for non-finite advantages, and for given logprobs none of which is below 0.
    """
    objective = objective_of(objective)
    check_tensor("logprob", logprob)
    dtype = torch.promote_types(logprob.dtype, torch.float32)
    constants = check_constants(
        objective, logprob.shape, logprob.device, dtype,
        advantage=advantage, token_weight=token_weight, external=external, old_logprob=old_logprob,
        behavior_logprob=behavior_logprob, ref_logprob=ref_logprob, engine_logprob=engine_logprob,
        entropy_weight=entropy_weight,
    )  # fmt: skip
    if entropy is None and objective.entropy_coef:
        raise ValueError(f"objective.entropy_coef={objective.entropy_coef:g} needs entropy; got None")
    if entropy is not None:
        check_tensor("entropy", entropy, (logprob.shape, logprob.device))
    check_constant_values(constants)
    flat = logprob.reshape(-1).to(dtype)
    flat_entropy = torch.zeros_like(flat) if entropy is None else entropy.reshape(-1).to(dtype)
    loss, dlogprob, dentropy, stats = token_loss(flat.detach(), flat_entropy.detach(), constants, objective)
    if entropy is None:
        del stats["entropy"], stats["entropy_internal"]
    return _Linearized.apply(loss, dlogprob, dentropy, flat, flat_entropy), stats
