"""The plan of each family: an exact number of parameters, and activations that grow with the tokens."""

from typing import Any

import pytest
from causal_lms import FAMILIES, UNPLANNED, config_of, make

from rlplus.tools.plan.activations import count_activations, meta_model

PLANNED = [(f"{i}-{family}", family, changes) for i, (family, changes, _) in enumerate(FAMILIES) if family != "Mpt"]


@pytest.mark.parametrize(("family", "changes"), [one[1:] for one in PLANNED], ids=[one[0] for one in PLANNED])
def test_parameters_and_activations(family: str, changes: dict[str, Any]) -> None:
    lm = meta_model(config_of(family, changes), "bfloat16")
    assert sum(p.numel() for p in lm.parameters()) == sum(p.numel() for p in make(family, changes).parameters())
    if family in UNPLANNED:
        with pytest.raises(RuntimeError):
            count_activations(lm, rows=1, length=16, attention="sdpa", checkpointing=False)
        return
    small, large = (
        count_activations(lm, rows=1, length=length, attention="sdpa", checkpointing=False) for length in (16, 32)
    )
    assert 0 < small.head < large.head
    assert small.head < small.backward < large.backward
