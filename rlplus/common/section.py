"""The types that sections of a configuration are made of."""

import math
import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _one_group(pattern: str, named: str | None = None) -> str:
    """The pattern; ValueError unless it has one group, besides the one with that name, which it may have behind it."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"want a regular expression; got {pattern!r} ({error})") from error
    if compiled.groups != (2 if compiled.groupindex.get(named or "") == 2 else 1):
        wanted = f"exactly one group{f', and behind it perhaps a second one named {named}' if named else ''}"
        raise ValueError(f"want a regular expression with {wanted}; got {pattern!r} with {compiled.groups}")
    return pattern


MANY = 2**20  # more than any run has of what a process holds one by one: a step's responses, a layer's width

Count = Annotated[int, Field(ge=1, le=2**53)]  # exact as a float
Moderate = Annotated[int, Field(ge=1, le=MANY)]
NonNegative = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=2e6, allow_inf_nan=False)]  # timers overflow at 2^31 ms, 24 days
MIN_TEMPERATURE = 0.01  # vLLM raises a lower temperature to this one, and the logprobs would be another policy's
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, allow_inf_nan=False)]
GREEDY = 0.0  # a temperature of evaluations: the likeliest token
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Pattern = Annotated[str, AfterValidator(lambda pattern: _one_group(pattern))]
DemonstrationPattern = Annotated[str, AfterValidator(lambda pattern: _one_group(pattern, "answer"))]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
REFERENCE = r"[\w./-]+:\w+"  # "module:name" or "folder/file.py:name", as `rlplus.common.lazy.import_function` reads it
Reference = Annotated[str, Field(pattern=f"^{REFERENCE}$")]


def _greedy_or_more(temperature: float) -> float:
    if temperature != GREEDY and not MIN_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"want 0 (greedy) or at least {MIN_TEMPERATURE}; got {temperature:g}")
    return temperature


TemperatureOrGreedy = Annotated[float, AfterValidator(_greedy_or_more)]


class Section(BaseModel):
    """Unknown keys are errors, values are not converted, and nothing changes after loading.

    The text below a key is its documentation, here and in configs/schema.json.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), use_attribute_docstrings=True
    )
