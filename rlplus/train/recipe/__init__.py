"""Recipes: the parts of a training step that depend on the algorithm, besides its objective."""

from rlplus.common.lazy import import_function
from rlplus.train.algorithm import (
    Critic,
    Distill,
    EntropyWeights,
    Gate,
    Interleaved,
    Plain,
    Prefix,
    PrefixSearch,
    ProcessReward,
    RecipeOptions,
    Replay,
    SelfDistill,
)
from rlplus.train.config import Config
from rlplus.train.recipe.critic import CriticRecipe
from rlplus.train.recipe.entropy_weights import EntropyWeightsRecipe
from rlplus.train.recipe.gate import GateRecipe
from rlplus.train.recipe.interleaved import InterleavedRecipe
from rlplus.train.recipe.plain import Ask, Batch, Recipe, Update, demonstration, set_advantages
from rlplus.train.recipe.prefix import PrefixRecipe
from rlplus.train.recipe.prefix_search import PrefixSearchRecipe
from rlplus.train.recipe.prime import ProcessRewardRecipe
from rlplus.train.recipe.refill import refill_batch
from rlplus.train.recipe.replay import ReplayRecipe
from rlplus.train.recipe.self_teaching import SelfDistillRecipe
from rlplus.train.recipe.teaching import DistillRecipe

__all__ = ["Ask", "Batch", "Recipe", "Update", "demonstration", "make_recipe", "refill_batch", "set_advantages"]

_RECIPES: dict[type[RecipeOptions], type[Recipe]] = {
    Plain: Recipe,
    Interleaved: InterleavedRecipe,
    Gate: GateRecipe,
    Prefix: PrefixRecipe,
    PrefixSearch: PrefixSearchRecipe,
    EntropyWeights: EntropyWeightsRecipe,
    Critic: CriticRecipe,
    ProcessReward: ProcessRewardRecipe,
    Replay: ReplayRecipe,
    Distill: DistillRecipe,
    SelfDistill: SelfDistillRecipe,
}


def make_recipe(config: Config) -> Recipe:
    """The recipe of the run's algorithm; ValueError if its name is not a `Recipe`'s."""
    options = config.algorithm.recipe
    kind = _RECIPES.get(type(options)) or import_function(options.name)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ValueError(
            f"algorithm.recipe.name: want a subclass of rlplus.train.recipe.Recipe; {options.name} is {kind!r}"
        )
    return kind(config)
