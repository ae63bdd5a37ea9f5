"""What an algorithm does in a step beyond its objective: the options of each recipe, a frozen dataclass of its own.

`rlplus.recipe` has what they do. Options stand apart from it so that a configuration is checked without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Head = Literal["language", "value"]


@dataclass(frozen=True)
class RecipeOptions:
    """What is fixed for all options of a recipe.

    learners: the models that it trains beside the policy, by name. Each has the policy's body; its head is that of the
    "language" model, or a "value" of width 1.
    """

    learners: ClassVar[Mapping[str, Head]] = {}


@dataclass(frozen=True)
class Plain(RecipeOptions):
    """One draw of prompts, advantages of groups, one update for each mini-batch."""


PLAIN = Plain()

RECIPES: dict[str, type[RecipeOptions]] = {"plain": Plain}


def recipe_name(options: RecipeOptions) -> str:
    """The name in `RECIPES` of the recipe that has these options."""
    return next(name for name, kind in RECIPES.items() if kind is type(options))
