"""`rollout.lora: adapters`: a run whose engine gets adapters alone trains as one whose engine gets merged weights."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same, write_start
from peft import get_peft_model_state_dict
from pydantic import ValidationError
from torch import Tensor
from trainer_runs import metrics, run_config

import rlplus.train.rollout.vllm_engine
import rlplus.train.trainer.run_parts
from rlplus.train.config import Config
from rlplus.train.rollout import Adapters, make_engine
from rlplus.train.trainer import open_run, train
from rlplus.train.trainer.engine import NoEngine

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}
NUMBERS = 4 * ((32 + 32) + (32 + 32) + (32 + 64) + (64 + 32))  # A and B in `run_config`'s one layer


def config_of(folder: Path, output: str, form: str = "adapters", *, steps: int = 3, **train: Any) -> Config:
    rollout = {"engine": "vllm", "lora": form, "kv_cache_memory_mb": 16}
    options = {"steps": steps, "lr": 1e-2} | train
    return run_config(folder, output, model={"lora": LORA, "dtype": "float32"}, rollout=rollout, train=options)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs start no engine; what it would have been started with."""
    given: dict[str, Any] = {}

    def make(*_: Any, **settings: Any) -> NoEngine:
        given.clear()
        given.update(settings)
        return NoEngine()

    monkeypatch.setattr(rlplus.train.trainer.run_parts, "make_engine", make)
    return given


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_pushed_is_what_peft_would_write(tmp_path: Path, no_engine: dict[str, Any], stage: int) -> None:
    shard_all = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    with open_run(config_of(tmp_path, "run", zero_stage=stage, deepspeed=shard_all)) as run:
        lm, given = run.policy.engine.module.lm, no_engine["adapters"]
        pushed = {name: weight.clone() for name, weight in run.policy.pushed()}
        assert (given.rank, given.alpha) == (4, 8.0)
        assert {name: weight.shape for name, weight in pushed.items()} == given.shapes
        assert sum(weight.numel() for weight in pushed.values()) == NUMBERS
        if stage == 1:
            file = get_peft_model_state_dict(lm, save_embedding_layers=False)
            assert pushed.keys() == file.keys()
            assert all(torch.equal(pushed[name], weight) for name, weight in file.items())
        else:
            assert all(weight.abs().max() > 0 for name, weight in pushed.items() if "lora_A" in name)
    with open_run(config_of(tmp_path, "merged", "merged")) as run:
        assert "adapters" not in no_engine
        whole = {name: weight.shape for name, weight in run.policy.pushed()}
        assert whole == {name: weight.shape for name, weight in run.policy.weights()}
        assert not [name for name in whole if "lora" in name]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_is_that_with_merged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the rounding of W x + B (A x), and itself bit for bit after a pause; a push is of adapters alone."""
    push, sizes = rlplus.train.rollout.vllm_engine.VLLMEngine.push_weights, []

    def counted(engine: Any, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        def each() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                sizes[-1] += weight.nbytes
                yield name, weight

        sizes.append(0)
        push(engine, each(), version)

    monkeypatch.setattr(rlplus.train.rollout.vllm_engine.VLLMEngine, "push_weights", counted)
    merged = metrics(train(config_of(tmp_path, "merged", "merged")))
    assert min(sizes) > 10 * 4 * NUMBERS
    sizes.clear()
    whole = train(config_of(tmp_path, "whole"))
    assert sizes == [4 * NUMBERS] * 3
    rows = metrics(whole)
    assert 0 < max(row["mismatch/mean"] for row in rows) < 1e-6
    assert rows[-1]["actor/ratio_external_mean"] != rows[0]["actor/ratio_external_mean"]  # they have learnt something
    for row, other in zip(rows, merged, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    train(config_of(tmp_path, "parts", steps=2))
    parts = train(config_of(tmp_path, "parts"), resume="newest")
    assert metrics(parts) == rows
    assert same(parts, whole)


def test_what_adapters_alone_cannot_do_is_refused(
    tmp_path: Path, no_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, lora: Any = LORA, **rollout: Any) -> None:
        with pytest.raises(ValidationError, match=message):
            run_config(tmp_path, model={"lora": lora}, rollout={"engine": "vllm", "lora": "adapters"} | rollout)

    refused(r"rollout\.lora adapters wants model\.lora, which has them; got null", lora=None)
    nf4 = LORA | {"quantization": "nf4"}
    refused(r"lora adapters: .*vLLM 0\.32 has no nf4: want rollout\.lora merged; got .*nf4", lora=nf4)
    wanted = "lora adapters: vLLM applies them, in mode colocated or process: want that, or lora merged; got engine"
    refused(f"{wanted} transformers in mode process", engine="transformers", mode="process")
    refused(f"{wanted} vllm in mode server", mode="server", server_url="http://localhost:1")
    path = str(write_start(tmp_path / "start", tied=True))
    monkeypatch.setattr(rlplus.train.trainer.run_parts, "weights_fingerprint", lambda _: None)
    config = config_of(tmp_path, "run")
    model = config.model.model_copy(update={"scratch": None, "path": path})
    with pytest.raises(ValueError, match=r"rollout\.lora adapters: want model\.path with safetensors"):
        train(config.model_copy(update={"model": model}))
    monkeypatch.setattr("rlplus.train.config.rollout_section.find_spec", lambda name: None)
    auto = config.rollout.model_copy(update={"engine": "auto"})
    tokens = {"max_model_len": 8, "end_ids": [0], "pad_token_id": 0}
    with pytest.raises(ValueError, match=r"rollout\.lora: vLLM is not installed"):
        make_engine(auto, "-", dtype="float32", seed=0, adapters=Adapters(4, 8.0, {}), **tokens)
