"""Generating batches while others train: so many steps behind, exactly, also over a resume and a killed engine."""

import json
import os
import signal
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import processes
import pytest
import quick
import torch
from engine_runs import changed, engine_in_this_process, fail, model, same, torchrun, whole_groups
from safetensors.torch import load_file
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM
from update_cases import packed

import rlplus.train.rollout.process_engine
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.learner import forward_batches
from rlplus.train.recipe import Batch, set_advantages
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import Run, open_run, train
from rlplus.train.trainer.loop import use_engine_logprob
from rlplus.train.trainer.run import OF_RANK, STATE


def test_overlap_refuses_a_cap_that_would_do_nothing(tmp_path):
    capped = {"preset": "grpo", "objective": {"mismatch_cap": 2.0}}
    with pytest.raises(ValueError, match=r"mismatch_cap: no use with train.overlap"):
        run_config(tmp_path, train={"overlap": True}, rollout={"mode": "process"}, algorithm=capped)


def test_overlap_is_refused_in_colocated_mode(tmp_path):
    with pytest.raises(ValueError, match=r"train.overlap .*: want rollout.mode process or server; got colocated"):
        run_config(tmp_path, train={"overlap": True})


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_in_this_process(monkeypatch)


def overlapping(folder: Path, output: str, steps: int, **sections: Any) -> Config:
    train_section = {"steps": steps, "overlap": True, "prompts_per_update": 2} | sections.pop("train", {})
    rollout = {"mode": "process"} | sections.pop("rollout", {})
    return run_config(folder, output, train=train_section, rollout=rollout, **sections)


@pytest.fixture
def lottery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)


def draw_rewards(samples: Any, examples: Any, scorer: Any, decode: Any) -> None:
    """A reward that an untrained model gets every other time, so that every algorithm has a gradient."""
    for sample in samples:
        sample.reward = float(sample.external or sum(sample.response) % 2)


def trainer_logprob(run: Run, samples: list[Sample]) -> list[torch.Tensor]:
    """The logprobs of each response under the trainer's weights."""
    budget = run.config.train.tokens_per_micro_batch
    found = {}
    for batch in forward_batches(samples, run.config, run.pad_id, run.policy.device, budget):
        values = run.policy.logprob(batch)
        found |= {i: values[batch.sequence == i] for i in batch.sequence.tolist()}
    return [found[i] for i in range(len(samples))]


@torch.no_grad()
def check_logprob(run: Run, samples: list[Sample], sampler: dict[str, torch.Tensor]) -> None:
    """The logprobs that came with the samples are the sampler's in float64, as nearly as the trainer's own are."""
    exact = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
    exact.load_state_dict({name: weight.double() for name, weight in sampler.items()}, strict=False)  # a tied head
    given_error = own_error = size = 0.0
    for sample, own in zip(samples, trainer_logprob(run, samples), strict=True):
        logits = exact(torch.tensor([[*sample.prompt, *sample.response]])).logits[0, len(sample.prompt) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(sample.response)[:, None])[:, 0]
        given = torch.tensor(sample.engine_logprob, dtype=torch.float64)
        given_error = max(given_error, float((given - want).abs().max()))
        own_error = max(own_error, float((own.double() - want).abs().max()))
        size = max(size, float(logits.abs().max() + logits.logsumexp(-1).abs().max()))
    assert given_error <= 2 * own_error + 8 * torch.finfo(torch.float32).eps * size


def version(step: int, overlap: int) -> int:
    """The version of the weights that sample a step's batch: every `overlap`-th step's sample the batches behind it."""
    return max(0, step - 1) // overlap * overlap


def simulated(config: Config) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Each batch from the weights that it should have, with their logprobs, checked against float64: no Rollouts."""
    plain = changed(changed(config, "train", overlap=0), "rollout", mode="colocated")
    with open_run(plain) as run:
        history = [{name: p.clone() for name, p in run.policy.weights()}]
        rewards = []

        def set_weights(weights: dict[str, torch.Tensor]) -> None:
            with torch.no_grad():
                for name, p in run.policy.weights():
                    p.copy_(weights[name])

        for step in range(config.train.steps):
            sampler = history[version(step, config.train.overlap)]
            run.engine.engine.push_weights(iter(sampler.items()), step)
            examples = [run.examples[i] for i in run.sampler.next()]
            samples = whole_groups(run.engine.engine, examples, run.recipe.ask(examples), plain, run.respond, step)
            draw_rewards(samples, examples, run.scorer, run.decode)
            rewards.append([s.reward for s in samples])
            set_advantages(samples, run.recipe.algorithm)
            now = {name: p.clone() for name, p in run.policy.weights()}
            set_weights(sampler)
            demonstrations = [s for s in samples if s.external]
            for sample, logprob in zip(demonstrations, trainer_logprob(run, demonstrations), strict=True):
                sample.engine_logprob = logprob.tolist()
            check_logprob(run, samples, sampler)
            set_weights(now)
            step_batch = Batch(examples, samples, 0.0)
            updates = [packed(run, update.samples) for update in run.recipe.updates(step_batch)]
            for batches in updates:
                for batch in batches:
                    use_engine_logprob(batch)
                if batches:
                    run.policy.backward(batches, run.policy.loss_of(run.recipe.algorithm.objective))
                    run.policy.step()
            history.append({name: p.clone() for name, p in run.policy.weights()})
        return history[-1], rewards


@pytest.mark.parametrize(("preset", "overlap"), quick.first(1, [("rlplus", 3), ("rlplus", 1), ("grpo", 1)]))
def test_overlap_is_training_some_steps_behind(tmp_path, in_thread, lottery, preset, overlap):
    """The weights after 5 steps equal a delay's written out by hand, and differ from no delay's."""
    changes = {"lr": 3e-3, "overlap": overlap}
    config = overlapping(tmp_path, "overlap", 5, algorithm={"preset": preset}, train=changes)
    folder = train(config)
    want, rewards = simulated(config.model_copy(update={"output_dir": str(tmp_path / "simulated")}))
    rows = metrics(folder)
    assert [row["reward/mean"] for row in rows] == pytest.approx([sum(r) / len(r) for r in rewards])
    got = model(folder)
    start = load_file(folder / "scratch/model.safetensors")
    plain = changed(changed(config, "train", overlap=0), "rollout", mode="colocated")
    undelayed = model(train(plain.model_copy(update={"output_dir": str(tmp_path / "plain")})))
    for name, p in got.items():
        assert not torch.equal(p, start[name])
        assert not torch.equal(p, undelayed[name]), "the comparison can fail"
        assert torch.equal(p, want[name]), name
    # The mini-batches' ratios are to the sampler: from the second step on the policy has moved away from it.
    pushed = [row["mismatch/probe"] for row in rows if "mismatch/probe" in row]
    assert max(pushed) < 1e-5
    assert len(pushed) == len(range(0, 5, overlap))
    assert "mismatch/mean" not in rows[0]
    assert [row["batch/staleness"] for row in rows] == [step - version(step, overlap) for step in range(5)]


@pytest.mark.parametrize(
    ("preset", "overlap"),
    [("rlplus", 3), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("rlplus", "grpo"))],
)
def test_resume_with_overlap_is_bitwise(tmp_path, in_thread, lottery, preset, overlap):
    """Also over an epoch boundary (6 prompts, 4 per step), and when a finished run is prolonged."""
    sections = {"algorithm": {"preset": preset}, "train": {"overlap": overlap}}
    whole = train(overlapping(tmp_path, "whole", 6, **sections))
    config = overlapping(tmp_path, "parts", 2, **sections)
    train(config)
    train(changed(config, "train", steps=4), resume="newest")
    parts = train(changed(config, "train", steps=6), resume="newest")
    assert same(whole, parts)
    assert metrics(whole) == metrics(parts)


def test_a_resumed_run_is_complete_and_has_the_state_that_was_saved(tmp_path, in_thread):
    """Every part has its own, in the file that the part belongs to."""
    config = overlapping(tmp_path, "run", 1)
    saved = train(config) / "checkpoints/step-000001"
    shared, own = json.loads((saved / "state.json").read_text()), torch.load(saved / "rank-0.pt", weights_only=False)
    with open_run(changed(config, "train", steps=2), "newest") as run:
        states = {name: getattr(run, name).state() for name in STATE}
        assert own == {name: states[name] for name in OF_RANK}
        assert own["rollouts"][0]["version"] == 0, "want a batch that was generated ahead"
        assert shared["sampler"] == states["sampler"] == {"n": 6, "seed": 0, "drawn": 8}
        assert shared["generated"] > 0
        assert {name: shared[name] for name in states["progress"]} == states["progress"]
        assert run.progress.step == 1
        with pytest.raises(FrozenInstanceError):
            run.sampler = None


def test_the_batch_ahead_is_generated_while_the_policy_trains(tmp_path, in_thread, monkeypatch):
    """Neither side waits for the other: an update meets the generation of the next batch under way."""
    generating, update_seen = threading.Event(), threading.Event()
    original_generate, original_update = (
        TransformersEngine._generate_batch,
        rlplus.train.learner.policy.Policy.backward,
    )
    meetings = []

    def slow_generate(engine: Any, batch: Any, sampling: Any) -> Any:
        probe = max(request.max_tokens for request in batch) == 2
        if not probe and threading.current_thread() is not threading.main_thread():
            generating.set()
            assert update_seen.wait(processes.PATIENCE_S)
            generating.clear()
            update_seen.clear()
        return original_generate(engine, batch, sampling)

    def update(policy: Any, batches: Any, *rest: Any) -> Any:
        if not update_seen.is_set():
            meetings.append(generating.wait(processes.PATIENCE_S))
            update_seen.set()
        return original_update(policy, batches, *rest)

    monkeypatch.setattr(TransformersEngine, "_generate_batch", slow_generate)
    monkeypatch.setattr(rlplus.train.learner.policy.Policy, "backward", update)
    train(overlapping(tmp_path, "run", 3, train={"prompts_per_update": 4}))
    assert meetings == [True] * 3


@pytest.mark.parametrize("overlap", quick.first(1, [3, 1]))
def test_a_failure_ahead_ends_the_run_where_it_is_wanted(tmp_path, in_thread, monkeypatch, overlap):
    fail(monkeypatch, 3)
    config = overlapping(tmp_path, "run", 5, train={"overlap": overlap})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(config)
    assert [row["step"] for row in metrics(Path(config.output_dir))] == [1, 2]


def test_a_batch_that_is_lost_takes_none_with_it_that_is_there(tmp_path, in_thread, lottery, monkeypatch):
    """The checkpoint after the first step holds the second one's batch; the third one's is generated again."""
    drawn: list[tuple[list[int], float]] = []
    draw = rlplus.train.trainer.rollouts.Rollouts.draw

    def recorded(rollouts: Any, step: int, tally: Any) -> Any:
        batch = draw(rollouts, step, tally)
        drawn.append(([example.index for example in batch.examples], tally.means["batch/staleness"][0]))
        return batch

    monkeypatch.setattr(rlplus.train.trainer.rollouts.Rollouts, "draw", recorded)
    sections: dict[str, Any] = {"train": {"overlap": 3}, "checkpoint": {"every": 1}}
    train(overlapping(tmp_path, "whole", 5, **sections))
    whole, drawn[:] = list(drawn), []
    assert [stale for _, stale in whole] == [0, 1, 2, 3, 1]
    config = overlapping(tmp_path, "broken", 5, **sections)
    with monkeypatch.context() as patch:
        fail(patch, 3)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            train(config)
    assert len(drawn) == 1
    train(config, resume="newest")
    assert [prompts for prompts, _ in drawn] == [prompts for prompts, _ in whole]
    assert [stale for _, stale in drawn] == [0, 1, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_engine_killed_ahead_costs_no_step(tmp_path, monkeypatch, kind):
    """A real process, killed once while it generates ahead: the run ends as an undisturbed one."""
    engine = {"engine": kind, "kv_cache_memory_mb": 16}
    whole = train(overlapping(tmp_path, "whole", 3, rollout=engine))
    original = rlplus.train.rollout.process_engine.ProcessEngine.generate
    killed = []

    def generate_and_kill(engine: Any, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not killed:
            killed.append(engine)
            threading.Timer(0.02, os.kill, (engine.pid, signal.SIGKILL)).start()
        return original(engine, *args)

    monkeypatch.setattr(rlplus.train.rollout.process_engine.ProcessEngine, "generate", generate_and_kill)
    broken = train(overlapping(tmp_path, "broken", 3, rollout=engine))
    assert killed[0].restarts == 1
    assert same(whole, broken)
    assert metrics(whole) == metrics(broken)


@pytest.mark.slow
def test_overlap_on_two_ranks_resumes_bitwise(tmp_path):
    """ZeRO-3, and half of the prompts without a demonstration: the ranks differ in how many they pass forward."""
    folders = []
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for part in steps:
            deepspeed = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
            changes = {"zero_stage": 3, "deepspeed": deepspeed, "tokens_per_micro_batch": 16, "overlap": 2}
            data = {"max_dropped_share": 1.0, "demonstration": "demonstration"}
            config = overlapping(tmp_path, name, part, train=changes)
            task = tmp_path / "task.jsonl"
            rows = [json.loads(line) for line in task.read_text().splitlines()]
            rows = [row | ({"demonstration": "<wrong>"} if i % 2 else {}) for i, row in enumerate(rows)]
            task.write_text("".join(json.dumps(row) + "\n" for row in rows))
            config = changed(config, "data", path=str(task), **data)
            torchrun(config, "--resume=auto")
        folders.append(Path(config.output_dir))
    assert same(*folders)
    assert metrics(folders[0]) == metrics(folders[1])
