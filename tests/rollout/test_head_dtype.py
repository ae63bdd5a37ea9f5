"""`rollout.head_dtype`: an engine's logits in fp32, as the trainer's are, of a model in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import EOS, MAX_MODEL_LEN, PAD, save, tiny_model
from torch import nn

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import Request, Sampling, make_engine
from rlplus.train.rollout.transformers_engine import _multiply_in_fp32

PROMPT, TEMPERATURE = [5, 9, 12], 2.0  # the highest that vLLM takes


def first_logprobs(folder: Path, **options: Any) -> dict[int, float]:
    """The tokens that an engine drew after PROMPT, with their logprobs."""
    config = RolloutConfig(max_response_length=1, kv_cache_memory_mb=16, **options)
    lengths = {"max_model_len": MAX_MODEL_LEN, "end_ids": [EOS], "pad_token_id": PAD}
    engine = make_engine(config, str(folder), dtype="bfloat16", seed=0, **lengths)
    try:
        (group,) = engine.generate([Request(PROMPT, 64, 1)], Sampling(temperature=TEMPERATURE, seed=1))
    finally:
        engine.close()
    return {completion.tokens[0]: completion.logprob[0] for completion in group}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits bfloat16 rounds, of the larger ones to multiples of 1/32."""
    model = tiny_model(tied=False).bfloat16()
    model.lm_head.weight.data *= 2
    save(model, path := tmp_path_factory.mktemp("model"))
    return path


@pytest.mark.parametrize(
    "engine",
    ["transformers", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm])],
)
def test_logits_are_not_rounded_unless_asked(folder: Path, engine: str) -> None:
    """Differences of rounded logits are multiples of a 256th of the least power of 2 that is in them."""
    rounded = {}
    for head in ("float32", "model"):
        found = list(first_logprobs(folder, engine=engine, head_dtype=head).values())
        steps = (torch.tensor(found, dtype=torch.float64) - found[0]) * TEMPERATURE * 2**10
        assert len(found) > 8
        rounded[head] = float(((steps - steps.round()).abs() < 0.05).double().mean())
    assert rounded["model"] == 1.0
    assert rounded["float32"] < 0.5


def test_logprobs_are_those_of_float64(folder: Path) -> None:
    model = type(tiny_model(tied=False)).from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        logits = model.lm_head.weight.double() @ hidden.double() / TEMPERATURE
    want = logits.log_softmax(dim=-1)
    gaps = {}
    for head in ("float32", "model"):
        found = first_logprobs(folder, engine="transformers", head_dtype=head)
        gaps[head] = max(abs(value - float(want[token])) for token, value in found.items())
    assert gaps["float32"] < 1e-5
    assert gaps["model"] > 1e-3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (0, 5)])
def test_the_head_in_fp32_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    head, hidden = nn.Linear(5, 7, bias=bias).bfloat16(), torch.randn(shape).bfloat16()
    want = nn.functional.linear(
        hidden.double(), head.weight.double(), None if head.bias is None else head.bias.double()
    )
    _multiply_in_fp32(head)
    got = head(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_a_head_of_another_kind_is_refused() -> None:
    class Scaled(nn.Linear): ...

    with pytest.raises(ValueError, match=r"head_dtype float32 wants .* nn.Linear; got Scaled: want model"):
        _multiply_in_fp32(Scaled(2, 2))
