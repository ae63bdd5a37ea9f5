"""The section about the algorithm: a preset, and the run's changes to it."""

from dataclasses import fields, replace
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlplus.algorithm import (
    ALGORITHMS,
    RECIPES,
    Algorithm,
    ExternalSchedule,
    RecipeOptions,
    Refill,
    Shaping,
    recipe_name,
)
from rlplus.algorithm.external_schedule import Shape
from rlplus.algorithm.presets import MismatchLevel, RatioLevel
from rlplus.common.section import Count, Section
from rlplus.config.synonyms import synonym
from rlplus.errors import nearest
from rlplus.loss import Objective
from rlplus.loss.objective import AdvantageEstimator, Reduction

OPTIONAL: dict[str, type[Refill] | type[Shaping]] = {"refill": Refill, "shaping": Shaping}
Options = TypeVar("Options", bound=RecipeOptions | Refill | Shaping)


def _objective_field(name: str) -> str:
    names = [field.name for field in fields(Objective)]
    if name not in names:
        near = nearest(name, names)
        hint = synonym(name) or (near and f"nearest: algorithm.objective.{near}")
        raise ValueError(f"unknown key; {hint}" if hint else "unknown key")
    return name


class ExternalScheduleConfig(Section):
    """Course of external_coef over the steps, see rlplus.algorithm.ExternalSchedule."""

    shape: Shape
    """Form of the curve."""
    end: float | None = None
    """Last value."""
    steps: Count | None = None
    """Steps until that value."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.resolve()  # it checks its values itself
        return self

    def resolve(self) -> ExternalSchedule:
        return ExternalSchedule(self.shape, self.end, self.steps)


class AlgorithmConfig(Section):
    """A preset, and this run's changes to it. Keys that are left out keep the preset's value."""

    preset: str = "rlplus"
    """A published algorithm; docs/systems.md says what each one is."""
    objective: dict[Annotated[str, AfterValidator(_objective_field)], Any] = {}
    """Changes to the preset's objective: fields of rlplus.Objective."""
    reduction: Reduction | None = None
    """Normaliser of the loss, see rlplus.token_weights."""
    external_reduction: Reduction | None = None
    """Normaliser of demonstrations, with denominators of their own, see rlplus.Algorithm."""
    advantage: AdvantageEstimator | None = None
    """Estimator of advantages, see rlplus.batch_advantages."""
    advantage_k: Count | None = None
    """k of advantage "pass@k"."""
    normalize_std: bool | None = None
    """Whether advantages of "group" are divided by the group's standard deviation."""
    ratio_level: RatioLevel | None = None
    """Ratio of each token, or of each sequence (GSPO), see rlplus.Algorithm."""
    mismatch_level: MismatchLevel | None = None
    """Level of the weight that corrects for the engine's logprobs, see rlplus.Algorithm."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of sampled tokens, those of the highest entropy, that has a loss, see rlplus.Algorithm."""
    skip_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Skip an update whose gradient norm is above this, see rlplus.Algorithm; 0 = never."""
    reward_kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Coefficient of the KL penalty that is taken off the rewards of sampled tokens, see rlplus.Algorithm."""
    external_schedule: ExternalScheduleConfig | None = None
    """Course of external_coef over the steps."""
    recipe: dict[str, Any] = {}
    """Changes to the preset's recipe options; with `name`, another recipe. Options: rlplus.algorithm.options."""
    refill: dict[str, Any] | None = {}
    """Changes to the preset's options of rlplus.algorithm.Refill, or switches it on where the preset has none; null
    switches it off."""
    shaping: dict[str, Any] | None = {}
    """The same for rlplus.algorithm.Shaping."""

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
    def _check_options(self) -> Self:
        self.resolve()
        return self

    def _recipe(self) -> RecipeOptions:
        """The preset's recipe with this run's changes. ValueError for an unknown name or option."""
        preset = ALGORITHMS[self.preset].recipe
        changes = dict(self.recipe)
        name = changes.pop("name", recipe_name(preset))
        if name not in RECIPES:
            hint = f" (nearest: {near})" if (near := nearest(str(name), RECIPES)) else ""
            raise ValueError(f"recipe.name: want one of {', '.join(RECIPES)}; got {name!r}{hint}")
        base = preset if name == recipe_name(preset) else RECIPES[name]()
        return _with_changes(base, changes, "recipe", f"the recipe {name}")

    def _optional(self, name: str) -> Any:
        """The preset's optional options with this run's changes; the defaults with these changes if it has none."""
        preset, changes = getattr(ALGORITHMS[self.preset], name), getattr(self, name)
        if not changes:
            return None if changes is None else preset
        return _with_changes(preset or OPTIONAL[name](), changes, name, name)

    def resolve(self) -> Algorithm:
        """The algorithm to run: the preset with this section's changes. ValueError for invalid options."""
        preset = ALGORITHMS[self.preset]
        own = ("preset", "objective", "external_schedule", "recipe", *OPTIONAL)
        changed = {name: value for name, value in self if name not in own and value is not None}
        changed |= {name: self._optional(name) for name in OPTIONAL}
        if self.external_schedule is not None:
            changed["external_schedule"] = self.external_schedule.resolve()
        objective = replace(preset.objective, **self.objective)
        return replace(preset, objective=objective, recipe=self._recipe(), **changed)


def _with_changes(options: Options, changes: dict[str, Any], key: str, what: str) -> Options:
    """The options with these changes. ValueError, with the section's key, for an unknown name."""
    names = [field.name for field in fields(options)]
    for name in changes.keys() - set(names):
        near = nearest(name, names)
        hint = f"nearest: algorithm.{key}.{near}" if near else f"it has {', '.join(names) or 'none'}"
        raise ValueError(f"{key}.{name}: unknown option of {what}; {hint}")
    return replace(options, **changes)  # they check their values themselves
