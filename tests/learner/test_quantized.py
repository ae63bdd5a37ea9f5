"""Training adapters on a base of 4 bits (QLoRA): the law that it trains a plain model of the dequantized weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlplus.train.config import Config, LoraConfig
from rlplus.train.learner.adapters import add_adapters, dequantized, merged_weights, quantize, without_adapters
from rlplus.train.trainer import open_run, run_parts, train

pytest.importorskip("bitsandbytes", reason="model.lora.quantization needs bitsandbytes, which is not installed")
LORA = {"rank": 4, "alpha": 8.0, "quantization": "nf4"}
CPU = torch.device("cpu")


def a_base(tmp_path: Path) -> Any:
    with open_run(run_config(tmp_path, "base")) as run:
        return AutoModelForCausalLM.from_pretrained(run.folder.path / "scratch")


def moved(lm: nn.Module) -> None:
    """Give B, which starts at 0, other values."""
    torch.manual_seed(7)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape))


def through_nf4(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))


def plain_twin(base: Any, dtype: torch.dtype) -> Any:
    """The same adapters on a plain model, whose linear weights are what NF4 left of the base's."""
    twin = copy.deepcopy(base)
    for module in twin.modules():
        if type(module) is nn.Linear and module is not twin.get_output_embeddings():
            module.weight.data = through_nf4(module.weight.data)
    add_adapters(twin, LoraConfig(rank=4, alpha=8.0), 0)
    moved(twin)
    return twin.to(dtype)


def quantized_model(base: Any) -> Any:
    lm = copy.deepcopy(base)
    quantize(lm, CPU)
    add_adapters(lm, LoraConfig(rank=4, alpha=8.0), 0)
    moved(lm)
    return lm


def loss_and_gradients(lm: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(18).view(2, 9) * 7 % 250
    logits = lm(ids).logits  # transformers' own loss is fp32
    loss = -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).double().mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_those_of_the_dequantized_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """As near to float64 as a plain model of these weights in the same dtype; the base in between is another model."""
    base = a_base(tmp_path).to(dtype)
    exact, plain = (loss_and_gradients(plain_twin(base, d)) for d in (torch.float64, dtype))
    ours = loss_and_gradients(quantized_model(base))
    assert ours[1].keys() == exact[1].keys()
    assert all(".lora_" in name for name in ours[1])
    assert len(ours[1]) == 14
    eps = torch.finfo(dtype).eps
    assert abs(ours[0] - exact[0]) <= 2 * abs(plain[0] - exact[0]) + 8 * eps * exact[0]
    for name, want in exact[1].items():
        error, error_of_plain = ((got[1][name].double() - want).norm() for got in (ours, plain))
        assert error <= 2 * error_of_plain + 8 * eps * want.norm(), name
    unquantized = copy.deepcopy(base).double()
    add_adapters(unquantized, LoraConfig(rank=4, alpha=8.0), 0)
    moved(unquantized)
    assert abs(loss_and_gradients(unquantized)[0] - exact[0]) > 10 * abs(ours[0] - exact[0])


def test_what_is_frozen_and_what_is_pushed(tmp_path: Path) -> None:
    """4.127 bits of a weight and tables of a fixed size; embeddings, norms and the head as they were."""
    base = a_base(tmp_path)
    lm, twin = quantized_model(base), plain_twin(base, torch.float32)
    assert type(lm.get_output_embeddings()) is nn.Linear
    assert torch.equal(lm.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == {
        name for name, _ in lm.named_parameters() if ".lora_" in name
    }
    pushed, wanted = ({name: value() for name, _, value in merged_weights(model)} for model in (lm, twin))
    assert pushed.keys() == wanted.keys() == dict(base.named_parameters()).keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(pushed[name], weight, rtol=1e-6, atol=1e-6, msg=name)
    ids = torch.arange(9)[None]
    with without_adapters(lm), without_adapters(twin):
        torch.testing.assert_close(lm(ids).logits, twin(ids).logits, rtol=1e-5, atol=1e-5)
    large = nn.Module()
    large.layer, large.head = nn.Linear(1024, 1024, bias=False), nn.Linear(1, 1)
    large.get_output_embeddings = large.get_input_embeddings = lambda: large.head
    quantize(large, CPU)  # type: ignore[arg-type]
    state = large.layer.weight.quant_state
    parts = (large.layer.weight, state.absmax, state.state2.absmax)
    assert 8 * sum(p.numel() * p.element_size() for p in parts) / 2**20 == pytest.approx(4.127, abs=1e-3)
    assert dequantized(large.layer.weight).shape == (1024, 1024)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    base = a_base(tmp_path)
    with torch.no_grad():
        base.model.layers[0].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"got NaN or infinity in parameter model.layers.0.mlp.up_proj.weight"):
        quantize(base, CPU)


def with_steps(config: Config, steps: int, output: Path) -> Config:
    section = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": section, "output_dir": str(output)})


@pytest.mark.parametrize(
    "options", [{"zero_stage": 1}, pytest.param({"zero_stage": 2, "offload_optimizer": "cpu"}, marks=pytest.mark.slow)]
)
def test_a_run_is_resumed_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """A checkpoint has adapters alone; the exported model is the dequantized base plus what they learnt."""
    algorithm = {"preset": "rlplus", "objective": {"kl_coef": 0.1}}
    model = {"lora": LORA, "gradient_checkpointing": True}
    config = run_config(tmp_path, model=model, train=options, algorithm=algorithm)
    whole = train(with_steps(config, 3, tmp_path / "whole"))
    train(with_steps(config, 2, tmp_path / "parts"))
    parts = train(with_steps(config, 3, tmp_path / "parts"), resume="newest")
    rows = metrics(whole)
    assert rows == metrics(parts)
    assert max(row["mismatch/mean"] for row in rows) < 1e-5  # rollouts are sampled from the model that is trained
    first, second = (load_file(folder / "model/model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = load_file(whole / "scratch/model.safetensors")
    assert first.keys() == start.keys()
    for name, weight in first.items():
        if "_proj.weight" in name:
            learnt = weight - through_nf4(start[name])
            assert torch.linalg.matrix_rank(learnt, atol=1e-5) == 4, name  # the adapters' rank
        else:
            assert torch.equal(weight, start[name]), name
    (shard,) = (parts / "checkpoints/step-000003/policy").glob("*model_states.pt")
    names = torch.load(shard, weights_only=False)["module"]
    assert names
    assert all(".lora_" in name for name in names)
    assert "quantization_config" not in (whole / "model/config.json").read_text()


@pytest.mark.parametrize(
    ("train_options", "message"),
    [({"zero_stage": 3}, r"want train\.zero_stage 1 or 2; got 3"), ({"compile": True}, r"want train\.compile false")],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, train_options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=f"model.lora.quantization: .*{message}"):
        run_config(tmp_path, model={"lora": LORA}, train=train_options)


def test_what_cannot_be_recognized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes reads the base again, and must know that it is the same."""
    with open_run(run_config(tmp_path, "plain")) as run:
        run.tokenizer.save_pretrained(tmp_path / "model")
        AutoModelForCausalLM.from_pretrained(run.folder.path / "scratch").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(run_parts, "weights_fingerprint", lambda _: None)
    model = {"lora": LORA, "scratch": None, "path": str(tmp_path / "model")}
    with pytest.raises(ValueError, match=r"quantization: want model.path with safetensors"):
        train(run_config(tmp_path, model=model))


def test_without_bitsandbytes_the_run_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.learner.adapters.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package bitsandbytes, .*: pip install -e \"\.\[qlora\]\""):
        train(run_config(tmp_path, model={"lora": LORA}))


def test_a_mixture_whose_experts_would_stay_whole_is_refused() -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
    lm = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, **sizes, **experts))
    with pytest.raises(
        ValueError, match=r"mostly in linear layers .*; got Qwen3MoeForCausalLM with model\.layers\.0\.mlp\."
    ):
        quantize(lm, CPU)
