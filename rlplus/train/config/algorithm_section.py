"""The section about the algorithm: a preset, and the run's changes to it."""

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticKnownError

from rlplus.common.errors import check_name, hint
from rlplus.common.section import Count, Section
from rlplus.loss import Objective
from rlplus.loss.objective.objective import AdvantageEstimator, Reduction
from rlplus.train.algorithm import (
    ALGORITHMS,
    RECIPES,
    Algorithm,
    AnyRecipe,
    ExternalSchedule,
    RecipeOptions,
    Refill,
    Shaping,
    recipe_options,
)
from rlplus.train.algorithm.external_schedule import Shape
from rlplus.train.algorithm.presets import MismatchLevel, RatioLevel
from rlplus.train.config.synonyms import synonym


def _unknown_key(name: str, section: str, names: Iterable[str]) -> ValueError:
    meant = synonym(name)
    return ValueError(f"unknown key{f'; {meant}' if meant else hint(name, names, f'algorithm.{section}.')}")


def _objective_field(name: str) -> str:
    names = [field.name for field in fields(Objective)]
    if name not in names:
        raise _unknown_key(name, "objective", names)
    return name


def _wrong(key: str, value: Any, error: ValueError) -> InitErrorDetails:
    """The error of a key of a section, for `ValidationError`."""
    return {"type": "value_error", "loc": (key,), "input": value, "ctx": {"error": error}}


class ExternalScheduleConfig(Section):
    """Course of external_coef over the steps, see rlplus.train.algorithm.ExternalSchedule."""

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
    """Changes to the preset's objective: fields of rlplus.Objective, whose defaults are preset rlplus's."""
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
    """Share of sampled tokens with a loss, highest entropy first, see rlplus.Algorithm."""
    external_top_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of demonstrated tokens whose advantage has a loss, highest entropy first; KL and entropy bonus: all."""
    skip_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Skip an update whose gradient norm is above this, see rlplus.Algorithm; 0 = never."""
    reward_kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Coefficient of the KL penalty that is taken off the rewards of sampled tokens, see rlplus.Algorithm."""
    external_schedule: ExternalScheduleConfig | None = None
    """Course of external_coef over the steps."""
    recipe: SerializeAsAny[RecipeOptions] = Field(default={}, validate_default=True)
    """Changes to the options of the preset's recipe; with `name` another recipe, or your own as file.py:Class, and
    changes to its defaults."""
    refill: Refill | None = Field(default={}, validate_default=True)
    """Changes to the preset's refill, or to the defaults where the preset has none; null switches it off."""
    shaping: Shaping | None = Field(default={}, validate_default=True)
    """Changes to the preset's shaping, or to the defaults where the preset has none; null switches it off."""

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, name: str) -> str:
        check_name("", name, ALGORITHMS)
        return name

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, changes: dict[str, Any]) -> dict[str, Any]:
        problems = []
        for name, value in changes.items():  # `Objective` checks its values itself
            try:
                Objective(**{name: value})
            except ValueError as error:
                text = re.sub(f"^want {name} (surrogate )?", "want ", str(error))
                problems.append(_wrong(name, value, ValueError(text)))
        if problems:
            raise ValidationError.from_exception_data("objective", problems)
        replace(Objective(), **changes)
        return changes

    @field_validator("recipe", mode="plain", json_schema_input_type=AnyRecipe)
    @classmethod
    def _whole_recipe(cls, changes: Any, info: ValidationInfo) -> RecipeOptions:
        """The preset's recipe with this run's changes, or the named one, checked by the class of its options."""
        if isinstance(changes, RecipeOptions) or "preset" not in info.data:
            return changes
        if not isinstance(changes, dict):
            raise PydanticKnownError("dict_type")
        preset = ALGORITHMS[info.data["preset"]].recipe
        name = changes.get("name", preset.name)
        try:
            kind = recipe_options(name)
        except ValueError as error:
            raise ValidationError.from_exception_data("recipe", [_wrong("name", name, error)]) from error
        try:
            return kind.model_validate((preset.model_dump() if name == preset.name else {}) | changes)
        except ValidationError as error:
            raise ValidationError.from_exception_data("recipe", [_named(e, kind) for e in error.errors()]) from error

    @field_validator("refill", "shaping", mode="before")
    @classmethod
    def _whole_options(cls, changes: Any, info: ValidationInfo) -> Any:
        """The preset's options with this run's changes; the defaults with these changes if it has none."""
        if not isinstance(changes, dict) or "preset" not in info.data:
            return changes
        preset = getattr(ALGORITHMS[info.data["preset"]], str(info.field_name))
        return (preset.model_dump() if preset else {}) | changes if changes else preset

    def resolve(self) -> Algorithm:
        """The algorithm to run: the preset with this section's changes."""
        preset = ALGORITHMS[self.preset]
        own = ("preset", "objective", "external_schedule", "refill", "shaping")
        changed = {name: value for name, value in self if name not in own and value is not None}
        if self.external_schedule is not None:
            changed["external_schedule"] = self.external_schedule.resolve()
        objective = replace(preset.objective, **self.objective)
        return replace(preset, objective=objective, refill=self.refill, shaping=self.shaping, **changed)


def _named(detail: Any, kind: type[RecipeOptions]) -> InitErrorDetails:
    """An error of a recipe's options, which for an unknown key says what is meant."""
    if detail["type"] != "extra_forbidden":
        return detail
    key = detail["loc"][0]
    error = _unknown_key(key, "recipe", kind.model_fields)
    if owners := [name for name, other in RECIPES.items() if key in other.model_fields]:
        error = ValueError(f"unknown key; it belongs to algorithm.recipe.name {' or '.join(owners)}")
    return _wrong(key, detail["input"], error)
