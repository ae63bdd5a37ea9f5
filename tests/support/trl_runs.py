"""Runs of TRL's GRPOTrainer on a tiny model, the same up to rounding whatever computes the logprobs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlplus.train.data import byte_tokenizer

PROMPTS = ["2+2=", "one, two,", "abc", "?"]
DEMONSTRATIONS = ["4", "three", "def", None]
SHOWN = {
    *("loss", "grad_norm", "entropy", "kl", "reward", "policy_loss", "entropy_coef", "cispo_clip_ratio", "aux_loss"),
    *("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/low_min"),
    *("clip_ratio/high_max", "vespo/phi_seq_mean", "mean_token_accuracy", "logits/chosen", "logits/rejected"),
}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text)) % 3) for text in completions]


def tiny_model() -> Any:
    """A model with sharp logits, so that ratios leave the clip."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=258, num_key_value_heads=1, tie_word_embeddings=True, **sizes, **special)
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_trainer(folder: Path, kind: Any = GRPOTrainer, **changes: Any) -> Any:
    """A trainer. changes: the GRPOConfig's fields, and kind's other arguments under `arguments`."""
    arguments = changes.pop("arguments", {})
    config: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6,
        "gradient_accumulation_steps": 2, "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant",
        "use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1, "save_strategy": "no", "top_k": 0,
        "temperature": 0.8, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    tiny_model().save_pretrained(folder / "model")  # TRL loads the reference from there, too
    return kind(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=GRPOConfig(str(folder), **(config | changes)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4, "demonstration": DEMONSTRATIONS * 4}),
        processing_class=byte_tokenizer(),
        **arguments,
    )


def curves(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The log of training, step by step, and the trained weights."""
    trainer.train()
    logged = [{k: row[k] for k in SHOWN if k in row} for row in trainer.state.log_history if "grad_norm" in row]
    weights = {k: p.detach() for k, p in trainer.model.named_parameters() if p.requires_grad}
    return logged, weights


def check_same(got: Any, want: Any) -> None:
    assert len(want[0]) == 4
    assert any(row["loss"] for row in want[0])
    for a, b in zip(got[0], want[0], strict=True):
        assert {"loss", "grad_norm"} <= b.keys()
        assert a == pytest.approx(b, rel=1e-3, abs=2e-4)  # TRL logs four digits of a loss
    torch.testing.assert_close(got[1], want[1], rtol=2e-4, atol=2e-6)
