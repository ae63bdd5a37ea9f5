"""LoRA on both pretrained models in bf16: a step with demonstrations, push to vLLM, the written model, and its eval."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from real_models import QWEN, SMOLLM2, real_model
from real_runs import FAR, NEAR, Text, evaluate, init, load, logprobs, sampled, short_run
from safetensors.torch import load_file
from torch import Tensor

from rlplus.train.trainer import open_run
from rlplus.train.trainer.loop import train_step

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
RANK, ALPHA = 8, 16.0


class Adapted(NamedTuple):
    """A run of one step, which wrote its model.

    texts, engine: responses sampled with the adapters, and the engine's logprobs of their tokens.
    """

    model: str
    written: Path
    metrics: dict[str, float]
    adapters: dict[str, Tensor]
    texts: list[Text]
    engine: Tensor


@pytest.fixture(scope="module", params=[(SMOLLM2, "adapters"), (QWEN, "merged")], ids=lambda case: "-".join(case))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    name, form = request.param
    model, folder = real_model(name), tmp_path_factory.mktemp("adapters")
    file = init(folder, model, 4, f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}")
    sizes = {"rollout__max_response_length": 32, "rollout__lora": form, "train__lr": 5e-3}
    config = short_run(file, folder / "run", **sizes, train__prompts_per_step=2, train__steps=1)
    with open_run(config) as run:
        train_step(run)
        run.engine.sync(1, probe=True)
        adapters = {name: weight.clone() for name, weight in run.policy.trained()}
        texts, engine = sampled(run, seed=5)
        run.conclude()
    row = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    yield Adapted(model, folder / "run/model", row, adapters, texts, engine)
    shutil.rmtree(folder)  # a gigabyte


def test_the_step_trains_on_rollouts_and_demonstrations(adapted: Adapted) -> None:
    assert adapted.metrics["actor/updated"] == 1
    assert adapted.metrics["actor/grad_norm"] > 0
    assert adapted.metrics["reward/external"] == 1
    assert 0 < adapted.metrics["mismatch/mean"] < 0.1


def test_the_written_model_has_the_adapters_in_its_weights(adapted: Adapted) -> None:
    """W + alpha / rank B A by float64, within the roundings of bf16; all other weights have the same bits."""
    written = load_file(adapted.written / "model.safetensors")
    base = load_file(Path(adapted.model) / "model.safetensors")
    assert written.keys() == base.keys()
    modules = {name.rpartition(".lora_")[0] for name in adapted.adapters}
    eps = torch.finfo(torch.bfloat16).eps
    for name, old in base.items():
        module = next((m for m in modules if m.endswith(name.removesuffix(".weight"))), None)
        if module is None:
            assert torch.equal(written[name], old), name
            continue
        A, B = (adapted.adapters[f"{module}.lora_{side}.weight"].double() for side in "AB")
        wanted, terms = old.double() + ALPHA / RANK * B @ A, ALPHA / RANK * B.abs() @ A.abs()
        assert ((written[name].double() - wanted).abs() <= eps * (wanted.abs() + 4 * terms)).all(), name
        assert not torch.equal(written[name], old), name
    assert len(modules) * 2 == len(adapted.adapters)


def test_the_engine_has_the_adapters(adapted: Adapted) -> None:
    """Its logprobs are the written model's within its own rounding, and not the base model's."""
    narrow, wide = (logprobs(load(adapted.written, dtype), adapted.texts) for dtype in ("bfloat16", "float32"))
    rounding, gap = (narrow - wide).abs().mean(), (adapted.engine - narrow).abs().mean()
    stale = (adapted.engine - logprobs(load(adapted.model, "bfloat16"), adapted.texts)).abs().mean()
    assert gap < NEAR * rounding
    assert stale > FAR * rounding


def test_qwen_solves_problems_in_eval(qwen: str, tmp_path: Path) -> None:
    found = evaluate(qwen, tmp_path, problems=4, samples=2, tokens=200)
    assert sum(found.statuses.values()) == 8
    assert found.file["correct"] == found.correct
    assert sum(found.correct) > 0
