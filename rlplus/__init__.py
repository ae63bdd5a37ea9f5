"""Reinforcement learning of language models at kernel speed: RL-PLUS and its relatives.

Importing this package loads torch, and neither DeepSpeed nor vLLM.
"""

from rlplus.objective import ALGORITHMS, Algorithm, Objective, group_advantages, policy_loss, token_weights
from rlplus.ops import PolicyLoss, RLPlusLoss, linear_logprob, linear_policy_loss

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Objective",
    "PolicyLoss",
    "RLPlusLoss",
    "group_advantages",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "token_weights",
]
