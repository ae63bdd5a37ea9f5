"""The objectives in plain PyTorch: the definition that every backend must match."""

from rlplus.objective.loss import policy_loss
from rlplus.objective.presets import ALGORITHMS, Algorithm, Objective, algorithm
from rlplus.objective.surrogates import MISMATCH_STATS, STATS, TokenConstants, TokenLoss, token_loss
from rlplus.objective.weights import group_advantages, token_weights

__all__ = [
    "ALGORITHMS",
    "MISMATCH_STATS",
    "STATS",
    "Algorithm",
    "Objective",
    "TokenConstants",
    "TokenLoss",
    "algorithm",
    "group_advantages",
    "policy_loss",
    "token_loss",
    "token_weights",
]
