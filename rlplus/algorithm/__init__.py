"""The objectives in plain PyTorch: the definition that every backend must match.

`presets` needs no torch, so that configurations are checked without importing it; the others are imported on first use.
"""

from typing import TYPE_CHECKING

from rlplus.algorithm.external_schedule import ExternalSchedule
from rlplus.algorithm.options import (
    RECIPES,
    Critic,
    Gate,
    Head,
    Interleaved,
    Plain,
    Prefix,
    ProcessReward,
    RecipeOptions,
    Refill,
    Replay,
    Shaping,
    recipe_name,
)
from rlplus.algorithm.presets import ALGORITHMS, Algorithm, algorithm
from rlplus.lazy import lazy_names
from rlplus.loss.objective import Objective
from rlplus.loss.registered import register_token_loss

if TYPE_CHECKING:
    from rlplus.algorithm.critic_formulas import generalized_advantages, value_loss
    from rlplus.algorithm.prime_formulas import outcome_loss, process_advantages
    from rlplus.loss.advantages import batch_advantages
    from rlplus.loss.definition import policy_loss
    from rlplus.loss.tokens import MISMATCH_STATS, STATS, TokenConstants, TokenLoss, exploration_weight, token_loss
    from rlplus.loss.weights import group_advantages, token_weights

__all__ = [
    "ALGORITHMS",
    "MISMATCH_STATS",
    "RECIPES",
    "STATS",
    "Algorithm",
    "Critic",
    "ExternalSchedule",
    "Gate",
    "Head",
    "Interleaved",
    "Objective",
    "Plain",
    "Prefix",
    "ProcessReward",
    "RecipeOptions",
    "Refill",
    "Replay",
    "Shaping",
    "TokenConstants",
    "TokenLoss",
    "algorithm",
    "batch_advantages",
    "exploration_weight",
    "generalized_advantages",
    "group_advantages",
    "outcome_loss",
    "policy_loss",
    "process_advantages",
    "recipe_name",
    "register_token_loss",
    "token_loss",
    "token_weights",
    "value_loss",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "advantages": ("batch_advantages",),
        "loss": ("policy_loss",),
        "process": ("outcome_loss", "process_advantages"),
        "tokens": ("MISMATCH_STATS", "STATS", "TokenConstants", "TokenLoss", "exploration_weight", "token_loss"),
        "value": ("generalized_advantages", "value_loss"),
        "weights": ("group_advantages", "token_weights"),
    },
)
