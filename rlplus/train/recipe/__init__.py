"""Recipes: the parts of a training step that depend on the algorithm, besides its objective."""

from importlib import import_module

from rlplus.common.lazy import import_function
from rlplus.train.config import Config
from rlplus.train.recipe.plain import Ask, Batch, Recipe, Update, demonstration, set_advantages
from rlplus.train.recipe.refill import refill_batch

__all__ = ["Ask", "Batch", "Recipe", "Update", "demonstration", "make_recipe", "refill_batch", "set_advantages"]

_RECIPES = {  # modules and classes by the options' `name`
    "plain": "plain.Recipe",
    "interleaved": "interleaved.InterleavedRecipe",
    "gate": "gate.GateRecipe",
    "prefix": "prefix.PrefixRecipe",
    "prefix-search": "prefix_search.PrefixSearchRecipe",
    "entropy-weights": "entropy_weights.EntropyWeightsRecipe",
    "critic": "critic.CriticRecipe",
    "process-reward": "prime.ProcessRewardRecipe",
    "replay": "replay.ReplayRecipe",
    "distill": "teaching.DistillRecipe",
    "self-distill": "self_teaching.SelfDistillRecipe",
}


def make_recipe(config: Config) -> Recipe:
    """The recipe of the run's algorithm; ValueError if its name is not a `Recipe`'s."""
    name = config.algorithm.recipe.name
    if name in _RECIPES:
        module, _, own = _RECIPES[name].partition(".")
        kind = getattr(import_module(f"{__name__}.{module}"), own)
    else:
        kind = import_function(name)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ValueError(f"algorithm.recipe.name: want a subclass of rlplus.train.recipe.Recipe; {name} is {kind!r}")
    return kind(config)
