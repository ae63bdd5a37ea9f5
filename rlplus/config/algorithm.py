"""The section about the algorithm: a preset, and what the run changes of it."""

from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from rlplus.config.base import Section
from rlplus.errors import nearest
from rlplus.objective import ALGORITHMS, Algorithm, Objective
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
    rlplus.Algorithm.
    """

    preset: str = "rlplus"
    objective: dict[Annotated[str, AfterValidator(_objective_field)], Any] = {}
    reduction: Reduction | None = None
    normalize_std: bool | None = None
    ratio_level: RatioLevel | None = None
    mismatch_level: MismatchLevel | None = None
    top_entropy: Annotated[float, Field(gt=0, le=1)] | None = None

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

    def resolve(self) -> Algorithm:
        """The algorithm to run: the preset with this section's changes."""
        preset = ALGORITHMS[self.preset]
        changed = {name: value for name, value in self if name not in ("preset", "objective") and value is not None}
        return replace(preset, objective=replace(preset.objective, **self.objective), **changed)
