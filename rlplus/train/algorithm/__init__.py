"""An algorithm: an objective, the presets of the published ones, the options of recipes, and formulas around the loss.

Presets and options need no torch, so that configurations are checked without importing it; the formulas are imported on
first use.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names
from rlplus.train.algorithm.distillation_options import Distill, SelfDistill
from rlplus.train.algorithm.external_schedule import ExternalSchedule
from rlplus.train.algorithm.options import (
    RECIPES,
    AnyRecipe,
    Critic,
    EntropyWeights,
    Gate,
    Interleaved,
    Plain,
    Prefix,
    PrefixSearch,
    ProcessReward,
    Refill,
    Replay,
    Shaping,
    recipe_options,
)
from rlplus.train.algorithm.presets import ALGORITHMS, Algorithm, algorithm
from rlplus.train.algorithm.recipe_base import HeadKind, RecipeOptions

if TYPE_CHECKING:
    from rlplus.train.algorithm.formulas import generalized_advantages, outcome_loss, process_advantages, value_loss

__all__ = [
    "ALGORITHMS",
    "RECIPES",
    "Algorithm",
    "AnyRecipe",
    "Critic",
    "Distill",
    "EntropyWeights",
    "ExternalSchedule",
    "Gate",
    "HeadKind",
    "Interleaved",
    "Plain",
    "Prefix",
    "PrefixSearch",
    "ProcessReward",
    "RecipeOptions",
    "Refill",
    "Replay",
    "SelfDistill",
    "Shaping",
    "algorithm",
    "generalized_advantages",
    "outcome_loss",
    "process_advantages",
    "recipe_options",
    "value_loss",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "formulas": ("generalized_advantages", "outcome_loss", "process_advantages", "value_loss"),
    },
)
