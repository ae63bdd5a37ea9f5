"""prime-rl 0.8 with the fused head, and our objectives as its custom loss:

    [trainer.loss]
    type = "custom"
    import_path = "rlplus.integrations.prime_rl.loss"
    kwargs = {objective = "rlplus"}

prime-rl's trainer then imports this module, which also replaces `forward` of its fused heads, `FusedOutputLinear` and
Gemma's, by the fused operation: `model.fused_lm_head_token_chunk_size` must be a number, as it is by default.
"""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear, PrimeLmOutput
from prime_rl.trainer.models.layers.lm_head_gemma import GemmaFusedOutputLinear
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs
from torch import Tensor

from rlplus.integrations.interface import check_interface
from rlplus.loss import linear_logprob, policy_loss
from rlplus.loss.objective.objective import find_objective

HEAD = ("self", "hidden_states", "labels", "temperature")
INTERFACE = {  # functions and classes of prime-rl that are replaced or called, and their arguments
    FusedOutputLinear.forward: HEAD,
    GemmaFusedOutputLinear.forward: HEAD,
    LossInputs: (
        *("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights"),
    ),
    LossOutputs: ("loss", "metrics"),
}


def fused_forward(self: Any, hidden_states: Tensor, labels: Tensor, temperature: Tensor) -> PrimeLmOutput:
    """`forward` of the fused heads: logprobs and entropy (B, T) in fp32. As in prime-rl, entropy has no gradient."""
    softcap = getattr(self, "softcap", None)  # Gemma's heads have one
    logprob, entropy = linear_logprob(
        hidden_states, self.weight, labels, temperature=temperature, logit_softcap=softcap
    )
    return PrimeLmOutput(logprobs=logprob, entropy=entropy.detach())


def loss(inputs: LossInputs, objective: str = "rlplus", **changes: Any) -> LossOutputs:
    """An objective as prime-rl's custom loss of one sequence; all tensors (T,).

    objective: a preset's name; changes: fields of `rlplus.Objective` to replace in it, such as clip_high. Its KL and
    entropy bonus are left out: prime-rl ships neither reference logprobs to this loss nor entropies.

    A token whose loss weight (`rl_weights` of prime-rl's samples) is negative is a demonstration's, and the weight's
    size is its weight. Its inference_logprobs are the policy's, as a prefill computes them.
    """
    preset = find_objective(objective)
    chosen = replace(preset, **{"kl_coef": 0.0, "entropy_coef": 0.0, **changes})
    mask = inputs.loss_mask
    weight = inputs.loss_weights
    value, stats = policy_loss(
        inputs.trainer_logprobs,
        old_logprob=inputs.inference_logprobs,
        advantage=inputs.advantages,
        token_weight=(mask if weight is None else mask * weight.abs()).float(),
        external=None if weight is None else weight < 0,
        objective=chosen,
    )
    sampled = stats["tokens_internal"].clamp(min=1)
    demonstrated = stats["tokens_external"].clamp(min=1)
    metrics = {
        "kl_old": stats["kl_old"] / sampled,
        "clip_fraction": (stats["clipped_low"] + stats["clipped_high"]) / sampled,
        "external_share": stats["tokens_external"] / stats["tokens"].clamp(min=1),
        "external_ratio": stats["ratio_external"] / demonstrated,
    }
    return LossOutputs(loss=value, metrics=metrics)


check_interface("prime-rl 0.8", version("prime-rl"), INTERFACE)
FusedOutputLinear.forward = GemmaFusedOutputLinear.forward = fused_forward
