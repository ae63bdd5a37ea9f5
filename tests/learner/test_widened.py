"""Layers that compute in a wider dtype for a while: the same hidden states as the model converted as a whole."""

import copy
from typing import Any

import pytest
import torch
from causal_lms import FAMILIES, make
from torch import Tensor

from rlplus.loss.head.causal_lm import body_of
from rlplus.train.config import LoraConfig
from rlplus.train.learner.adapters import add_adapters
from rlplus.train.learner.widened import widened

CASES = [(family, changes) for family, changes, _ in FAMILIES if family != "Mamba"]
IDS = torch.arange(3, 43)[None]
# These keep some rounding: experts and convolutions compute in the model's dtype, and embeddings are scaled in it.
PARTLY = {"Mixtral", "GraniteMoe", "GptOss", "Llama4", "FalconH1", "RecurrentGemma", "MiniCPM3"}
PARTLY |= {family for family, _ in CASES if "Gemma" in family}


@torch.no_grad()
def states(lm: Any) -> Tensor:
    hidden: Tensor = body_of(lm)(input_ids=IDS, use_cache=False).last_hidden_state
    return hidden.double()


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_hidden_states_are_those_of_the_converted_model(family: str, changes: dict[str, Any]) -> None:
    lm = make(family, changes).bfloat16()
    before = {name: (p, p.data.clone()) for name, p in lm.named_parameters()}
    exact, rounded = states(copy.deepcopy(lm).float()), states(lm)
    with widened(lm):
        wide = states(lm)
    off, rounding = (wide - exact).norm(), (rounded - exact).norm()
    assert off <= (0.5 if family in PARTLY else 1e-2) * rounding
    assert all(p is before[name][0] and torch.equal(p, before[name][1]) for name, p in lm.named_parameters())
    assert torch.equal(states(lm), rounded)
    assert not any("forward" in vars(module) for module in lm.modules())


def test_adapters_and_float32() -> None:
    lm = make("Qwen2", {}).float()
    add_adapters(lm, LoraConfig(rank=4), seed=0)
    exact, rounded = states(copy.deepcopy(lm).double()), states(lm)
    with widened(lm):
        wide = states(lm)
    assert (wide - exact).norm() < 0.7 * (rounded - exact).norm()  # transformers' RMSNorm computes in float32 itself


def test_a_layer_whose_parts_need_one_dtype_says_so() -> None:
    lm = make("Mamba", {"state_size": 4, "expand": 2}).bfloat16()
    with pytest.raises(RuntimeError, match="dtype"), widened(lm):
        states(lm)


def test_the_model_is_as_before_after_an_error() -> None:
    lm = make("Llama", {}).bfloat16()
    with pytest.raises(IndexError), widened(lm):
        lm(input_ids=torch.tensor([[10**6]]))
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    assert not any("forward" in vars(module) for module in lm.modules())
