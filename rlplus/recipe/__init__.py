"""What an algorithm does in a step around its objective."""

from rlplus.recipe.plain import Ask, Batch, Recipe, Update, set_advantages

__all__ = ["Ask", "Batch", "Recipe", "Update", "set_advantages"]
