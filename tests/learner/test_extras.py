"""Options of model and trainer: LoRA, offloading, compilation, and the refusal of attention that would leak."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from trainer_runs import metrics, run_config
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma2Config, Lfm2Config, Lfm2ForCausalLM

from rlplus.train import checkpoint
from rlplus.train.config import Config, ScratchModel
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.adapters import add_adapters, merged_weights, without_adapters
from rlplus.train.learner.pretrained import _apply_liger, make_scratch_model, weights_fingerprint
from rlplus.train.learner.sequence import SequenceGroup
from rlplus.train.recipe import set_advantages
from rlplus.train.trainer import open_run, run_parts, train

LORA = {"rank": 4, "alpha": 8.0}


def causal_over_all(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    """A kernel that ignores packed sequences."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None


def only_itself(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return v.transpose(1, 2), None


@pytest.mark.parametrize(
    ("attention", "message"), [(causal_over_all, "see each other"), (only_itself, "do not see their own past")]
)
def test_attention_that_leaks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: Callable[..., Any], message: str
) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attention)
    with pytest.raises(ValueError, match=f"packed sequences {message} under model.attention=sdpa with this model"):
        train(run_config(tmp_path))


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused(tmp_path: Path) -> None:
    """Lfm2's convolutions run over the borders of packed sequences, whatever the attention."""
    config = run_config(tmp_path)
    with open_run(config) as run:
        run.tokenizer.save_pretrained(tmp_path / "lfm2")
        vocabulary = len(run.tokenizer)
    model = Lfm2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], initializer_range=0.3,
    )  # fmt: skip
    Lfm2ForCausalLM(model).save_pretrained(tmp_path / "lfm2")
    wanted = config.model.model_copy(update={"path": str(tmp_path / "lfm2"), "scratch": None})
    with pytest.raises(ValueError, match="packed sequences see each other"):
        train(config.model_copy(update={"model": wanted, "output_dir": str(tmp_path / "b")}))


def test_what_cannot_run_here_is_refused_by_name(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"model\.liger needs CUDA"):
            train(run_config(tmp_path, "a", model={"liger": True}))
        with pytest.raises(ValueError, match="flash_attention_2 needs the package flash-attn"):
            train(run_config(tmp_path, "b", model={"attention": "flash_attention_2", "dtype": "bfloat16"}))
    with pytest.raises(ValueError, match=r"want train\.sequence_parallel a divisor of the 1 ranks; got 2"):
        train(run_config(tmp_path, "c", train={"sequence_parallel": 2}))


def test_sequence_parallelism_of_sliding_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="want a model without sliding windows; got gemma2 with some"):
        SequenceGroup(2, Gemma2Config(num_attention_heads=4, num_key_value_heads=2), "sdpa")


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"offload_params": "cpu"}, "offload_params needs weights in shards: want zero_stage 3; got 1"),
        ("train", {"deepspeed": {"zero_optimization": {"stage": 3}}}, "want it from zero_stage 1; got 3"),
        ("train", {"offload_optimizer": "nvme"}, "train.offload_optimizer"),
        ("train", {"compile": True, "zero_stage": 3}, "compile does not go with the hooks of ZeRO-3"),
        ("train", {"tokens_per_micro_batch": 7, "sequence_parallel": 2}, r"got 7 on each of 2 ranks"),
        (
            "train",
            {"deepspeed": {"gradient_accumulation_steps": 4}},
            "deepspeed.gradient_accumulation_steps: leave it out",
        ),
        ("train", {"deepspeed": {"optimizer": {"type": "Adam"}}}, "deepspeed.optimizer: leave it out"),
        (
            "train",
            {"shard_head": True},
            "shard_head: want zero_stage 3 and .*; got zero_stage 1, backend auto",
        ),
        ("train", {"shard_head": True, "zero_stage": 3, "backend": "reference"}, "backend reference "),
        ("model", {"lora": {"rank": 0}}, "model.lora.rank"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, section: str, values: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_config(tmp_path, **{section: values})


def test_liger_gets_the_layers_and_never_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    liger: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": lambda **options: asked.append(options)}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, liger.__name__, liger)
    monkeypatch.setattr("rlplus.train.learner.pretrained.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lm = make_scratch_model(ScratchModel(), byte_tokenizer(), 0)
    _apply_liger(lm)
    (options,) = asked
    assert options.pop("model") is lm
    assert {name for name, on in options.items() if on} == {"rope", "rms_norm", "swiglu"}
    assert {"cross_entropy", "fused_linear_cross_entropy"} <= options.keys()  # Liger's own default is on
    lm.config.model_type = "nobody"
    with pytest.raises(ValueError, match=r"want a model type that Liger knows \(qwen2\); got nobody"):
        _apply_liger(lm)


def test_sequence_parallelism_refuses_eager_attention(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"sequence_parallel wants model\.attention sdpa or flash_attention_2"):
        run_config(tmp_path, model={"attention": "eager"}, train={"sequence_parallel": 2})


def test_sequence_parallelism_lets_longer_sequences_in(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"want train\.tokens_per_micro_batch at least that; got 8"):
        run_config(tmp_path, train={"tokens_per_micro_batch": 8})
    run_config(tmp_path, train={"tokens_per_micro_batch": 8, "sequence_parallel": 2})


# LoRA


def test_merged_weights_are_those_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    with open_run(run_config(tmp_path)) as run:
        path = str(run.folder.path / "scratch")
        settings = run_config(tmp_path, model={"lora": LORA | {"target_modules": ["q_proj", "down_proj"]}}).model.lora
        assert settings is not None
    ours = AutoModelForCausalLM.from_pretrained(path)
    add_adapters(ours, settings, 0)
    adapters = {name: torch.randn_like(p) for name, p in ours.named_parameters() if ".lora_" in name}
    assert len(adapters) == 4
    ours.load_state_dict(adapters, strict=False)
    peft = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        LoraConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "down_proj"]),
    )
    found = peft.load_state_dict({f"base_model.model.{name}": value for name, value in adapters.items()}, strict=False)
    assert not found.unexpected_keys
    want = dict(peft.merge_and_unload().named_parameters())
    got = {name: value() for name, _, value in merged_weights(ours)}
    assert got.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight.detach(), rtol=1e-6, atol=1e-6, msg=name)
    plain = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(9)[None]
    with without_adapters(ours):
        torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=0, atol=0)
    assert not torch.allclose(ours(ids).logits, plain(ids).logits, atol=1e-2)


def test_lora_refuses_head_and_embeddings(tmp_path: Path) -> None:
    config = run_config(tmp_path, model={"lora": LORA | {"target_modules": ["q_proj", "lm_head"]}})
    with pytest.raises(ValueError, match=r"target_modules: want no embeddings and no head; got lm_head"):
        train(config)


def with_steps(config: Config, steps: int, output: Path) -> Config:
    section = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": section, "output_dir": str(output)})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({"lora": LORA}, {"zero_stage": 1}),
        pytest.param({"lora": LORA}, {"zero_stage": 3}, marks=pytest.mark.slow),
        ({}, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
        pytest.param({}, {"zero_stage": 2, "offload_optimizer": "cpu"}, marks=pytest.mark.slow),
    ],
    ids=["lora", "lora-zero3", "offload-zero3", "offload-zero2"],
)
def test_resume_is_bitwise_with(tmp_path: Path, model: dict[str, Any], options: dict[str, Any]) -> None:
    """And with adapters the run's model is the base plus what they learnt."""
    config = run_config(tmp_path, model=model, train=options)
    whole = train(with_steps(config, 3, tmp_path / "whole"))
    train(with_steps(config, 2, tmp_path / "parts"))
    parts = train(with_steps(config, 3, tmp_path / "parts"), resume="newest")
    assert metrics(whole) == metrics(parts)
    first, second = (load_file(folder / "model/model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = load_file(whole / "scratch/model.safetensors")
    assert first.keys() == start.keys()
    still = {name for name in first if torch.equal(first[name], start[name])}
    assert still == ({name for name in first if "_proj.weight" not in name} if model else set())
    assert AutoModelForCausalLM.from_pretrained(whole / "model").num_parameters() == sum(
        w.numel() for w in start.values()
    )
    if model:
        assert_adapters_only(parts / "checkpoints/step-000003/policy")


@pytest.mark.parametrize(
    ("lost", "message"), [("head.weight", None), ("adapter.weight", "adapter.weight differ"), (None, "more differ")]
)
def test_only_what_trains_must_be_in_a_checkpoint(lost: str | None, message: str | None) -> None:
    """The frozen weight has two names, as a tied head has."""
    frozen = nn.Linear(2, 3, bias=False).requires_grad_(False)
    model = nn.ModuleDict({"adapter": nn.Linear(2, 2, bias=False), "embeddings": frozen, "head": frozen})
    with checkpoint._without_frozen(model):
        saved = model.state_dict()
    assert saved.keys() == {"adapter.weight"}
    assert len(model.state_dict()) == 3
    saved = {name: weight + 1 for name, weight in saved.items() if name != lost} | (
        {} if lost else {"more": torch.ones(1)}
    )
    before = frozen.weight.clone()
    with nullcontext() if message is None else pytest.raises(ValueError, match=f"want the weights of .*; {message}"):
        checkpoint.load_weights(saved, model)
        assert torch.equal(model["adapter"].weight, saved["adapter.weight"])
    assert torch.equal(frozen.weight, before)


@pytest.mark.slow
def test_frozen_weights_are_kept_where_the_model_cannot_be_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_config(tmp_path, "plain")
    with open_run(plain) as run:
        run.tokenizer.save_pretrained(tmp_path / "model")
        AutoModelForCausalLM.from_pretrained(run.folder.path / "scratch").save_pretrained(tmp_path / "model")
    model = {"lora": LORA, "scratch": None, "path": str(tmp_path / "model")}
    for name, fingerprint in (("known", weights_fingerprint), ("unknown", lambda _: None)):
        monkeypatch.setattr(run_parts, "weights_fingerprint", fingerprint)
        folder = train(with_steps(run_config(tmp_path, name, model=model), 1, tmp_path / name))
        shards = folder / "checkpoints/step-000001/policy/mp_rank_00_model_states.pt"
        names = torch.load(shards, weights_only=False)["module"]
        assert all(".lora_" in key for key in names) == (name == "known")


def assert_adapters_only(shards: Path) -> None:
    """The rest is in the model's own files."""
    states = [torch.load(file, weights_only=False) for file in shards.glob("*model_states.pt")]
    names = {name for state in states for name in state["module"]}
    assert names
    assert all(".lora_" in name for name in names)
    assert not any(state["frozen_param_fragments"] for state in states)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_no_rank_keeps_a_frozen_weight_whole(tmp_path: Path, checkpointing: bool) -> None:
    """Also where layers are checkpointed: DeepSpeed gathers their frozen weights again in the backward pass."""
    from update_cases import batch_of_samples, packed

    whole = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    model = {"lora": LORA, "gradient_checkpointing": checkpointing}
    with open_run(run_config(tmp_path, model=model, train={"zero_stage": 3, "deepspeed": whole})) as run:
        samples, weights = batch_of_samples(), [*run.policy.engine.module.parameters()]
        set_advantages(samples, run.recipe.algorithm)
        batches = packed(run, samples)
        kept: list[int] = []

        def look() -> None:
            kept.append(sum(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in weights))

        run.policy.backward(batches, run.policy.loss_of(run.recipe.algorithm.objective), look)
        look()
        assert kept == [0] * (len(batches) + 1)
        assert len(batches) > 2
        assert not all(weight.requires_grad for weight in weights)


# Offloading, compilation


@pytest.mark.slow
def test_compiled_layers_compute_the_same(tmp_path: Path) -> None:
    def first_update(**options: Any) -> tuple[float, dict[str, torch.Tensor]]:
        config = run_config(tmp_path, f"run{len(options)}", train=options)
        with open_run(config) as run:
            from update_cases import batch_of_samples, packed

            samples = batch_of_samples()
            set_advantages(samples, run.recipe.algorithm)
            batches = packed(run, samples)
            assert len({batch.input_ids.shape for batch in batches}) > 1
            run.policy.backward(batches, run.policy.loss_of(run.recipe.algorithm.objective))
            applied = run.policy.step()
            assert applied
            compiled = [m for m in run.policy.engine.module.modules() if m._compiled_call_impl is not None]
            assert len(compiled) == (1 if options else 0)
            norm = run.policy.grad_norm
            assert norm is not None
            return norm, {name: p.clone() for name, p in run.policy.weights()}

    plain, weights = first_update()
    compiled, same = first_update(compile=True)
    assert compiled == pytest.approx(plain, rel=1e-5)
    for name, weight in weights.items():
        assert ((same[name] - weight).abs() < 2e-6).float().mean() > 0.99  # a gradient of rounding noise has any sign
