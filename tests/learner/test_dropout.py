"""Dropout of a model's configuration: off in every model that a run loads, said once, and kept in what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lms import make
from torch import nn
from trainer_runs import run_config
from transformers import AutoConfig, Gemma3TextConfig, Qwen2VLConfig
from transformers.models.llama import modeling_llama
from update_cases import batch_of_samples

from rlplus.train.config import ModelConfig
from rlplus.train.learner import ValueModel, make_micro_batches
from rlplus.train.learner.dropout import dropout_fields, without_dropout
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import load_model
from rlplus.train.trainer import open_run

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Qwen2", {}, {"attention_dropout": 0.3}),
    (
        "GPT2LMHeadModel",
        GPT2,
        {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1, "summary_first_dropout": 0.1},
    ),
    ("GPTNeoX", {}, {"hidden_dropout": 0.3, "attention_dropout": 0.2, "classifier_dropout": 0.1}),
    (
        "OPT",
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
        {"dropout": 0.3, "attention_dropout": 0.2, "layerdrop": 0.5},
    ),
    ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}, {"router_jitter_noise": 0.3}),
]
IDS = torch.tensor([[5, 9, 12, 30, 31, 22, 8], [3, 44, 17, 2, 50, 6, 1]])


@pytest.mark.parametrize(("family", "changes", "dropout"), FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_a_model_in_training_computes_what_it_computes_in_evaluation(
    family: str, changes: dict[str, Any], dropout: dict[str, Any], tmp_path: Path
) -> None:
    make(family, changes | dropout).float().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    asked = {name: value for _, name, value in dropout_fields(config)}
    assert asked == dropout
    lm = load_model(ModelConfig(path=str(tmp_path), dtype="float32"), str(tmp_path), config).train()
    first, second = (lm(IDS).logits for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, lm.eval()(IDS).logits)
    assert {name: value for _, name, value in dropout_fields(config)} == asked, "the run's own copy was changed"


def test_dropout_that_no_field_names_is_off_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("Llama", {}).float().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)

    class Dropping(modeling_llama.LlamaMLP):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(super().forward(x))

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Dropping)
    lm = load_model(ModelConfig(path=str(tmp_path), dtype="float32"), str(tmp_path), config).train()
    assert torch.equal(lm(IDS).logits, lm(IDS).logits)


def test_configurations_inside_one_are_searched_too() -> None:
    config = Qwen2VLConfig(text_config={"attention_dropout": 0.25})
    assert [(name, value) for _, name, value in dropout_fields(config)] == [("attention_dropout", 0.25)]
    assert not list(dropout_fields(without_dropout(config)))
    assert not list(dropout_fields(Gemma3TextConfig()))


def test_a_run_has_none_says_so_once_and_writes_the_fields_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Policy, reference and critic, in training mode and with other random numbers each time."""
    source = tmp_path / "model"
    with open_run(run_config(tmp_path, "made")) as run:
        run.policy.export(str(source), run.ends)
        run.tokenizer.save_pretrained(source)
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"attention_dropout": 0.5}))
    changes: dict[str, dict[str, Any]] = {
        "model": {"scratch": None, "path": str(source), "dtype": "float32"},
        "algorithm": {"preset": "ppo", "reward_kl_coef": 0.1, "recipe": {"critic_updates": 1}},
    }
    with open_run(run_config(tmp_path, **changes)) as run:
        (said,) = [record.getMessage() for record in caplog.records if "dropout" in record.getMessage()]
        assert said.startswith("the model's configuration asks for attention_dropout 0.5; RL turns it off, since ")
        (critic,) = run.recipe.learners.values()
        algorithm, samples = run.recipe.algorithm, batch_of_samples()
        (batch, *_) = make_micro_batches(samples, algorithm, run.config, run.pad_id, run.policy.device)
        assert isinstance(critic, ValueModel)
        assert isinstance(run.policy, Policy)
        for value in (run.policy.logprob, critic.value, lambda b: run.policy.logprob(b, reference=True)):
            assert torch.equal(value(batch), value(batch))
        assert torch.equal(run.policy.logprob(batch), run.policy.logprob(batch, reference=True))
        run.policy.export(str(tmp_path / "written"), run.ends)
        assert not list(dropout_fields(run.policy.engine.module.lm.config))
    assert json.loads((tmp_path / "written/config.json").read_text())["attention_dropout"] == 0.5
