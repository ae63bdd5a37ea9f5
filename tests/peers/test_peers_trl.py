"""TRL's trainers with our operations against TRL's own: losses, gradients, metrics and weights, over several steps.

They need an environment of their own: `make test-peers`.
"""

from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplus import Objective, policy_loss

pytest.importorskip("trl")

import trl_runs
from trl.trainer import grpo_trainer, rloo_trainer, utils
from trl_runs import check_same

from rlplus.integrations import transformers
from rlplus.integrations.trl import RLPlusGRPOTrainer, add_fused_lm_head, patch

pytestmark = pytest.mark.peers
CLOSE = {"rtol": 2e-4, "atol": 2e-6}
CLIPPED = {"epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 2}  # several updates on one batch, and clipping
LOSSES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "dapo", "beta": 0.1, **CLIPPED},
    {"loss_type": "grpo", "delta": 1.1, **CLIPPED},
    {"loss_type": "bnpo", "entropy_coef": 0.1, "num_iterations": 2},
    {"loss_type": "dr_grpo", "steps_per_generation": 4},
    {"loss_type": "cispo", "epsilon_high": 1.05, "num_iterations": 2},
    {"loss_type": "sapo", "beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
    {"loss_type": "luspo", **CLIPPED},
    {"loss_type": "cispo", "num_iterations": 2},
    {"loss_type": "vespo", "num_iterations": 2},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
    {"loss_type": "dapo", "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.01, "num_iterations": 2},
    {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef": 0.05},
]
CLIP = Objective(internal="clip", clip_low=0.01, clip_high=0.02)
OBJECTIVES: list[tuple[Objective, dict[str, Any]]] = [  # surrogates that TRL has, too
    (CLIP, {"loss_type": "dapo", "beta": 0.1, **CLIPPED}),
    (replace(CLIP, dual_clip=1.1), {"loss_type": "grpo", "delta": 1.1, **CLIPPED}),
    (CLIP, {"loss_type": "bnpo", "entropy_coef": 0.1, **CLIPPED}),
    (CLIP, {"loss_type": "dr_grpo", "steps_per_generation": 4, **CLIPPED}),
    (CLIP, {"loss_type": "luspo", **CLIPPED}),
    (Objective(internal="cispo", clip_high=0.05), {"loss_type": "cispo", "epsilon_high": 1.05, "num_iterations": 2}),
    (
        Objective(internal="sapo"),
        {"loss_type": "sapo", "beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
    ),
    (CLIP, {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1, **CLIPPED}),
    (CLIP, {"loss_type": "luspo", "importance_sampling_level": "sequence", "entropy_coef": 0.1, **CLIPPED}),
    (CLIP, {"loss_type": "dapo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1, "beta": 0.1, **CLIPPED}),
    (CLIP, {"loss_type": "grpo", "off_policy_mask_threshold": 0.01, **CLIPPED}),
]


def name_of(changes: dict[str, Any]) -> str:
    return "-".join(str(value) for value in changes.values())


def lora() -> dict[str, Any]:
    import peft

    return {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)}


@pytest.mark.parametrize("changes", LOSSES, ids=name_of)
def test_patched_trl_trains_as_trl_does(changes: dict[str, Any], tmp_path: Path) -> None:
    want = trl_runs.curves(trl_runs.make_trainer(tmp_path, **changes))
    with patch():
        trainer = trl_runs.make_trainer(tmp_path, **changes)
    assert trainer.model._fusion
    check_same(trl_runs.curves(trainer), want)


@pytest.mark.parametrize("changes", LOSSES, ids=name_of)
def test_without_demonstrations_and_objective_the_loss_and_metrics_are_trls(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    want = trl_runs.curves(trl_runs.make_trainer(tmp_path, **changes))
    ours = {**changes, "arguments": {"objective": None, "demonstration_column": "none"}}
    check_same(trl_runs.curves(trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, **ours)), want)


@pytest.mark.parametrize(("objective", "changes"), OBJECTIVES, ids=[name_of(changes) for _, changes in OBJECTIVES])
def test_an_objective_that_trl_has_trains_as_trls_does(
    objective: Objective, changes: dict[str, Any], tmp_path: Path
) -> None:
    """In one pass, or in two steps; with TRL's metrics."""
    want = trl_runs.curves(trl_runs.make_trainer(tmp_path, **changes))
    ours = {**changes, "arguments": {"objective": objective, "demonstration_column": "none"}}
    check_same(trl_runs.curves(trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, **ours)), want)


@pytest.mark.parametrize("fused", [False, True])
def test_with_peft_and_its_reference(fused: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"loss_type": "dapo", "beta": 0.1, "num_iterations": 2}
    want = trl_runs.curves(trl_runs.make_trainer(tmp_path, arguments=lora(), **changes))
    kind, more = (RLPlusGRPOTrainer, {"objective": None, "demonstration_column": ""}) if fused else (
        grpo_trainer.GRPOTrainer, dict[str, Any]()
    )  # fmt: skip
    with patch():
        trainer = trl_runs.make_trainer(tmp_path, kind, arguments=lora() | more, **changes)
    check_same(trl_runs.curves(trainer), want)
    assert all("lora" in name for name in want[1])


def test_the_output_of_a_fused_model_is_trls() -> None:
    """Also with shift_labels, and with the auxiliary loss of experts; TRL computes in fp32 what we do in fp64."""
    from causal_lms import make

    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    ids = torch.tensor([[5, 9, 12, 30, 31, 22, 8], [3, 44, 17, 2, 50, 6, 1]])
    labels = ids.clone()
    labels[:, :3], labels[0, 5] = -100, -100
    for family, changes in ("Gemma2", {"final_logit_softcapping": 1.5}), ("Mixtral", experts):
        for inputs in (
            {"labels": labels},
            {"shift_labels": labels, "num_items_in_batch": 3},
            {"labels": labels, **({"output_router_logits": True} if family == "Mixtral" else {})},
        ):
            outputs = []
            for add in (utils.add_fused_lm_head, add_fused_lm_head):
                model = make(family, changes).float()
                add(model, temperature=0.7, outputs=("log_probs", "entropy"))
                out = model(input_ids=ids, fused_lm_head=True, **inputs)
                (out.loss + out.entropy.sum()).backward()
                outputs.append((dict(out), {k: p.grad for k, p in model.named_parameters()}))
            torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


def test_under_autocast_the_logprobs_are_as_exact_as_the_hidden_states() -> None:
    """bf16 products as TRL's, but summed and kept in fp32: errors against fp64 of the same bf16 hidden states."""
    ids = torch.arange(5, 25)[None]
    errors = []
    for add in (utils.add_fused_lm_head, add_fused_lm_head):
        model = trl_runs.tiny_model()
        add(model, outputs=("log_probs", "entropy"))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids).last_hidden_state.bfloat16().double()
            out = model(input_ids=ids, labels=ids, fused_lm_head=True)
        logp = (hidden @ model.lm_head.weight.bfloat16().double().T).log_softmax(-1)[:, :-1]
        errors.append((out.log_probs - logp.gather(-1, ids[:, 1:, None])[..., 0]).abs().max())
    assert errors[1] < 1e-5 < 1e-3 < errors[0]


def test_a_patch_is_undone() -> None:
    with patch():
        assert grpo_trainer.add_fused_lm_head is rloo_trainer.add_fused_lm_head is add_fused_lm_head
        patch().close()  # there is one patch at a time, whichever call's it is
        assert grpo_trainer.add_fused_lm_head is rloo_trainer.add_fused_lm_head is utils.add_fused_lm_head
        assert grpo_trainer.add_fused_lm_head is not add_fused_lm_head
    assert grpo_trainer.add_fused_lm_head is rloo_trainer.add_fused_lm_head is utils.add_fused_lm_head
    with pytest.raises(ValueError, match=r"want outputs among log_probs, entropy, is_top1, .*; got logits"):
        add_fused_lm_head(trl_runs.tiny_model(), outputs=("logits",))


def test_ligers_layers_leave_the_head_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU: they are off. What Liger does to the model's forward pass when training starts is not."""
    pytest.importorskip("liger_kernel")
    heads = counted_calls(monkeypatch)
    off = {"rope": False, "rms_norm": False, "swiglu": False}
    with patch():
        trainer = trl_runs.make_trainer(tmp_path, use_liger_kernel=True, liger_kernel_config=off, max_steps=1)
        trainer.train()
        assert len(heads) == 2, "one for each accumulated batch"
        changes = {"liger_kernel_config": {"fused_linear_cross_entropy": True}}
        with pytest.raises(ValueError, match="replaces the model's forward"):
            trl_runs.make_trainer(tmp_path, use_liger_kernel=True, **changes)


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of our operation by a fused head."""
    rows, real = list[int](), transformers.linear_logprob

    def counted(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(len(hidden))
        return real(hidden, *arguments, **options)

    monkeypatch.setattr(transformers, "linear_logprob", counted)
    return rows


# ---- demonstrations


def test_demonstrations_take_the_last_place_of_their_groups(tmp_path: Path) -> None:
    """The whole of a step: who is generated, who is graded, whose tokens are external, and the loss in closed form."""
    trainer = trl_runs.make_trainer(
        tmp_path, RLPlusGRPOTrainer, per_device_train_batch_size=16, gradient_accumulation_steps=1, num_iterations=2
    )
    trainer.model.train()
    asked = list[int]()
    generate = trainer.model.generate

    def counted(**inputs: Any) -> Tensor:
        asked.append(len(inputs["input_ids"]))
        return generate(**inputs)

    trainer.model.generate = counted
    rows = [{"prompt": p, "demonstration": d} for p, d in zip(trl_runs.PROMPTS, trl_runs.DEMONSTRATIONS, strict=True)]
    batch = trainer._generate_and_score_completions([row for row in rows for _ in range(4)])
    assert asked == [13], "one prompt has no demonstration"
    assert batch["external"].nonzero().flatten().tolist() == [3, 7, 11]
    ids = [row[on].tolist() for row, on in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)]
    assert [ids[i] for i in (3, 7, 11)] == [[*text.encode(), 257] for text in ("4", "three", "def")]
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    graded = torch.tensor(trl_runs.reward(texts)).view(4, 4)
    want = (graded - graded.mean(1, keepdim=True)) / (graded.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"], want.flatten())

    with torch.no_grad():  # the second update of the batch
        trainer.model.lm_head.weight.mul_(1.05)
    whole = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    count = batch["completion_ids"].shape[1]
    logits = trainer.model(input_ids=whole, attention_mask=attention).logits[:, -count - 1 : -1] / 0.8
    logprob = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch)
    mask = batch["completion_mask"]
    want_loss, stats = policy_loss(
        logprob,
        old_logprob=batch["old_per_token_logps"],
        advantage=batch["advantages"],
        token_weight=mask / mask.sum(),
        external=batch["external"][:, None].expand(mask.shape),
        objective=Objective(),
    )
    torch.testing.assert_close(loss, want_loss, **CLOSE)
    metrics = trainer._metrics["train"]
    assert metrics["demonstrations/share"] == [3 / 16]
    assert metrics["demonstrations/too_long"] == [0]
    for name, value in ("probability", "prob_external"), ("ratio", "ratio_external"):
        assert metrics[f"demonstrations/{name}"] == pytest.approx([stats[value].item() / 12], rel=1e-4)


def test_a_long_demonstration_is_left_out_and_counted(tmp_path: Path) -> None:
    trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, max_completion_length=5)
    trainer.model.train()
    rows = [{"prompt": "x", "demonstration": "12345"}] * 4 + [{"prompt": "y", "demonstration": "1234"}] * 4
    batch = trainer._generate_and_score_completions(rows)
    assert batch["external"].tolist() == [False] * 7 + [True]
    assert trainer._metrics["train"]["demonstrations/too_long"] == [1]
    trainer.model.eval()
    assert not trainer._generate_and_score_completions(rows)["external"].any()


def test_training_with_demonstrations_makes_them_likelier(tmp_path: Path) -> None:
    trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, max_steps=12, learning_rate=0.5)
    trainer.reward_funcs[0] = lambda completions, **_: [float(text in trl_runs.DEMONSTRATIONS) for text in completions]
    trainer.train()
    shown = [row["demonstrations/probability"] for row in trainer.state.log_history if "demonstrations/ratio" in row]
    assert len(shown) == 12
    assert sum(shown[-3:]) > 2 * sum(shown[:3])


class Engine:
    """vLLM as TRL calls it: completions of two tokens with logprobs."""

    def __init__(self) -> None:
        self.asked = list[list[list[int]]]()

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        self.asked.append(prompts)
        return None, [[65 + i, 257] for i in range(len(prompts))], [[[-1.0], [-2.0]]] * len(prompts), None


@pytest.mark.parametrize(("mode", "asked"), [("colocate", 6), ("server", 8)])
def test_with_vllm(mode: str, asked: int, tmp_path: Path) -> None:
    """Only a server generates whole groups; a demonstration's weight of the mismatch is 1."""
    trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer)
    trainer.model.train()
    engine = Engine()
    more = {"use_vllm": True, "vllm_mode": mode, "vllm_generation": engine, "_last_loaded_step": 0}
    more |= {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
    more |= {"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0}
    vars(trainer).update(more)
    rows = [{"prompt": "x", "demonstration": "z"}] * 4 + [{"prompt": "y", "demonstration": "1"}] * 4
    batch = trainer._generate_and_score_completions(rows)
    assert [len(prompts) for prompts in engine.asked] == [asked]
    assert batch["completion_ids"][:, 0].tolist()[3::4] == [ord("z"), ord("1")]
    assert batch["completion_ids"][:3, 0].tolist() == [65, 66, 67]
    assert (batch["importance_sampling_ratio"][3::4] == 1).all()
    assert (batch["importance_sampling_ratio"][:3] != 1).all()
    trainer.current_gradient_accumulation_steps = 1
    assert trainer._compute_loss(trainer.model, batch).isfinite()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"use_adaptive_entropy": True, "entropy_coef": 0.1}, {}, "want use_adaptive_entropy False with an objective"),
    ({}, {"objective": "simplerl"}, "want beta=0.0001 in the GRPOConfig, as the objective has it; got 0.0"),
    ({}, {"objective": Objective(mismatch_cap=2.0)}, "want mismatch_cap None: the GRPOConfig has"),
    ({}, {"rollout_func": lambda *_: {}}, "want no rollout_func: its completions have no demonstrations"),
    ({}, {"objective": "rl-plus"}, "rl-plus"),
]


@pytest.mark.parametrize(("changes", "arguments", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_the_fused_loss_lacks_is_refused(
    changes: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, arguments=arguments, **changes)


def test_a_demonstration_that_is_no_text_is_refused(tmp_path: Path) -> None:
    trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer)
    rows = [{"prompt": "x", "demonstration": ["z"]}] * 4
    with pytest.raises(ValueError, match="want column demonstration a text or None; got list"):
        trainer._demonstrations_of(rows)


def test_the_stub_of_the_quick_tests_has_trls_signatures() -> None:
    import trl_stub

    names = (
        *("_compute_loss", "_generate_and_score_completions", "_generate_single_turn"),
        *("_get_per_token_logps_and_entropies", "get_high_entropy_mask", "get_off_policy_mask"),
    )
    pairs = [(getattr(trl_stub.GRPOTrainer, name), getattr(grpo_trainer.GRPOTrainer, name)) for name in names]
    for stub, trls in [*pairs, (trl_stub.add_fused_lm_head, utils.add_fused_lm_head)]:
        assert signature(stub).parameters.keys() == signature(trls).parameters.keys()
    kinds = trl_stub.FusedCausalLMOutput, utils.FusedCausalLMOutput
    stub_fields, trls_fields = ([field.name for field in fields(kind)] for kind in kinds)
    assert stub_fields == trls_fields
    assert vars(trl_stub.config()).keys() <= {field.name for field in fields(grpo_trainer.GRPOConfig)}
