"""The loss: objectives in plain PyTorch, which every backend must match, and the fused operations on a head.

Importing this package loads nothing; a name is imported on first use. `import rlplus.loss.operations` registers the
operators under `torch.ops.rlplus`.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.loss.head.causal_lm import head_of
    from rlplus.loss.objective.advantages import batch_advantages
    from rlplus.loss.objective.definition import policy_loss
    from rlplus.loss.objective.objective import OBJECTIVES, Objective
    from rlplus.loss.objective.surrogates import register_token_loss
    from rlplus.loss.objective.tokens import (
        MISMATCH_STATS,
        STATS,
        TokenConstants,
        TokenLoss,
        exploration_weight,
        token_loss,
    )
    from rlplus.loss.objective.weights import group_advantages, token_weights
    from rlplus.loss.operations.distillation import DivergenceLoss, linear_divergence
    from rlplus.loss.operations.linear_losses import (
        MAX_SCRATCH_MB,
        PolicyLoss,
        RLPlusLoss,
        linear_logprob,
        linear_policy_loss,
    )

__all__ = [
    "MAX_SCRATCH_MB",
    "MISMATCH_STATS",
    "OBJECTIVES",
    "STATS",
    "DivergenceLoss",
    "Objective",
    "PolicyLoss",
    "RLPlusLoss",
    "TokenConstants",
    "TokenLoss",
    "batch_advantages",
    "exploration_weight",
    "group_advantages",
    "head_of",
    "linear_divergence",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "register_token_loss",
    "token_loss",
    "token_weights",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "objective.advantages": ("batch_advantages",),
        "head.causal_lm": ("head_of",),
        "objective.definition": ("policy_loss",),
        "operations.distillation": ("DivergenceLoss", "linear_divergence"),
        "objective.objective": ("OBJECTIVES", "Objective"),
        "operations.linear_losses": (
            "MAX_SCRATCH_MB",
            "PolicyLoss",
            "RLPlusLoss",
            "linear_logprob",
            "linear_policy_loss",
        ),
        "objective.surrogates": ("register_token_loss",),
        "objective.tokens": (
            "MISMATCH_STATS",
            "STATS",
            "TokenConstants",
            "TokenLoss",
            "exploration_weight",
            "token_loss",
        ),
        "objective.weights": ("group_advantages", "token_weights"),
    },
)
