"""What an algorithm does in a step beyond its objective: the options of each recipe, a frozen dataclass of its own.

`rlplus.recipe` has what they do. Options stand apart from it so that a configuration is checked without torch.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RecipeOptions:
    """What is fixed for all options of a recipe.

    in_place: whether a demonstration takes the place of a rollout of its group.
    """

    in_place: ClassVar[bool] = True


@dataclass(frozen=True)
class Plain(RecipeOptions):
    """One draw of prompts, advantages of groups, one update for each mini-batch."""


@dataclass(frozen=True)
class Interleaved(RecipeOptions):
    """Updates on rollouts alone, and now and then one on demonstrations of prompts that no rollout solved (ReLIFT).

    batch   demonstrations of such an update
    Raises ValueError for a value that does not fit.
    """

    in_place: ClassVar[bool] = False
    batch: int = 128

    def __post_init__(self) -> None:
        _check_integer("batch", self.batch, 1)


@dataclass(frozen=True)
class Gate(RecipeOptions):
    """Demonstrations of prompts alone that the policy hardly solves (SuperRL, HPT).

    solved   a prompt's demonstration is trained on if at most so many of its rollouts were solved
    keep     whether its rollouts are trained on, too
    Raises ValueError for values that do not fit.
    """

    in_place: ClassVar[bool] = False
    solved: int = 0
    keep: bool = False

    def __post_init__(self) -> None:
        _check_integer("solved", self.solved, 0)
        if not isinstance(self.keep, bool):
            raise ValueError(f"want recipe.keep true or false; got {self.keep!r}")


PLAIN = Plain()

RECIPES: dict[str, type[RecipeOptions]] = {"plain": Plain, "interleaved": Interleaved, "gate": Gate}


def recipe_name(options: RecipeOptions) -> str:
    """The name in `RECIPES` of the recipe that has these options."""
    return next(name for name, kind in RECIPES.items() if kind is type(options))


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"want recipe.{name} an integer >= {least}; got {value!r}")
