"""What an algorithm does in a step around its objective."""

from rlplus.config import Config
from rlplus.objective import Critic, Plain, ProcessReward, RecipeOptions
from rlplus.recipe.critic import CriticRecipe
from rlplus.recipe.plain import Ask, Batch, Recipe, Update, set_advantages
from rlplus.recipe.process_reward import ProcessRewardRecipe

__all__ = ["Ask", "Batch", "Recipe", "Update", "make_recipe", "set_advantages"]

_RECIPES: dict[type[RecipeOptions], type[Recipe]] = {
    Plain: Recipe,
    Critic: CriticRecipe,
    ProcessReward: ProcessRewardRecipe,
}


def make_recipe(config: Config) -> Recipe:
    """The recipe of the run's algorithm."""
    return _RECIPES[type(config.algorithm.resolve().recipe)](config)
