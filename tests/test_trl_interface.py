"""`rlplus.integrations.trl` on a stand-in for TRL; tests/test_peers_trl.py has TRL itself."""

import importlib
from typing import Any

import pytest
import torch
import trl_stub
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus import Objective, policy_loss
from rlplus.data import byte_tokenizer

ROWS = [
    {"prompt": p, "demonstration": d} for p, d in (("2+2=", "4"), ("abc?", "def"), ("none", None)) for _ in range(4)
]
LETTERS = torch.arange(65, 75)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return trl_stub.install(monkeypatch)


@pytest.fixture
def ours(modules: dict[str, Any]) -> Any:
    return importlib.import_module("rlplus.integrations.trl")


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=258, num_key_value_heads=1, **sizes)).double()


def make_trainer(ours: Any, model: Any = None, objective: Any = "rlplus", **changes: Any) -> Any:
    model = model or tiny_model()
    return ours.RLPlusGRPOTrainer(model, trl_stub.config(**changes), byte_tokenizer(), objective=objective)


def test_a_patched_trainer_computes_its_loss_by_the_fused_operation(ours: Any, modules: dict[str, Any]) -> None:
    kind, args, tokenizer = modules["trl.trainer.grpo_trainer"].GRPOTrainer, trl_stub.config(), byte_tokenizer()
    assert kind(tiny_model(), args, tokenizer).model.given_trls_head
    with ours.patch():
        trainer = kind(tiny_model(), args, tokenizer)
        assert modules["trl.trainer.rloo_trainer"].add_fused_lm_head is ours.add_fused_lm_head
    assert kind(tiny_model(), args, tokenizer).model.given_trls_head, "outside of the patch again"
    assert not hasattr(trainer.model, "given_trls_head")
    batch = trainer._generate_and_score_completions(ROWS)
    logits = tiny_model()(input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)).logits[:, 3:-1] / 0.8
    want = -logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None]).mean()
    torch.testing.assert_close(trainer._compute_loss(trainer.model, batch), want)
    assert trainer.model(input_ids=batch["prompt_ids"]).logits.shape == (12, 4, 258)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_rl_plus_replaces_the_last_of_each_group_and_weighs_it(ours: Any, loss_type: str) -> None:
    trainer = make_trainer(ours, loss_type=loss_type)
    batch = trainer._generate_and_score_completions(ROWS)
    assert trainer.asked == 10
    ids = batch["completion_ids"]
    assert ids[3].tolist()[:2] == [ord("4"), 257]
    assert ids[7].tolist() == [*b"def", 257]
    rest = torch.cat([ids[:3, 0], ids[4:7, 0], ids[8:, 0]])
    assert torch.equal(rest, LETTERS)
    assert batch["external"].nonzero().flatten().tolist() == [3, 7]

    logits = tiny_model()(input_ids=torch.cat([batch["prompt_ids"], ids], 1)).logits[:, 3:-1] / 0.8
    logprob = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = batch["completion_mask"]
    divisors = {
        "dapo": mask.sum(), "bnpo": mask.sum(), "dr_grpo": 12 * 6, "luspo": 12,
        "grpo": 12 * mask.sum(1, keepdim=True),
    }  # fmt: skip
    want, stats = policy_loss(
        logprob,
        old_logprob=None,
        advantage=batch["advantages"],
        token_weight=mask / divisors[loss_type],
        external=batch["external"][:, None].expand(mask.shape),
        objective=Objective(),
    )
    got = trainer._compute_loss(trainer.model, batch)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)  # the weights are fp32
    got.backward()
    assert trainer.model.lm_head.weight.grad.any()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert metrics["demonstrations/share"] == 2 / 12
    assert metrics["demonstrations/ratio"] == pytest.approx(float(stats["ratio_external"]) / 6)
    assert metrics["entropy"] > 0


def test_all_of_a_process_may_be_demonstrations(ours: Any) -> None:
    trainer = make_trainer(ours)
    trainer.num_generations = 1
    trainer._demonstrations = trainer._demonstrations_of(ROWS[:1])
    assert trainer._generate_single_turn([[1]], None, {}, 1) == ([[ord("4"), 257]], None)


def test_a_trl_with_another_interface_is_refused(modules: dict[str, Any]) -> None:
    modules["trl"].__version__ = "0.29.1"
    modules["trl.trainer.grpo_trainer"].GRPOTrainer._compute_loss = lambda self, model, inputs, more: None
    message = (
        r"want TRL 1\.16, whose GRPOTrainer\._compute_loss takes \(self, model, inputs\); got TRL 0\.29\.1, where it"
    )
    with pytest.raises(ImportError, match=message):
        importlib.import_module("rlplus.integrations.trl")
    del modules["trl.trainer.utils"].add_fused_lm_head
    with pytest.raises(ImportError, match=r"whose trl\.trainer\.utils\.add_fused_lm_head takes .* where there is none"):
        importlib.import_module("rlplus.integrations.trl")


def test_another_output_of_trls_models_is_refused(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules["trl.trainer.utils"], "FusedCausalLMOutput", None)
    with pytest.raises(
        ImportError, match="whose FusedCausalLMOutput has aux_loss, entropy, label_mask, log_probs, loss"
    ):
        importlib.import_module("rlplus.integrations.trl")


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"loss_type": "grpo", "delta": 1.5}, {"internal": "clip", "dual_clip": 1.5}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"internal": "clip", "clip_low": 0.1, "clip_high": 0.3}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"internal": "cispo", "clip_high": 4.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, {"internal": "sapo", "tau_neg": 2.0}),
        (
            {"beta": 0.3, "use_bias_correction_kl": True, "entropy_coef": 0.1},
            {"internal": "clip", "kl_coef": 0.3, "kl_estimator": "k3-unbiased", "entropy_coef": 0.1},
        ),
    ],
)
def test_the_objective_of_a_grpo_config(ours: Any, changes: dict[str, Any], fields: dict[str, Any]) -> None:
    assert make_trainer(ours, objective=None, **changes).objective == Objective(**fields)
