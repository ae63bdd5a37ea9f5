"""Reinforcement learning of language models at kernel speed: RL-PLUS and its relatives.

The names here belong to the loss, which needs torch and, on NVIDIA GPUs, triton; the trainer is the extra `train`.
Importing this package loads nothing. The first use of a name imports torch and, for the fused operations, registers the
operators under `torch.ops.rlplus`. To register them without calling one (to load an exported program, say), `import
rlplus.loss.operations.linear_losses`.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.loss import (
        OBJECTIVES,
        DivergenceLoss,
        Objective,
        PolicyLoss,
        RLPlusLoss,
        batch_advantages,
        group_advantages,
        head_of,
        linear_divergence,
        linear_logprob,
        linear_policy_loss,
        policy_loss,
        register_token_loss,
        token_weights,
    )

__version__ = "0.3.0"

__all__ = [
    "OBJECTIVES",
    "DivergenceLoss",
    "Objective",
    "PolicyLoss",
    "RLPlusLoss",
    "batch_advantages",
    "group_advantages",
    "head_of",
    "linear_divergence",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "register_token_loss",
    "token_weights",
]

__getattr__, __dir__ = lazy_names(__name__, {"loss": tuple(__all__)})
