"""The loss: objectives in plain PyTorch, which every backend must match, and the fused operations on a head.

Importing this package loads nothing; a name is imported on first use. `import rlplus.loss.operations` registers the
operators under `torch.ops.rlplus`.
"""

from typing import TYPE_CHECKING

from rlplus.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.loss.advantages import batch_advantages
    from rlplus.loss.causal_lm import head_of
    from rlplus.loss.definition import policy_loss
    from rlplus.loss.distillation import DivergenceLoss, linear_divergence
    from rlplus.loss.objective import OBJECTIVES, Objective
    from rlplus.loss.operations import MAX_SCRATCH_MB, PolicyLoss, RLPlusLoss, linear_logprob, linear_policy_loss
    from rlplus.loss.registered import register_token_loss
    from rlplus.loss.tokens import MISMATCH_STATS, STATS, TokenConstants, TokenLoss, exploration_weight, token_loss
    from rlplus.loss.weights import group_advantages, token_weights

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
        "advantages": ("batch_advantages",),
        "causal_lm": ("head_of",),
        "definition": ("policy_loss",),
        "distillation": ("DivergenceLoss", "linear_divergence"),
        "objective": ("OBJECTIVES", "Objective"),
        "operations": ("MAX_SCRATCH_MB", "PolicyLoss", "RLPlusLoss", "linear_logprob", "linear_policy_loss"),
        "registered": ("register_token_loss",),
        "tokens": ("MISMATCH_STATS", "STATS", "TokenConstants", "TokenLoss", "exploration_weight", "token_loss"),
        "weights": ("group_advantages", "token_weights"),
    },
)
