"""Recipes: the parts of a training step that depend on the algorithm, besides its objective."""

from rlplus.algorithm import (
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
from rlplus.config import Config
from rlplus.lazy import import_function
from rlplus.recipe.critic import CriticRecipe
from rlplus.recipe.entropy_weights import EntropyWeightsRecipe
from rlplus.recipe.gate import GateRecipe
from rlplus.recipe.interleaved import InterleavedRecipe
from rlplus.recipe.plain import Ask, Batch, Recipe, Update, demonstration, set_advantages
from rlplus.recipe.prefix import PrefixRecipe
from rlplus.recipe.prefix_search import PrefixSearchRecipe
from rlplus.recipe.prime import ProcessRewardRecipe
from rlplus.recipe.refill import refill_batch
from rlplus.recipe.replay import ReplayRecipe
from rlplus.recipe.self_teaching import SelfDistillRecipe
from rlplus.recipe.teaching import DistillRecipe

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
        raise ValueError(f"algorithm.recipe.name: want a subclass of rlplus.recipe.Recipe; {options.name} is {kind!r}")
    return kind(config)
