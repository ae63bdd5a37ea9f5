"""`rlplus.integrations.trl` on a stand-in for TRL; tests/peers/test_peers_trl.py has TRL itself."""

import copy
import importlib
import math
import pickle
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
import trl_stub
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus import Objective, policy_loss
from rlplus.train.data import byte_tokenizer

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
        for name in ("rloo_trainer", "sft_trainer", "utils"):
            assert modules[f"trl.trainer.{name}"].add_fused_lm_head is ours.add_fused_lm_head
    assert kind(tiny_model(), args, tokenizer).model.given_trls_head, "outside of the patch again"
    assert not hasattr(trainer.model, "given_trls_head")
    batch = trainer._generate_and_score_completions(ROWS)
    logits = tiny_model()(input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)).logits[:, 3:-1] / 0.8
    logprob = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    want = -(batch["advantages"][:, None] * logprob).mean()
    torch.testing.assert_close(trainer._compute_loss(trainer.model, batch), want)
    assert trainer.model(input_ids=batch["prompt_ids"]).logits.shape == (12, 4, 258)


def test_one_call_undoes_all_patches(ours: Any, modules: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    kind, args, tokenizer = modules["trl.trainer.grpo_trainer"].GRPOTrainer, trl_stub.config(), byte_tokenizer()
    ours._say_once.cache_clear()
    caplog.set_level("INFO", logger="rlplus")
    ours.patch()
    second = ours.patch(backward="sampled")
    assert not caplog.records, "no trainer took it yet"
    with pytest.raises(ValueError, match="want backward one of auto, exact, sampled; got 'sampeld'"):
        ours.patch(backward="sampeld")
    for _ in range(2):
        trainer = kind(tiny_model(), args, tokenizer)
    assert [r.message for r in caplog.records if r.name.startswith("rlplus.integrations")] == [
        "TRL's logprobs come from rlplus, with a backward pass that is sampled"
    ]
    assert trainer.model._fusion.options["backward"] == "sampled"
    second.close()
    assert kind(tiny_model(), args, tokenizer).model.given_trls_head
    with ours.patch():
        assert not hasattr(kind(tiny_model(), args, tokenizer).model, "given_trls_head")
    assert kind(tiny_model(), args, tokenizer).model.given_trls_head


def closed_form(batch: dict[str, Any], loss_type: str, objective: Objective, accumulated: int = 1) -> Any:
    """Loss and statistics of one of so many micro-batches, through the plain model."""
    ids, mask, weights = batch["completion_ids"], batch["completion_mask"], batch.get("importance_sampling_ratio")
    logits = tiny_model()(input_ids=torch.cat([batch["prompt_ids"], ids], 1)).logits[:, 3:-1] / 0.8
    logp, rows = logits.log_softmax(-1), len(ids)
    divisors = {
        "dapo": batch["num_items_in_batch"] / accumulated,  # which counts all micro-batches
        "bnpo": mask.sum(), "dr_grpo": rows * 6, "luspo": rows, "grpo": rows * mask.sum(1, keepdim=True),
    }  # fmt: skip
    return policy_loss(
        logp.gather(-1, ids[..., None])[..., 0],
        old_logprob=None,
        advantage=batch["advantages"][:, None] * (torch.ones_like(mask) if weights is None else weights),
        token_weight=mask / divisors[loss_type] / accumulated,
        external=batch["external"][:, None].expand(mask.shape),
        entropy=-(logp.exp() * logp).sum(-1),
        entropy_weight=mask / mask.sum() / accumulated,
        objective=objective,
    )


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

    want, stats = closed_form(batch, loss_type, Objective())
    got = trainer._compute_loss(trainer.model, batch)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)  # the weights are fp32
    got.backward()
    assert trainer.model.lm_head.weight.grad.any()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert metrics["demonstrations/share"] == 2 / 12
    assert metrics["demonstrations/ratio"] == pytest.approx(float(stats["ratio_external"]) / 6)
    assert metrics["entropy"] > 0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_a_micro_batch_has_its_share_of_the_loss_and_the_samplers_weights(ours: Any, loss_type: str) -> None:
    """One of two, the last one with a demonstration; `importance_sampling_ratio` is TRL's for vLLM's other numbers."""
    trainer = make_trainer(ours, loss_type=loss_type, entropy_coef=0.1)
    batch = trainer._generate_and_score_completions(ROWS)
    generator = torch.Generator().manual_seed(1)
    shape = batch["completion_mask"].shape
    batch["importance_sampling_ratio"] = 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 2
    for rows in (slice(8, 12), slice(4, 8)):
        part = {name: value[rows] if value.ndim else value for name, value in batch.items()}
        want, _ = closed_form(part, loss_type, trainer.objective, accumulated=2)
        got = trainer._compute_loss(trainer.model, part)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)  # the weights are fp32
    trainer.model.eval()  # an evaluation accumulates nothing, and its batch is all that was generated
    want, _ = closed_form(batch, loss_type, trainer.objective)
    torch.testing.assert_close(trainer._compute_loss(trainer.model, batch), want, rtol=1e-6, atol=1e-9)


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
        ImportError, match="whose FusedCausalLMOutput has aux_loss, entropy, is_top1, label_mask, log_probs, log_sum_sq"
    ):
        importlib.import_module("rlplus.integrations.trl")


def logprobs(batch: dict[str, Any]) -> Any:
    """The completions' logprobs, from whole logits of the untrained model."""
    ids = batch["completion_ids"]
    logits = tiny_model()(input_ids=torch.cat([batch["prompt_ids"], ids], 1)).logits[:, 3:-1] / 0.8
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def test_without_an_objective_sampled_tokens_have_trls_loss_and_demonstrations_ours(ours: Any) -> None:
    trainer = make_trainer(ours, objective=None)
    batch = trainer._generate_and_score_completions(ROWS)
    logprob, mask, external = logprobs(batch), batch["completion_mask"], batch["external"][:, None]
    want = -(batch["advantages"][:, None] * ~external * logprob * mask).sum() / mask.sum()
    more, stats = policy_loss(
        logprob,
        old_logprob=None,
        advantage=batch["advantages"],
        token_weight=mask / mask.sum() * external,
        external=external.expand(mask.shape),
    )
    assert more.abs() > 0.01
    torch.testing.assert_close(trainer._compute_loss(trainer.model, batch), want + more, rtol=1e-6, atol=1e-9)
    metrics = trainer._metrics["train"]
    assert metrics["demonstrations/probability"] == pytest.approx([float(stats["prob_external"]) / 6])
    assert len(metrics["entropy"]) == 1, "TRL's metrics are TRL's"


@pytest.mark.parametrize("sequences", [False, True])
def test_trls_metrics_of_clipping_are_those_of_sampled_tokens(ours: Any, sequences: bool) -> None:
    level = "sequence" if sequences else "token"
    objective = Objective(internal="clip", clip_low=0.05, clip_high=0.1)
    changes = {"loss_type": "grpo", "entropy_coef": 0.1, "importance_sampling_level": level}
    trainer = make_trainer(ours, objective=objective, **changes)
    batch = trainer._generate_and_score_completions(ROWS)
    logprob, mask = logprobs(batch).detach(), batch["completion_mask"].bool()
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)).double()
    batch["old_per_token_logps"] = logprob - 0.2 * noise
    trainer._compute_loss(trainer.model, batch)
    clipped: dict[str, list[list[bool]]] = {"low": [], "high": []}
    for row in (row for row in range(12) if not batch["external"][row]):
        steps = 0.2 * noise[row][mask[row]]
        ratios = [float(x.exp()) for x in (steps.mean()[None] if sequences else steps)]
        A = float(batch["advantages"][row])
        clipped["low"].append([A < 0 and r < 0.95 for r in ratios])
        clipped["high"].append([A > 0 and r > 1.1 for r in ratios])
    means = {name: [sum(row) / len(row) for row in rows] for name, rows in clipped.items()}
    flat = {name: [x for row in rows for x in row] for name, rows in clipped.items()}
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    low, high = (sum(flat[name]) / len(flat[name]) for name in ("low", "high"))
    assert low > 0.1 < high
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(low + high)
    assert metrics["clip_ratio/low_min"] == pytest.approx(min(means["low"]))
    assert metrics["clip_ratio/high_max"] == pytest.approx(max(means["high"]))
    assert metrics["entropy_coef"] == 0.1
    assert {"policy_loss", "entropy"} <= metrics.keys()


def test_other_numbers_of_a_distribution(ours: Any) -> None:
    """Those that SFTTrainer and DPOTrainer ask for, from whole logits in blocks of rows."""
    from rlplus.integrations import measures

    names = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
    model, ids = tiny_model(), torch.arange(60, 72).view(2, 6)
    z = model(input_ids=ids).logits[:, :-1] / 0.5
    labels = ids.clone()
    labels[0, 3], labels[1, 2] = z[0, 2].argmax(), -100
    ours.add_fused_lm_head(model, temperature=0.5, outputs=names)
    for scratch in (2**27, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measures, "SCRATCH", scratch)
            out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        on = labels[:, 1:] != -100
        assert torch.equal(out.is_top1, (z.argmax(-1) == labels[:, 1:]) & on)
        assert out.is_top1[0, 2]
        torch.testing.assert_close(out.mean_logits, z.mean(-1) * on)
        torch.testing.assert_close(out.log_sum_sq_probs, z.softmax(-1).square().sum(-1).log() * on)
        assert not out.mean_logits.requires_grad


def test_the_fused_model_of_a_trainer_can_be_copied_and_pickled(ours: Any) -> None:
    model = tiny_model()
    ours.add_fused_lm_head(model, temperature=0.8)
    ids = torch.arange(60, 66)[None]
    want = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=ids, labels=ids, fused_lm_head=True).loss, want)
        assert next(iter(signature(other.forward).parameters)) == "input_ids"
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert other(input_ids=ids, labels=ids, fused_lm_head=True).loss.item() == pytest.approx(math.log(258))
    assert torch.equal(model(input_ids=ids, labels=ids, fused_lm_head=True).loss, want)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"entropy_coef": 0.1}, {"entropy_coef": 0.1}),
        ({"beta": 0.3}, {"kl_coef": 0.3}),
        ({"beta": 0.3, "use_bias_correction_kl": True}, {"kl_coef": 0.3, "kl_estimator": "k3-unbiased"}),
    ],
)
def test_an_objective_has_the_coefficients_of_the_grpo_config(
    ours: Any, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert make_trainer(ours, **changes).objective == replace(Objective(), **fields)
    assert make_trainer(ours, objective=None, **changes).objective is None


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        (Objective(kl_coef=0.1), {"beta": 0.1, "use_bias_correction_kl": True}, "want .* k3-unbiased; got k3 with"),
        (Objective(kl_estimator="k2"), {"beta": 0.1}, "want .* kl_estimator k3; got k2 with use_bias_correction_kl=F"),
        (Objective("clip"), {"epsilon_high": 0.28}, "want epsilon_high=None .*, or what this one has, 0.2; got 0.28"),
        (Objective("cispo"), {"epsilon_high": 5.0}, "want epsilon_high=None .*, or what this one has, 1.2; got 5.0"),
        (Objective(), {"epsilon": 0.1}, "want epsilon=0.2 in the GRPOConfig, since bounds are the objective's"),
        (Objective("clip", dual_clip=3.0), {"delta": 4.0}, "want delta=None .*, or what this one has, 3.0; got 4.0"),
    ],
)
def test_what_an_objective_would_silently_replace_is_refused(
    ours: Any, objective: Objective, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(ours, objective=objective, **changes)
    make_trainer(ours, objective=None, **changes)
