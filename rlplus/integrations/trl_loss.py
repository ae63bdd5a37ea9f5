"""The loss and the metrics of a batch of TRL's GRPOTrainer under one of our objectives."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlplus.loss import Objective, policy_loss
from rlplus.loss.objective.objective import find_objective

IMAGES = (  # arguments of the model that come with images
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def objective_with(args: Any, objective: str | Objective | None) -> Objective | None:
    """The objective that was asked for with the GRPOConfig's coefficients; None is TRL's loss."""
    if objective is None:
        return None
    if args.use_adaptive_entropy:
        raise ValueError("want use_adaptive_entropy False with an objective; got True: TRL's own loss (None) has it")
    chosen = find_objective(objective) if isinstance(objective, str) else objective
    for name, key in (("kl_coef", "beta"), ("entropy_coef", "entropy_coef")):
        want = getattr(chosen, name)
        got = getattr(args, key)
        if want not in (0.0, got):
            raise ValueError(f"want {key}={want} in the GRPOConfig, as the objective has it; got {got}")
    if chosen.mismatch_cap is not None:
        raise ValueError("want mismatch_cap None: the GRPOConfig has vllm_importance_sampling_correction for it")
    estimator = "k3-unbiased" if args.use_bias_correction_kl else "k3"
    if args.beta and chosen.kl_estimator != estimator and (chosen.kl_coef or chosen.kl_estimator != "k3"):
        came = f"{chosen.kl_estimator} with use_bias_correction_kl={args.use_bias_correction_kl} in the GRPOConfig"
        raise ValueError(f"want the objective's kl_estimator {estimator}; got {came}")
    high = chosen.clip_high + (chosen.internal == "cispo")  # TRL's is the largest weight itself
    bounds = {"epsilon": (0.2, chosen.clip_low), "epsilon_high": (None, high), "delta": (None, chosen.dual_clip)}
    for key, (usual, own) in bounds.items():
        if getattr(args, key) not in (usual, own):
            raise ValueError(
                f"want {key}={usual} in the GRPOConfig, since bounds are the objective's (clip_low, clip_high, "
                f"dual_clip), or what this one has, {own}; got {getattr(args, key)}"
            )
    return replace(chosen, kl_coef=args.beta, entropy_coef=args.entropy_coef, kl_estimator=estimator)


class Batch:
    """A micro-batch of GRPOTrainer: `inputs` as it has them, and per completion token (B, C):

    - `mask`: 1 where a token counts
    - `external`: whether it is demonstrated
    - `weight`: the factor of its loss
    - `factor`: the factor >= 0 of its surrogate: TRL's correction of the sampler's mismatch, 0 for tokens left out
    - `bonus`: 1 where the entropy bonus counts
    """

    def __init__(self, inputs: dict[str, Any], mask: Tensor, external: Tensor, weight: Tensor) -> None:
        self.inputs = inputs
        self.mask = mask
        self.external = external
        self.weight = weight
        advantage = inputs["advantages"]
        self.advantage = advantage if advantage.ndim == 2 else advantage[:, None]
        self.factor = torch.ones_like(mask) * inputs.get("importance_sampling_ratio", 1.0)
        self.bonus = mask


def token_weights(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Factor of each token's loss under the trainer's loss_type, before gradients are accumulated; (B, C)."""
    if trainer.loss_type in ("grpo", "sapo"):
        return mask / (mask.sum(-1, keepdim=True).clamp(min=1.0) * len(mask))
    if trainer.loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1.0)
    if trainer.loss_type == "dr_grpo":
        return mask / (len(mask) * trainer.max_completion_length)
    if trainer.loss_type == "luspo":
        return mask / len(mask)
    # The tokens of all processes and of all steps of a generation, of which this is one.
    steps = trainer.args.steps_per_generation if trainer.model.training else 1
    return mask * trainer.accelerator.num_processes * steps / inputs["num_items_in_batch"].clamp(min=1.0)


def constants(batch: Batch, objective: Objective, accumulated: int) -> dict[str, Any]:
    """Per-token inputs of the policy loss, (B, C)."""
    bonus = batch.bonus / (batch.bonus.sum().clamp(min=1.0) * accumulated) if objective.entropy_coef else None
    return {
        "advantage": batch.advantage * batch.factor,  # whose size is a factor of every surrogate
        "token_weight": batch.weight,
        "external": batch.external,
        "old_logprob": batch.inputs.get("old_per_token_logps"),
        "ref_logprob": batch.inputs.get("ref_per_token_logps"),
        "entropy_weight": bonus,
    }


def two_step_loss(
    batch: Batch, objective: Objective, logprob: Tensor, entropy: Tensor, accumulated: int, sequences: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of differentiable logprobs and entropies (B, C). sequences: sampled sequences have one ratio each."""
    tokens = constants(batch, objective, accumulated)
    if not sequences:
        return policy_loss(logprob, entropy=entropy, objective=objective, **tokens)
    # A sampled token has its sequence's surrogate; a sequence's logprob is the mean of its tokens'. The weight of
    # their KL is the sequence's ratio, too, as in TRL.
    if batch.advantage.shape[1] != 1:
        raise ValueError(
            f"want one advantage per sequence, (B, 1), for ratios of sequences; got {batch.advantage.shape}"
        )
    sampled = batch.mask * ~batch.external
    old = tokens["old_logprob"]
    plain = replace(objective, kl_coef=0.0)
    loss, stats = policy_loss(
        _mean(logprob, sampled),
        old_logprob=None if old is None else _mean(old, sampled),
        advantage=batch.advantage[:, 0],
        token_weight=(batch.weight * batch.factor * sampled).sum(-1),
        objective=replace(plain, entropy_coef=0.0),
    )
    tokens["advantage"] = torch.where(batch.external, batch.advantage * batch.factor, 0.0)
    rest, more = policy_loss(logprob, entropy=entropy, objective=plain, **tokens)
    loss = loss + rest
    more["loss_internal"] = stats["loss_internal"]
    if objective.kl_coef:
        kl = objective.kl_coef * (batch.weight * _kl(batch, objective, logprob, sequences)).sum()
        loss = loss + kl
        more["loss_kl"] = kl.detach()
    return loss, more


def _kl(batch: Batch, objective: Objective, logprob: Tensor, sequences: bool) -> Tensor:
    """TRL's estimate of the KL divergence from the reference, (B, C)."""
    gap = batch.inputs["ref_per_token_logps"] - logprob
    kl = torch.expm1(gap) - gap
    if objective.kl_estimator != "k3-unbiased":
        return kl
    drift = _drift(batch, logprob)
    return kl * (_mean(drift, batch.mask)[:, None] if sequences else drift).exp()


def _drift(batch: Batch, logprob: Tensor) -> Tensor:
    """The log of the ratio (B, C): since the policy that sampled."""
    old = batch.inputs.get("old_per_token_logps")
    return logprob - (logprob.detach() if old is None else old)


def _mean(values: Tensor, on: Tensor) -> Tensor:
    """(B, C) -> (B,): over the tokens of each sequence that count."""
    return (values * on).sum(-1) / on.sum(-1).clamp(min=1.0)


def grpo_shares(
    batch: Batch, objective: Objective, logprob: Tensor, entropy: Tensor, sequences: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """GRPOTrainer's metrics that are means: values and where they count, by name. Only sampled tokens are clipped."""
    drift = _drift(batch, logprob)
    found = {"entropy": (entropy, batch.mask)}
    if objective.kl_coef:
        found["kl"] = (_kl(batch, objective, logprob, sequences), batch.mask)
    sampled = batch.mask * ~batch.external
    if sequences:
        drift = _mean(drift, sampled)[:, None]
        sampled = sampled.amax(-1, keepdim=True)
    ratio = drift.exp()
    up = batch.advantage > 0
    high = ((ratio > 1 + objective.clip_high) & up).float()
    if objective.internal == "clip":
        low = ((ratio < 1 - objective.clip_low) & (batch.advantage < 0)).float()
        for name, value in (("low", low), ("high", high), ("region", low + high)):
            found[f"clip_ratio/{name}_mean"] = (value, sampled)
    if objective.internal == "cispo":
        found["cispo_clip_ratio"] = (high, sampled)
    return found


def aligned(value: Any, targets: Tensor) -> Any:
    """A tensor (B, C) of the last C labels at the positions that predict them, 0 elsewhere; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return pad(value, (targets.shape[1] - 1 - value.shape[1], 1))
