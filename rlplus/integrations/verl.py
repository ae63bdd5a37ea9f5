"""verl 0.9 with the fused head, and our objectives as its policy losses.

verl imports the modules that VERL_USE_EXTERNAL_MODULES names in each of its processes:

    VERL_USE_EXTERNAL_MODULES=rlplus.integrations.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=rlplus actor_rollout_ref.model.use_fused_kernels=True ...

Importing this module has three effects: each preset with demonstrations is a policy loss of its name; verl's
`FusedLinearForPPO` (the backends "torch" and "liger" of fused kernels) is the fused operation; and `ppo_loss` hands the
column `external` of a batch on to these losses. KL, entropy bonus, aggregation and rollout correction stay verl's.
"""

import sys
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import verl
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.utils import losses

from rlplus.integrations.interface import check_interface
from rlplus.integrations.transformers import as_autocast
from rlplus.loss import OBJECTIVES, Objective, linear_logprob, policy_loss

INTERFACE = {  # functions of verl that are replaced or called, and their arguments
    FusedLinearForPPO.forward: ("self", "hidden_states", "vocab_weights", "input_ids", "temperature"),
    losses.ppo_loss: ("config", "model_output", "data", "dp_group"),
    core_algos.register_policy_loss: ("name",),
    core_algos.agg_loss: (
        *("loss_mat", "loss_mask", "loss_agg_mode"),
        *("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"),
    ),
}
IMPORTERS = ("verl.workers.utils.losses", "verl.workers.engine_workers", "verl.trainer.distillation.losses")

_external: ContextVar[Tensor | None] = ContextVar("external", default=None)  # the batch's, in `ppo_loss`


def fused_forward(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: Any = 1.0
) -> tuple[Tensor, Tensor]:
    """`FusedLinearForPPO.forward`: logprob and entropy, both in fp32."""
    return linear_logprob(as_autocast(hidden_states), vocab_weights, input_ids.long(), temperature=temperature)


def verl_policy_loss(
    objective: Objective,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """An objective as a policy loss of verl; all tensors (B, T). Tokens are external where the batch says so."""
    external = _external.get()
    if external is not None and external.ndim == 1:
        external = external[:, None].expand(log_prob.shape)
    ones = torch.ones_like(log_prob, dtype=torch.float32, requires_grad=True)
    with torch.enable_grad():  # the aggregate is linear in the tokens' losses: its gradient is their weights
        total = core_algos.agg_loss(ones, response_mask, loss_agg_mode, **config.global_batch_info)
    (weight,) = torch.autograd.grad(total, ones)
    loss, stats = policy_loss(
        log_prob,
        old_logprob=old_log_prob,
        advantage=advantages if rollout_is_weights is None else advantages * rollout_is_weights,
        token_weight=weight,
        external=external,
        objective=objective,
    )
    sampled = stats["tokens_internal"].clamp(min=1)
    demonstrated = stats["tokens_external"].clamp(min=1)
    metrics = {
        "actor/ppo_kl": stats["kl_old"] / sampled,
        "actor/pg_clipfrac": (stats["clipped_low"] + stats["clipped_high"]) / sampled,
        "actor/external_share": stats["tokens_external"] / stats["tokens"].clamp(min=1),
        "actor/external_ratio": stats["ratio_external"] / demonstrated,
    }
    return loss, {name: value.item() for name, value in metrics.items()}


@wraps(losses.ppo_loss)
def _ppo_loss(own: Any, config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    given = data.select("external").to_padded_tensor()["external"].bool() if "external" in data else None
    before = _external.set(given)
    try:
        return own(config, model_output, data, dp_group)
    finally:
        _external.reset(before)


def _install() -> None:
    """Once per process, at the import of this module. ImportError unless verl is as this module expects it."""
    check_interface("verl 0.9", verl.__version__, INTERFACE)
    for name, preset in OBJECTIVES.items():
        objective = replace(preset, kl_coef=0.0, entropy_coef=0.0)
        if objective.external != "none" and name not in core_algos.POLICY_LOSS_REGISTRY:
            core_algos.register_policy_loss(name)(partial(verl_policy_loss, objective))
    FusedLinearForPPO.forward = fused_forward
    with_external = partial(_ppo_loss, losses.ppo_loss)
    for name in IMPORTERS:
        if name in sys.modules:
            sys.modules[name].ppo_loss = with_external  # type: ignore[attr-defined]


_install()
