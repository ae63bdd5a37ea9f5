"""Reinforcement learning of language models at kernel speed: RL-PLUS and its relatives.

Importing this package loads nothing. The first use of a name imports torch and, for those of `rlplus.loss.operations`, registers
the operators under `torch.ops.rlplus`; neither needs DeepSpeed or vLLM. To register them without calling one (to load
an exported program, say), `import rlplus.loss.operations`.
"""

from typing import TYPE_CHECKING

from rlplus.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.algorithm import ALGORITHMS, Algorithm
    from rlplus.loss import (
        Objective,
        PolicyLoss,
        RLPlusLoss,
        batch_advantages,
        group_advantages,
        head_of,
        linear_logprob,
        linear_policy_loss,
        policy_loss,
        register_token_loss,
        token_weights,
        use_tuning,
    )

__version__ = "0.2.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Objective",
    "PolicyLoss",
    "RLPlusLoss",
    "batch_advantages",
    "group_advantages",
    "head_of",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "register_token_loss",
    "token_weights",
    "use_tuning",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "objective": (
            *("ALGORITHMS", "Algorithm", "Objective"),
            *("batch_advantages", "group_advantages", "policy_loss", "register_token_loss", "token_weights"),
        ),
        "ops": ("PolicyLoss", "RLPlusLoss", "head_of", "linear_logprob", "linear_policy_loss", "use_tuning"),
    },
)
