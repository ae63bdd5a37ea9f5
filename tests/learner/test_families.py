"""Packed sequences have the logits that each has alone; families in which they do not are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lms import EXPERT_FAMILIES, FAMILIES, config_of, make
from torch import Tensor
from trainer_runs import run_config

from rlplus.tools.plan import make_cluster, make_plan
from rlplus.train.data import MicroBatch
from rlplus.train.learner.packed_model import PackedModel
from rlplus.train.learner.pretrained import MIXES

CASES = [(family, changes) for family, changes, _ in FAMILIES]
ONE, OTHER = [5, 9, 12, 30], [31, 22, 8, 17]


def packed() -> MicroBatch:
    """Both sequences in one row, every position asked for."""
    ids = torch.tensor([ONE + OTHER])
    positions = torch.tensor([[*range(len(ONE)), *range(len(OTHER))]])
    n, value, index = ids.numel(), torch.zeros(ids.numel()), torch.zeros(ids.numel(), dtype=torch.int64)
    per_token = (torch.arange(n), index, value, value > 0, value, value, value, index)
    return MicroBatch(ids, positions, *per_token, tokens=n, lengths=((len(ONE), len(OTHER)),))


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, logit_softcap: float | None) -> Any:
    """The head, in place of the fused loss."""
    plain = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    return plain if logit_softcap is None else logit_softcap * torch.tanh(plain / logit_softcap)


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_packed_sequences_are_apart(family: str, changes: dict[str, Any]) -> None:
    model = make(family, changes)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in (ONE, OTHER)])
        both = [PackedModel(model, None, masks=masks)(packed(), logits) for masks in (True, False)]
    masked, apart = (float((together - alone).abs().max() / alone.abs().max()) for together in both)
    if model.config.model_type in MIXES:
        assert masked > 1e-2
    else:
        assert max(masked, apart) < 1e-5


def test_experts_are_those_with_experts() -> None:
    def has_experts(family: str, changes: dict[str, Any]) -> bool:
        return any("experts" in name for name, _ in make(family, changes).named_modules())

    assert {family for family, changes, _ in FAMILIES if has_experts(family, changes)} == EXPERT_FAMILIES


def test_a_family_that_mixes_them_is_refused(tmp_path: Path) -> None:
    config_of("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}).save_pretrained(tmp_path)
    config = run_config(tmp_path, model={"path": str(tmp_path), "scratch": None})
    with pytest.raises(ValueError, match=r"want a model that keeps packed sequences apart .*; got opt, whose"):
        make_plan(config, make_cluster(1, "24g"))
