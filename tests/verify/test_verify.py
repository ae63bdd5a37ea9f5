"""`rlplus verify`: right runs verify, planted mistakes are found and named, and the run's folder stays as it is."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from recipe_cases import draw_rewards
from trainer_runs import metrics, run_config, write_state

from rlplus.loss import group_advantages, token_weights
from rlplus.tools import verify
from rlplus.tools.cli import main
from rlplus.tools.verify import Row, taken, verify_run
from rlplus.tools.verify.verify_text import SHOWN
from rlplus.train import checkpoint
from rlplus.train.data import MicroBatch, Sample
from rlplus.train.learner import batch, make_micro_batches
from rlplus.train.learner import policy as learner_policy
from rlplus.train.learner.policy import Policy
from rlplus.train.recipe import plain
from rlplus.train.trainer import loop, train

ALL = 100  # more sequences than there are
SIZES = {"engine": "transformers", "group_size": 4, "max_response_length": 8}
KEPT = SIZES | {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01}
PROCESS = SIZES | {"mode": "process"}


def model(dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "layers": 1, "heads": 1, "intermediate_size": 64, "max_position_embeddings": 64}
    return {"scratch": sizes, "dtype": dtype} | changes


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of two steps, with a checkpoint of each."""
    return train(run_config(tmp_path_factory.mktemp("verify"), checkpoint={"every": 1}))


def test_a_step_is_the_runs_own_and_nothing_is_written(run, monkeypatch):
    """Taken again from the first checkpoint, the second step has the loss that the run logged."""
    computed: list[Any] = []
    accumulate = verify.accumulate

    def observed(*args: Any) -> Any:
        computed.append(accumulate(*args))
        return computed[0]

    monkeypatch.setattr(verify, "accumulate", observed)
    before = contents(run)
    verification = verify_run(run, step=1, sequences=ALL)
    assert contents(run) == before
    assert computed[0].loss == pytest.approx(metrics(run)[1]["actor/loss"], rel=1e-6)
    assert (verification.step, verification.sequences) == (2, (16, 16))
    assert not verification.wrong
    assert not verification.notes
    rows = [row.quantity for row in verification.rows]
    errors = [f"{what}, {which}" for what in ("logprob", "entropy") for which in ("mean absolute", "largest", "mean")]
    assert rows[:3] == ["tokens in micro-batches", "advantage", "token weight"]
    assert rows[3:11] == [*errors, "loss", "gradient of all parameters"]
    assert len(rows) == 11 + len(computed[0].gradients)


def test_a_finished_run_and_the_command(run, capsys):
    """The step behind the last one is as good as any."""
    assert main(["verify", str(run), "--sequences", "2"]) == 0
    out = capsys.readouterr().out
    assert "gradient of model.layers.0.self_attn.q_proj.weight" in out
    assert out.endswith("step 3, 2 of the update's 16 sequences: every quantity is within its bound.\n")


def leaking(batch: MicroBatch, attention: str) -> dict[str, Any]:
    """Positions that do not restart in rows longer than the trainer's own check has."""
    inputs = MODEL_INPUTS(batch, attention)
    places = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    return inputs | ({"position_ids": places} if places.shape[1] > 8 else {})


def shifted(*args: Any) -> list[MicroBatch]:
    batches = make_micro_batches(*args)
    for micro in batches:
        micro.target = micro.target.roll(1)
    return batches


def without_the_first(*args: Any) -> list[MicroBatch]:
    return make_micro_batches(*args)[1:]


def dropping(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """The backward pass of the last micro-batch adds nothing."""
    last = engine.is_gradient_accumulation_boundary()
    return BACKWARD(engine, loss * 0 if last else loss, *args, **kwargs)


def half_denominator(*args: Any, **kwargs: Any) -> torch.Tensor:
    return 2 * token_weights(*args, **kwargs)


def without_std(*args: Any, **kwargs: Any) -> torch.Tensor:
    return group_advantages(*args, **(kwargs | {"normalize_std": False}))


def advantage_of_another(policy: Policy, batch: MicroBatch, objective: Any) -> Any:
    """As if the tokens' advantages were in another order than the tokens."""
    constants = CONSTANTS(policy, batch, objective)
    return constants._replace(advantage=constants.advantage.flip(0))


MODEL_INPUTS, CONSTANTS = MicroBatch.model_inputs, Policy.constants
BACKWARD = deepspeed.DeepSpeedEngine.backward
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {  # keys: the first quantity that is wrong
    "tokens in micro-batches": (loop, "make_micro_batches", shifted),
    "tokens in micro-batches, dropped": (loop, "make_micro_batches", without_the_first),
    "advantage": (plain, "group_advantages", without_std),
    "token weight": (batch, "token_weights", half_denominator),
    "logprob": (MicroBatch, "model_inputs", leaking),
    "loss": (Policy, "constants", advantage_of_another),
    "gradient of all parameters": (deepspeed.DeepSpeedEngine, "backward", dropping),
}


SLOW_MISTAKES = ("tokens in micro-batches, dropped", "advantage", "loss")


@pytest.mark.parametrize(
    "first", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_MISTAKES)) for name in MISTAKES]
)
def test_a_mistake_is_found_and_named(run, monkeypatch, capsys, first):
    monkeypatch.setattr(*MISTAKES[first])
    assert main(["verify", str(run), "--sequences", str(ALL)]) == 1
    out, quantity = capsys.readouterr().out, first.partition(",")[0]
    assert re.search(
        rf"step 3, 16 of the update's 16 sequences: WRONG, first the {quantity}\b.* and \d+ more\.\n$", out
    )
    assert re.search(r"gradient of all parameters.*WRONG", out)


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A run in bf16 whose weights are so large that rounding costs as much as in a pretrained model of 30 layers."""
    wide = {"hidden_size": 32, "layers": 2, "heads": 1, "intermediate_size": 64, "max_position_embeddings": 64}
    sections = {"model": {"scratch": wide | {"initializer_range": 0.3}, "dtype": "bfloat16"}}
    return train(run_config(tmp_path_factory.mktemp("half"), checkpoint={"every": 1}, **sections))


def test_a_right_run_in_bf16_is_as_far_off_as_the_plain_model(half, capsys):
    found = {row.quantity: row for row in verify_run(half, sequences=ALL).rows}
    assert all(row.right for row in found.values())
    gradient, logprob, loss = (found[n] for n in ("gradient of all parameters", "logprob, mean absolute", "loss"))
    assert 0.02 < gradient.error < 0.2
    assert 0.005 < logprob.error < 0.05
    assert gradient.plain == pytest.approx(gradient.error, rel=0.3)
    assert logprob.plain == pytest.approx(logprob.error, rel=0.3)
    assert loss.plain is None
    assert loss.error < 1e-7  # it is of fp32's precision in any dtype
    assert main(["verify", str(half), "--sequences", str(ALL)]) == 0
    out = capsys.readouterr().out
    assert "The plain model's errors are what rounding to bfloat16 costs by itself.\n" in out
    parameters = [name.removeprefix("gradient of ") for name in found if name.startswith("gradient of model.")]
    assert f"\n{len(parameters) - SHOWN} more parameters have gradients within their bounds" in out
    nearest = max(parameters, key=lambda name: found[f"gradient of {name}"].error / found[f"gradient of {name}"].bound)
    assert f" {nearest} " in out


def hotter(policy: Policy, batch: MicroBatch) -> dict[str, Any]:
    options = HEAD_OPTIONS(policy, batch)
    return options | {"temperature": 1.01 * options["temperature"]}


def with_a_little_bonus(policy: Policy, objective: Any) -> Any:
    return LOSS_OF(policy, replace(objective, entropy_coef=1e-5))


def one_state_turned(hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
    sign = torch.ones_like(hidden[:, :1])
    sign[10] = -2
    return LINEAR_POLICY_LOSS(hidden * sign, *args, **options)


def halved(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = FULL_GRADIENT(parameter)
    return gradient / 2 if parameter.shape == (64, 32) else gradient


HEAD_OPTIONS, LOSS_OF = Policy.head_options, Policy.loss_of
LINEAR_POLICY_LOSS, FULL_GRADIENT = learner_policy.linear_policy_loss, taken.safe_get_full_grad
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {  # keys: a quantity that is wrong
    "entropy, mean": (Policy, "head_options", hotter),
    "logprob, largest": (learner_policy, "linear_policy_loss", one_state_turned),
    "loss": (Policy, "loss_of", with_a_little_bonus),
    "gradient of model.layers.1.mlp.gate_proj.weight": (taken, "safe_get_full_grad", halved),
}


@pytest.mark.parametrize("quantity", FAULTS)
def test_a_fault_is_found_beside_the_rounding_of_bf16(half, monkeypatch, quantity):
    monkeypatch.setattr(*FAULTS[quantity])
    assert quantity in [row.quantity for row in verify_run(half, sequences=ALL).wrong]


def test_a_number_that_is_none_is_wrong():
    assert [Row("loss", error, 1.0, "").right for error in (1.0, 2.0, math.nan)] == [True, False, False]


CASES: dict[str, dict[str, Any]] = {
    "bf16, mini-batches, KL, entropy, mismatch, temperature": {
        "model": model("bfloat16"),
        "algorithm": {"preset": "simplerl", "objective": {"mismatch_cap": 2.0, "kl_coef": 0.1}},
        "rollout": {"engine": "transformers", "group_size": 4, "max_response_length": 8, "temperature": 0.7},
        "train": {"prompts_per_update": 2, "steps": 1},
    },
    "kept": {
        "algorithm": {"preset": "grpo", "objective": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        "rollout": KEPT,
        "train": {"steps": 1, "lr": 1e-2},
    },
    "sequences' mismatch": {
        "algorithm": {"preset": "grpo", "mismatch_level": "sequence", "objective": {"mismatch_cap": 2.0}}
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "LoRA, ZeRO-3": {
        "model": model(lora={"rank": 4, "alpha": 8.0}),
        "train": {"zero_stage": 3, "steps": 2, "lr": 1e-2},
    },
    "prefixes, demonstrations apart": {"algorithm": {"preset": "uft"}, "train": {"steps": 1}},
    "prefixes as context": {"algorithm": {"preset": "bread", "objective": {"kl_coef": 0.1}}, "train": {"steps": 1}},
    "fixed lengths": {"algorithm": {"preset": "rlplus-official"}, "train": {"steps": 1}},
    "batches ahead, sequences' ratios": {
        "rollout": PROCESS,
        "algorithm": {"preset": "gspo"},
        "train": {"overlap": 1, "steps": 3, "lr": 1e-2},
    },
    "bf16, ZeRO-2": {"model": model("bfloat16"), "train": {"zero_stage": 2}},
    "refilled, shaped": {"algorithm": {"preset": "dapo"}},
    "kept tokens, replayed": {
        "algorithm": {"preset": "exgrpo", "recipe": {"start": 0.0}},
        "rollout": KEPT,
        "train": {"steps": 4},
    },
    "kept tokens, batches ahead, bf16": {
        "model": model("bfloat16"),
        "rollout": KEPT | {"mode": "process"},
        "algorithm": {"preset": "gspo"},
        "train": {"overlap": 1, "steps": 3, "lr": 1e-2},
    },
    "replayed": {"algorithm": {"preset": "exgrpo", "recipe": {"start": 0.0}}, "train": {"steps": 4}},
    "denominators of their own": {"algorithm": {"preset": "rlplus", "external_reduction": "sequence"}},
    "interleaved": {"algorithm": {"preset": "relift"}},
    "gated": {"algorithm": {"preset": "hpt"}},
    "supervised": {"algorithm": {"preset": "sft"}},
    "whitened": {"algorithm": {"preset": "grpo", "advantage": "batch"}},
}
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "critic": ({"preset": "ppo"}, "the model that the recipe trains (critic), and the advantages, which come from it"),
    "top": ({"preset": "grpo", "top_entropy": 0.3}, "which tokens have the highest entropies"),
    "forks of prefixes": (
        {"preset": "prefix-rft", "recipe": {"members": 3}},
        "which tokens have the highest entropies",
    ),
    "penalty": ({"preset": "grpo", "reward_kl_coef": 0.1}, "the KL penalty in the rewards"),
}


def verified(folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> verify.Verification:
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    verification = verify_run(train(run_config(folder, **sections)), sequences=ALL)
    assert not verification.wrong
    return verification


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_recipes_and_options_verify(tmp_path, monkeypatch, name):
    verification = verified(tmp_path, monkeypatch, **(CASES | SLOW)[name])
    assert not verification.notes
    asked_before = any("before the update" in row.quantity for row in verification.rows)
    assert asked_before == ("sequences'" in name or "ahead" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_not_verified_is_said(tmp_path, monkeypatch, name):
    algorithm, note = GIVEN[name]
    assert verified(tmp_path, monkeypatch, algorithm=algorithm).notes == [note]


@pytest.mark.slow
def test_a_token_at_a_bound_of_its_ratio_counts_as_in_the_trainer(tmp_path, monkeypatch):
    """Bounds so narrow that rounding decides for each token."""
    narrow = {"mismatch_cap": 1 + 1e-8, "mismatch_low": 1 - 1e-8, "mismatch_mode": "mask"}
    algorithm = {"preset": "grpo", "objective": narrow}
    assert not verified(tmp_path, monkeypatch, algorithm=algorithm).notes


def test_wrong_input_is_named(run, tmp_path, capsys):
    def complaint(*arguments: Any) -> str:
        assert main(["verify", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert f"want the folder of a run, with config.yaml and metrics.jsonl; {tmp_path} has no" in complaint(tmp_path)
    assert "step-000001, step-000002; got 'step-000007'" in complaint(run, "--step", 7)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    last = copy / "checkpoints/step-000002"
    state = json.loads((last / "state.json").read_text())

    def changed(**changes: Any) -> str:
        write_state(last, state | changes)
        return complaint(copy)

    assert f"want the checkpoint of a run of one process; {last} was written by 2 ranks" in changed(world_size=2)
    newer = state["config"] | {"unheard_of": 1}
    assert "which does not read its configuration: unheard_of: unknown key" in changed(config=newer)
    surroundings = state["surroundings"] | {"rlplus": "9.0"}
    write_state(last, state | {"surroundings": surroundings})
    assert main(["verify", str(copy), "--sequences", "1"]) == 0
    assert "rlplus has changed: 9.0 ->" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints")
    assert "want the folder of a run with a checkpoint" in complaint(copy)
    assert checkpoint.latest(run / "checkpoints") == run / "checkpoints/step-000002"


def test_a_step_without_an_update_is_named(run, monkeypatch):
    def right(samples: list[Sample], *_: Any) -> None:
        for sample in samples:
            sample.reward = 1.0

    monkeypatch.setattr(loop, "score", right)
    with pytest.raises(ValueError, match="step 3 has no update to verify: the rewards in each group are equal"):
        verify_run(run)
