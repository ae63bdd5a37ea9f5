"""`rollout.share_weights`: the trainer's own weights generate, and a run is the one whose engine has a copy of them."""

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import fail, same, torchrun
from pydantic import ValidationError
from torch import nn
from trainer_runs import metrics, run_config
from transformers import DynamicCache

from rlplus.train.config import Config
from rlplus.train.rollout import Request, Sampling
from rlplus.train.rollout.shared_engine import SharedEngine
from rlplus.train.trainer import open_run, train
from rlplus.train.trainer.loop import train_step

LORA = {"rank": 4, "alpha": 8.0}
NF4 = LORA | {"quantization": "nf4"}


def config_of(folder: Path, output: str, *, share: bool, steps: int = 3, lora: Any = None, **options: Any) -> Config:
    model = {"gradient_checkpointing": True, "dtype": options.pop("dtype", "float32"), "lora": lora}
    rollout = {"share_weights": share, "head_dtype": options.pop("head_dtype", "float32")}
    return run_config(folder, output, model=model, rollout=rollout, train={"steps": steps, "lr": 1e-2, **options})


def trained(folder: Path) -> list[dict[str, float]]:
    """Metrics but for the engine's last bits: where a weight begins in memory decides how its product is added up."""
    return [{name: value for name, value in row.items() if "mismatch" not in name} for row in metrics(folder)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "head_dtype": "model", "zero_stage": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_weights_are_trained_as_with_a_copy(tmp_path: Path, options: dict[str, Any]) -> None:
    """Bit for bit, also when it goes on with the other engine."""
    copied = train(config_of(tmp_path, "copied", share=False, **options))
    shared = train(config_of(tmp_path, "shared", share=True, **options))
    assert trained(shared) == trained(copied)
    assert same(shared, copied)
    gap = max(row["mismatch/mean"] for row in metrics(shared))
    assert gap < (1e-6 if options.get("dtype") != "bfloat16" else 1e-2)
    train(config_of(tmp_path, "changed", share=False, steps=2, **options))
    changed = train(config_of(tmp_path, "changed", share=True, **options), resume="newest")
    assert trained(changed) == trained(copied)
    assert same(changed, copied)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(LORA, marks=pytest.mark.slow),
        pytest.param(NF4, id="nf4"),
    ],
)
def test_adapters_are_trained_as_with_a_copy(tmp_path: Path, lora: dict[str, Any]) -> None:
    """Within the rounding of W x + B (A x), which a copy has as (W + B A) x; with equal bits before and after a pause,
    and with a new engine after a failure."""
    if "quantization" in lora:
        pytest.importorskip("bitsandbytes", reason="model.lora.quantization needs bitsandbytes, which is not installed")
    copied = metrics(train(config_of(tmp_path, "copied", share=False, lora=lora)))
    whole = train(config_of(tmp_path, "shared", share=True, lora=lora))
    rows = metrics(whole)
    assert max(row["mismatch/mean"] for row in rows) < 1e-5
    assert rows[-1]["actor/ratio_external_mean"] != rows[0]["actor/ratio_external_mean"]  # they have learnt something
    for row, other in zip(rows, copied, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    train(config_of(tmp_path, "parts", share=True, steps=2, lora=lora))
    with pytest.MonkeyPatch.context() as patch:
        calls = fail(patch, 1)
        parts = train(config_of(tmp_path, "parts", share=True, lora=lora), resume="newest")
    assert calls == [2]
    assert metrics(parts) == rows
    assert same(parts, whole)


def frozen(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what adapters do not train: weights of 4 bits with their scales, and all others."""
    weights = {name: p.detach().clone() for name, p in lm.named_parameters() if not p.requires_grad}
    states = {name: p.quant_state for name, p in lm.named_parameters() if hasattr(p, "quant_state")}
    return weights | {f"{name} scales": torch.cat([s.absmax.float(), s.state2.absmax]) for name, s in states.items()}


def test_bfloat16_adapters_train_on_weights_of_4_bits_that_stay(tmp_path: Path) -> None:
    """As the configuration for 24 GB has them. Forward passes in eval mode, the engine's, leave the weights, too."""
    pytest.importorskip("bitsandbytes", reason="model.lora.quantization needs bitsandbytes, which is not installed")
    with open_run(config_of(tmp_path, "run", share=True, lora=NF4, dtype="bfloat16")) as run:
        lm = run.policy.engine.module.lm
        before = frozen(lm)
        adapters = {name: p.detach().clone() for name, p in lm.named_parameters() if p.requires_grad}
        for _ in range(3):
            train_step(run)
        after, trained = frozen(lm), dict(lm.named_parameters())
    assert {before[name].dtype for name in before} == {torch.uint8, torch.bfloat16, torch.float32}
    assert len([name for name in before if name.endswith(" scales")]) == 7
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert len(adapters) == 14
    assert all(not torch.equal(adapter, trained[name]) for name, adapter in adapters.items())
    assert all(bool(trained[name].isfinite().all()) for name in adapters)
    rows = metrics(tmp_path / "run")
    assert all(math.isfinite(row["actor/loss"]) and row["actor/grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/mean"] for row in rows) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_train_as_with_copies(tmp_path: Path, stage: int) -> None:
    for share in (True, False):
        torchrun(config_of(tmp_path, f"{share}", share=share, zero_stage=stage))
    assert trained(tmp_path / "True") == trained(tmp_path / "False")
    assert same(tmp_path / "True", tmp_path / "False")


def test_nothing_but_the_weights_is_shared(tmp_path: Path) -> None:
    """After a generation: the mode, the attention and the head of training, and no keys and values."""
    with open_run(config_of(tmp_path, "run", share=True, lora=LORA, dtype="bfloat16")) as run:
        lm, engine = run.policy.engine.module.lm, run.engine.engine
        assert isinstance(engine, SharedEngine)
        twin = engine._model
        for kind in ("parameters", "buffers"):
            ours, theirs = (dict(getattr(each, f"named_{kind}")()) for each in (twin, lm))
            assert ours.keys() == theirs.keys()
            assert all(ours[name] is tensor for name, tensor in theirs.items())
        assert not {id(module) for module in twin.modules()} & {id(module) for module in lm.modules()}
        head, settings, rng = lm.get_output_embeddings().forward, lm.generation_config, torch.get_rng_state()
        ((first, _),) = engine.generate([Request([5, 9, 12], 2, 8)], Sampling(1.0, 3))
        assert lm.training
        assert not twin.training
        assert all(module.training for module in lm.modules())
        assert (lm.config._attn_implementation, twin.config._attn_implementation) == ("sdpa", "rlplus_sdpa")
        assert lm.get_output_embeddings().forward == head
        assert lm.generation_config is settings
        assert lm.is_gradient_checkpointing
        assert torch.equal(torch.get_rng_state(), rng)
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, DynamicCache)]
        with torch.no_grad():
            for name, parameter in lm.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        ((second, _),) = engine.generate([Request([5, 9, 12], 2, 8)], Sampling(1.0, 3))
        assert second.logprob != first.logprob, "the engine has what the trainer has by now"


def test_what_cannot_share_is_refused(tmp_path: Path) -> None:
    def refused(message: str, **sections: Any) -> None:
        with pytest.raises(ValidationError, match=message):
            run_config(tmp_path, **{"rollout": {"share_weights": True} | sections.pop("rollout", {})}, **sections)

    wanted = "share_weights: .*want engine transformers in mode colocated; got engine"
    refused(f"{wanted} vllm in mode colocated", rollout={"engine": "vllm"})
    refused(f"{wanted} auto in mode colocated", rollout={"engine": "auto"})
    refused(f"{wanted} transformers in mode process", rollout={"mode": "process"})
    server = {"engine": "vllm", "mode": "server", "server_url": "http://localhost:1"}
    refused(f"{wanted} vllm in mode server", rollout=server)
    refused("tensor_parallel_size 2 needs vLLM", rollout={"tensor_parallel_size": 2})
    refused("sleep is for vLLM", rollout={"sleep": True})
    refused(r"share_weights: ZeRO-3 .*want train\.zero_stage 1 or 2; got 3", train={"zero_stage": 3})
    refused("train.overlap generates while the policy trains", train={"overlap": 1})
    refused("rollout.push_timeout_s would have no effect, .*nothing is pushed", rollout={"push_timeout_s": 3.0})
