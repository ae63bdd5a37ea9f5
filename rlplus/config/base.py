"""What the sections of a configuration are made of."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]


class Section(BaseModel):
    """Unknown keys are errors, values are not converted, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
