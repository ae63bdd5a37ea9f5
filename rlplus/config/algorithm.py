"""The section about the algorithm: a preset, and what the run changes of it."""

from dataclasses import fields, replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlplus.config.base import Section
from rlplus.errors import nearest
from rlplus.objective import ALGORITHMS, RECIPES, Algorithm, Objective, RecipeOptions, recipe_name
from rlplus.objective.presets import MismatchLevel, RatioLevel, Reduction


def _objective_field(name: str) -> str:
    names = [field.name for field in fields(Objective)]
    if name not in names:
        near = nearest(name, names)
        raise ValueError(f"unknown key; nearest: algorithm.objective.{near}" if near else "unknown key")
    return name


class AlgorithmConfig(Section):
    """A published algorithm, `preset`, and what this run changes of it; None = as the preset has it.

    `objective`: fields of rlplus.Objective, which documents them. `reduction`, `normalize_std`: as of
    rlplus.token_weights and rlplus.group_advantages. `ratio_level`, `mismatch_level`, `top_entropy`: as of
    rlplus.Algorithm. `recipe`: options of the preset's recipe, or its `name` first for those of another one;
    rlplus.objective.recipes documents them.
    """

    preset: str = "rlplus"
    objective: dict[Annotated[str, AfterValidator(_objective_field)], Any] = {}
    reduction: Reduction | None = None
    normalize_std: bool | None = None
    ratio_level: RatioLevel | None = None
    mismatch_level: MismatchLevel | None = None
    top_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    recipe: dict[str, Any] = {}

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, name: str) -> str:
        if name not in ALGORITHMS:
            hint = f" (nearest: {near})" if (near := nearest(name, ALGORITHMS)) else ""
            raise ValueError(f"want one of {', '.join(ALGORITHMS)}; got {name!r}{hint}")
        return name

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, changes: dict[str, Any]) -> dict[str, Any]:
        replace(Objective(), **changes)  # it checks its values itself
        return changes

    @model_validator(mode="after")
    def _check_recipe(self) -> Self:
        self._recipe()
        return self

    def _recipe(self) -> RecipeOptions:
        """The preset's recipe with this run's changes. ValueError for another name or option than there is."""
        preset = ALGORITHMS[self.preset].recipe
        changes = dict(self.recipe)
        name = changes.pop("name", recipe_name(preset))
        if name not in RECIPES:
            hint = f" (nearest: {near})" if (near := nearest(str(name), RECIPES)) else ""
            raise ValueError(f"recipe.name: want one of {', '.join(RECIPES)}; got {name!r}{hint}")
        options = [field.name for field in fields(RECIPES[name])]
        for key in changes.keys() - set(options):
            near = nearest(key, options)
            hint = f"; nearest: algorithm.recipe.{near}" if near else f"; {name} has {', '.join(options) or 'none'}"
            raise ValueError(f"recipe.{key}: unknown option of the recipe {name}{hint}")
        base = preset if name == recipe_name(preset) else RECIPES[name]()
        return replace(base, **changes)  # it checks its values itself

    def resolve(self) -> Algorithm:
        """The algorithm to run: the preset with this section's changes."""
        preset = ALGORITHMS[self.preset]
        own = ("preset", "objective", "recipe")
        changed = {name: value for name, value in self if name not in own and value is not None}
        objective = replace(preset.objective, **self.objective)
        return replace(preset, objective=objective, recipe=self._recipe(), **changed)
