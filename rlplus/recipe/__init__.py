"""What an algorithm does in a step around its objective."""

from rlplus.config import Config
from rlplus.objective import Plain, RecipeOptions
from rlplus.recipe.plain import Ask, Batch, Recipe, Update, set_advantages
from rlplus.recipe.refill import refill_batch

__all__ = ["Ask", "Batch", "Recipe", "Update", "make_recipe", "refill_batch", "set_advantages"]

_RECIPES: dict[type[RecipeOptions], type[Recipe]] = {Plain: Recipe}


def make_recipe(config: Config) -> Recipe:
    """The recipe of the run's algorithm."""
    return _RECIPES[type(config.algorithm.resolve().recipe)](config)
