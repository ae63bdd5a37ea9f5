"""What an algorithm does in a step beyond its objective: the options of each recipe, a frozen dataclass of its own.

`rlplus.recipe` has what they do. Options stand apart from it so that a configuration is checked without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plain:
    """One draw of prompts, advantages of groups, one update for each mini-batch."""


PLAIN = Plain()
RecipeOptions = Plain

RECIPES: dict[str, type[RecipeOptions]] = {"plain": Plain}
