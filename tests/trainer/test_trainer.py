"""The gradient of the whole batch however it is cut, every preset, clean stops and clear refusals."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from safetensors.torch import load_file
from teachers import make_teacher
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM, AutoTokenizer
from update_cases import batch_of_samples, check_gradients, naive_gradients, packed

from rlplus.loss import Objective
from rlplus.loss.backends.selection import Choice
from rlplus.train.algorithm import ALGORITHMS, Refill
from rlplus.train.config import Config, load_config
from rlplus.train.learner import has_gradient
from rlplus.train.learner import learner as learner_module
from rlplus.train.learner import policy as policy_module
from rlplus.train.learner.policy import Policy
from rlplus.train.recipe import Update, set_advantages
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import Interrupted, Run, open_run, train
from rlplus.train.trainer.loop import Step


@pytest.fixture
def tiny_run(tmp_path):
    """A run that is built and not yet trained."""
    with open_run(run_config(tmp_path)) as run:
        yield run


def test_a_scratch_model_left_by_an_unfinished_run_is_not_used(tmp_path):
    made = []
    for seed in (0, 1):
        with open_run(run_config(tmp_path, train={"seed": seed})) as run:
            made.append(load_file(run.folder.path / "scratch/model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(made[0][name], made[1][name])


def test_a_folder_that_another_run_writes_into_is_refused(tmp_path, tiny_run):
    with pytest.raises(ValueError, match=r"another run is writing into .*run: wait for its end"):
        train(run_config(tmp_path))


def test_data_that_changed_are_refused_on_resume(tmp_path):
    """Even if the number of rows is the same."""
    config = run_config(tmp_path, train={"steps": 1})
    train(config)
    task = tmp_path / "task.jsonl"
    lines = task.read_text().splitlines()
    task.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    more = changed(config, "train", steps=2)
    with pytest.raises(ValueError, match=r"step-000001 was written by a run on other data than .*task.jsonl: it has"):
        train(more, resume="newest")
    task.write_text("\n".join(lines) + "\n")
    train(more, resume="newest")


def test_a_failure_before_the_update_costs_one_step(tmp_path, monkeypatch):
    """Here: the weights cannot be handed over."""
    push = TransformersEngine.push_weights

    def full(engine: Any, weights: Any, version: int) -> None:
        if version == 3:
            raise OSError(28, "No space left on device")
        push(engine, weights, version)

    monkeypatch.setattr(TransformersEngine, "push_weights", full)
    config = run_config(tmp_path, train={"steps": 5})
    with pytest.raises(OSError, match="No space left"):
        train(config)
    assert (Path(config.output_dir) / "checkpoints/latest").read_text() == "step-000003"


@pytest.mark.parametrize("tokens_per_micro_batch", [16, 32, 64, 4096])
def test_gradient_is_that_of_the_whole_batch_however_it_is_cut(tiny_run, tokens_per_micro_batch):
    samples = batch_of_samples()
    set_advantages(samples, ALGORITHMS["rlplus"])
    config = tiny_run.config
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"tokens_per_micro_batch": tokens_per_micro_batch})}
    )
    batches = packed(tiny_run, samples, config)
    total = sum(len(s.prompt) + len(s.response) for s in samples)
    assert total / tokens_per_micro_batch <= len(batches) <= 2 * total / tokens_per_micro_batch + 1
    lm = tiny_run.policy.engine.module
    for batch in batches:
        lm(batch, tiny_run.policy._loss_op(Objective(), batch)).loss.backward()
    check_gradients(lm, naive_gradients(tiny_run, samples))


def test_update_takes_adamws_step_on_that_gradient(tiny_run):
    samples = batch_of_samples(1)
    set_advantages(samples, ALGORITHMS["rlplus"])
    batches = packed(tiny_run, samples)
    assert len(batches) > 2
    gradients = naive_gradients(tiny_run, samples)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    before = {name: p.clone() for name, p in tiny_run.policy.weights()}
    tiny_run.policy.backward(batches, tiny_run.policy.loss_of(Objective()))
    applied = tiny_run.policy.step()
    assert applied
    assert tiny_run.policy.grad_norm == pytest.approx(float(norm), rel=1e-4)
    clip = min(1.0, 1.0 / float(norm))
    for name, p in tiny_run.policy.weights():
        g = gradients[name] * clip
        want = before[name].double() * (1 - 1e-3 * 0.01) - 1e-3 * g / (g.abs() + 1e-8)  # AdamW's first step
        clear = g.abs() > 1e-5  # where g is rounding noise, so is its sign
        torch.testing.assert_close(p.double()[clear], want[clear], rtol=1e-4, atol=2e-6, msg=name)


def test_nonfinite_gradients_leave_the_weights_alone_and_three_in_a_row_stop_the_run(tiny_run):
    samples = batch_of_samples()
    set_advantages(samples, ALGORITHMS["rlplus"])
    before = {name: p.clone() for name, p in tiny_run.policy.weights()}
    for _ in range(2):
        batches = packed(tiny_run, samples)
        batches[-1].old_logprob = torch.full_like(batches[-1].advantage, -torch.inf)
        outputs = tiny_run.policy.backward(batches, tiny_run.policy.loss_of(Objective()))
        applied = tiny_run.policy.step()
        assert not applied
        assert not torch.stack([out.loss for out in outputs]).sum().isfinite()
        tiny_run.count_nonfinite(applied)
    assert all(torch.equal(p, before[name]) for name, p in tiny_run.policy.weights())
    with pytest.raises(RuntimeError, match=r"3 updates of the policy in a row had a non-finite gradient.*None"):
        tiny_run.count_nonfinite(False)
    batches = packed(tiny_run, samples)
    tiny_run.policy.backward(batches, tiny_run.policy.loss_of(Objective()))
    assert tiny_run.policy.step()
    assert not all(torch.equal(p, before[name]) for name, p in tiny_run.policy.weights())


@pytest.mark.parametrize("gradients", [(True, False, True), (False, True, False), (False, False, True)])
def test_the_old_policy_is_that_before_the_steps_first_change(tiny_run, gradients):
    """An update's own forward pass is the old policy until one has a gradient, whatever later ones have."""
    work = []
    for seed, gradient in enumerate(gradients):
        samples = batch_of_samples(seed)
        set_advantages(samples, ALGORITHMS["grpo"])
        for sample in samples:
            sample.advantage *= gradient
        work.append((Update(samples, ALGORITHMS["grpo"]), packed(tiny_run, samples, algorithm=ALGORITHMS["grpo"])))
    assert [has_gradient(batches) for _, batches in work] == list(gradients)
    Step(tiny_run).remember(work)
    for i, (_, batches) in enumerate(work):
        assert all((micro.old_logprob is not None) == any(gradients[:i]) for micro in batches)


def test_samples_without_a_gradient_take_a_forward_pass_alone(tiny_run):
    samples = batch_of_samples(2)
    for sample in samples:
        if sample.group == 1:
            sample.reward = 1.0
    set_advantages(samples, ALGORITHMS["rlplus"])
    silent = [s for s in samples if s.advantage == 0]
    assert len(silent) == 4
    batches = packed(tiny_run, samples)
    kept = sum(len(s.response) for s in samples if s not in silent)
    assert sum(len(batch.target) for batch in batches if not batch.forward_only) == kept
    assert sum(len(batch.target) for batch in batches) == sum(len(s.response) for s in samples)
    for batch in batches:  # the denominator still counts everybody
        weights = batch.token_weight
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / sum(len(s.response) for s in samples)))


@pytest.mark.parametrize(
    "preset",
    # The recipes of others have whole runs of their own in tests/recipe.
    quick.only(("rlplus", "luffy", "grpo-sft", "relift", "chord", "sft"), ALGORITHMS),
)
def test_every_preset_trains(tmp_path, preset, monkeypatch):
    monkeypatch.setattr(Refill, "keeps", lambda *_: True)  # an untrained model solves nothing
    recipe = {"template": "{prompt}{demonstration}"} if preset in ("opsd", "sdft", "sdpo") else {}
    if preset in ("gkd", "opd"):
        recipe = {"teacher": str(make_teacher(tmp_path))}
    algorithm = {"preset": preset, "recipe": recipe}
    config = run_config(tmp_path, algorithm=algorithm, train={"prompts_per_update": 2})
    folder = train(config)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2]
    algorithm = ALGORITHMS[preset]
    assert ("reward/external" in rows[0]) == algorithm.demonstrates_in_place
    assert ("reward/internal" in rows[0]) == algorithm.generates
    if algorithm.demonstrates_in_place and algorithm.generates:  # the demonstration's slot is not generated
        assert rows[0]["reward/mean"] == pytest.approx(
            (3 * rows[0]["reward/internal"] + rows[0]["reward/external"]) / 4
        )
    if algorithm.demonstrates or "actor/grad_norm" in rows[0]:
        assert rows[0]["actor/grad_norm"] > 0
    assert rows[0].get("mismatch/mean", 0) < 1e-5


def test_a_run_leaves_all_that_is_promised(tmp_path):
    config = run_config(tmp_path, checkpoint={"every": 1, "keep": 1})
    folder = train(config)
    assert load_config(folder / "config.yaml") == config
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for name in (
        "generated_tokens", "reward/mean", "reward/internal", "reward/external", "batch/solve_all", "batch/solve_none",
        "response_length/mean", "response_length/max", "response_length/clipped", "actor/loss", "actor/loss_internal",
        "actor/loss_external", "actor/entropy", "actor/entropy_internal", "actor/grad_norm", "actor/lr",
        "actor/ratio_external_mean", "actor/prob_external", "actor/prob_internal", "actor/kl_old",
        "actor/clip_fraction_low", "actor/clip_fraction_high", "actor/active_rows",
        "mismatch/mean", "mismatch/max", "mismatch/outside_10pct",
        "time/generate", "time/score", "time/old_logprob", "time/update", "time/sync", "time/step", "tokens_per_second",
    ):  # fmt: skip
        assert name in row, name
    assert [p.name for p in (folder / "checkpoints").glob("step-*")] == ["step-000002"]
    assert list((folder / "tensorboard").iterdir())
    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer("2+2=").input_ids) == "2+2="
    start = load_file(folder / "scratch/model.safetensors")
    assert any(not torch.equal(p, start[name]) for name, p in lm.named_parameters())


def test_generated_tokens_end_the_run(tmp_path, capsys):
    folder = train(run_config(tmp_path, train={"steps": 50, "generated_tokens": 200}))
    rows = metrics(folder)
    assert rows[-2]["generated_tokens"] < 200 <= rows[-1]["generated_tokens"]
    end = f"{len(rows)} of at most 50 steps done, with train.generated_tokens=200; model in "
    assert end in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_and_leaves_a_checkpoint(tmp_path, number):
    config = run_config(
        tmp_path, train={"steps": 40}, evaluation={"data": {"path": "-", "max_prompt_length": 8}, "every": 1}
    )

    def interrupt(run: Run) -> dict[str, float]:
        if run.progress.step == 1:
            os.kill(os.getpid(), number)
        return {}

    handler = signal.getsignal(number)
    with pytest.raises(Interrupted) as stop:
        train(config, evaluate=interrupt)
    assert stop.value.signal == number
    folder = Path(config.output_dir)
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    assert signal.getsignal(number) is handler
    assert not (folder / "model").exists()
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})})
    train(config, resume="newest")
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    assert (folder / "model").exists()


def changed(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def test_refusals_say_what_to_do(tmp_path):
    config = run_config(tmp_path, train={"steps": 1})
    train(config)
    with pytest.raises(ValueError, match=r"already holds a run, at step-000001: resume it"):
        train(config)
    with pytest.raises(ValueError, match=r"another configuration: train.lr was 0.001, is 0.5"):
        train(changed(config, "train", lr=0.5), resume="newest")
    wrong = changed(config, "model", overrides={"rope_thta": 1.0}).model_copy(
        update={"output_dir": str(tmp_path / "b")}
    )
    with pytest.raises(ValueError, match=r"model.overrides.rope_thta: want a field of Qwen2Config"):
        train(wrong)
    with pytest.raises(ValueError, match=r"want model.path a Hugging Face folder or hub name; got '.*/nowhere'"):
        train(run_config(tmp_path, "c", model={"scratch": None, "path": str(tmp_path / "nowhere")}))
    short = run_config(tmp_path, "e", model={"overrides": {"max_position_embeddings": 12}})
    with pytest.raises(ValueError, match=r"have 16 tokens together, the model has 12 positions"):
        train(short)
    unlearnable = run_config(tmp_path, "d", reward={"pattern": r"\[(.*)\]"})
    with pytest.raises(ValueError, match=r"0 of 6 pass the run's own reward; dropped: 6 unparsed; want at most"):
        train(unlearnable)


def test_overrides_reach_the_model(tmp_path):
    config = run_config(tmp_path, train={"steps": 1}, model={"overrides": {"rope_theta": 40000.0}})
    with open_run(config) as run:
        assert run.policy.engine.module.lm.config.rope_parameters["rope_theta"] == 40000.0
    assert replace(run.recipe.algorithm) == run.recipe.algorithm


def test_a_forward_pass_that_is_not_finite_is_a_skipped_update_and_no_mismatch(tmp_path, monkeypatch):
    accumulate, calls = Policy.backward, []

    def poisoned(policy: Policy, *args: Any) -> Any:
        calls.append(1)
        norm = dict(policy.engine.module.lm.named_parameters())["model.norm.weight"]
        kept = norm.detach().clone()
        with torch.no_grad():
            norm.mul_(float("nan") if len(calls) == 2 else 1.0)
        outputs = accumulate(policy, *args)
        with torch.no_grad():
            norm.copy_(kept)
        return outputs

    monkeypatch.setattr(Policy, "backward", poisoned)
    rows = metrics(train(run_config(tmp_path, train={"steps": 3})))
    assert [row["actor/nonfinite"] for row in rows] == [0, 1, 0]
    assert "mismatch/mean" not in rows[1]


def test_the_backend_is_checked_before_the_model_is_loaded_and_agreed_on_after_its_first_call(
    tmp_path, monkeypatch, capsys
):
    """A check needs memory, and the first call may refuse what the check passed."""
    events = []

    def noted(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (events.append(k.get("backend", name)), original(*a, **k))[1])

    noted(learner_module, "load_model")
    noted(policy_module, "linear_logprob")
    answers = iter([Choice("triton", "passed"), Choice("torch", "the first call differs")])
    monkeypatch.setattr(policy_module, "choose", lambda *_: (events.append("choose"), next(answers))[1])
    with open_run(run_config(tmp_path)) as run:
        assert events == ["choose", "load_model", "auto", "choose"]
        assert run.policy.nonfinite() == ""
        assert events[4:] == ["torch"]
    assert "head by backend 'torch': the first call differs\n" in capsys.readouterr().err


def test_the_learning_rate_is_that_of_the_logged_update(tmp_path):
    rows = metrics(train(run_config(tmp_path, train={"steps": 3, "warmup_steps": 2, "lr": 1e-3})))
    assert [row["actor/lr"] for row in rows] == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_truncated_importance_weights_are_logged(tmp_path, monkeypatch):
    """The share of sampled tokens that the trainer finds more likely than the engine did, by more than the cap."""
    generate = TransformersEngine.generate

    def skewed(engine: Any, *args: Any, **options: Any) -> Any:
        answers = generate(engine, *args, **options)
        for group in answers:
            for completion in group:
                completion.logprob[::2] = [value - 0.3 for value in completion.logprob[::2]]
        return answers

    monkeypatch.setattr(TransformersEngine, "generate", skewed)

    def draw_rewards(samples: Any, *_: Any) -> None:
        for i, sample in enumerate(samples):
            sample.reward = float(i % 2)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    sections: dict[str, Any] = {"rollout": {"max_logprob_gap": 1.0}, "train": {"steps": 1}}
    capped = {"preset": "grpo", "objective": {"mismatch_cap": 1.2}}
    (row,) = metrics(train(run_config(tmp_path, "capped", algorithm=capped, **sections)))
    assert 0.5 <= row["mismatch/truncated"] < 0.6  # every other token, the first included
    assert row["mismatch/truncated"] == pytest.approx(row["mismatch/outside_10pct"])
    (row,) = metrics(train(run_config(tmp_path, "free", algorithm={"preset": "grpo"}, **sections)))
    assert "mismatch/truncated" not in row
