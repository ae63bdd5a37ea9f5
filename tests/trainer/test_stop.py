"""A signal in the middle of a step: the step is given up where the policy has not changed yet, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import quick
from engine_runs import engine_in_this_process, fail, in_the_middle_of_vllms, same
from trainer_runs import by_torchrun, environment, metrics, on_ranks, run_config

import rlplus
from rlplus.train.config import Config
from rlplus.train.learner.policy import Policy
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import Interrupted, train
from rlplus.train.trainer.engine import PROBE_TOKENS, EngineFailed

PLACES = ["generate", "first micro-batch", "second micro-batch"]


def newest(folder: Path) -> str:
    return (folder / "checkpoints/latest").read_text()


def kill_at(monkeypatch: pytest.MonkeyPatch, place: str, occasion: int) -> None:
    """SIGTERM to this process, once, on the given occasion at the place."""
    owner: Any = TransformersEngine if place == "generate" else Policy
    name = "_generate_batch" if place == "generate" else "_loss_op"
    original, occasions = getattr(owner, name), []

    def killing(self: Any, *args: Any, **options: Any) -> Any:
        if place != "generate" or args[0][0].max_tokens != PROBE_TOKENS:
            occasions.append(1)
            if len(occasions) == occasion:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, killing)


def two_micro_batches(folder: Path, output: str, **train_section: Any) -> Config:
    """A run of four steps, one update each, of at least two micro-batches."""
    return run_config(folder, output, train={"steps": 4, "tokens_per_micro_batch": 32} | train_section)


def train_counting(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Path, list[int]]:
    """The folder of the whole run and the micro-batches of each of its steps."""
    counts: list[int] = []
    accumulate = Policy.backward

    def count(policy: Policy, batches: Any, *rest: Any) -> Any:
        counts.append(len(batches))
        return accumulate(policy, batches, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "backward", count)
        folder = train(config)
    assert min(counts) >= 2
    return folder, counts


@pytest.mark.parametrize("zero_stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
@pytest.mark.parametrize("place", quick.only(PLACES[1:2], PLACES))
def test_a_step_that_is_given_up_is_done_again_bit_for_bit(tmp_path, monkeypatch, place, zero_stage):
    """The third of four steps; the checkpoint is the second one's."""
    whole, counts = train_counting(monkeypatch, two_micro_batches(tmp_path, "whole", zero_stage=zero_stage))
    config = two_micro_batches(tmp_path, "parts", zero_stage=zero_stage)
    with monkeypatch.context() as patch:
        kill_at(patch, place, 3 if place == "generate" else sum(counts[:2]) + PLACES.index(place))
        with pytest.raises(Interrupted) as stop:
            train(config)
    folder = Path(config.output_dir)
    assert stop.value.signal == signal.SIGTERM
    assert newest(folder) == "step-000002"
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    train(config, resume="newest")
    assert same(whole, folder)
    assert metrics(whole) == metrics(folder)


def test_the_first_step_can_be_given_up(tmp_path, monkeypatch):
    """There is nothing to save then: the run can be started again, with --resume or without."""
    whole = train(run_config(tmp_path, "whole"))
    config = run_config(tmp_path, "parts")
    with monkeypatch.context() as patch:
        kill_at(patch, "generate", 1)
        with pytest.raises(Interrupted):
            train(config)
    assert not (Path(config.output_dir) / "checkpoints").exists()
    assert same(whole, train(config))


def test_a_step_that_has_changed_the_policy_is_finished(tmp_path, monkeypatch):
    """Two updates per step: a signal in the second one's backward pass."""
    whole = train(run_config(tmp_path, "whole", train={"prompts_per_update": 2}))
    config = run_config(tmp_path, "parts", train={"prompts_per_update": 2})
    with monkeypatch.context() as patch:
        step = Policy.step

        def step_and_kill(policy: Policy, *limit: float) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            patch.setattr(Policy, "step", step)
            return step(policy, *limit)

        patch.setattr(Policy, "step", step_and_kill)
        with pytest.raises(Interrupted):
            train(config)
    folder = Path(config.output_dir)
    assert newest(folder) == "step-000001"
    assert [row["step"] for row in metrics(folder)] == [1]
    assert same(whole, train(config, resume="newest"))
    assert metrics(whole) == metrics(folder)


@pytest.mark.parametrize(
    ("place", "overlap"), quick.first(1, ((PLACES[2], 2), (PLACES[1], 1), (PLACES[2], 1), (PLACES[2], 3)))
)
def test_a_step_given_up_with_a_batch_ahead(tmp_path, monkeypatch, place, overlap):
    """The step's batch, and those that came before it began, go into the checkpoint; others are generated again."""
    engine_in_this_process(monkeypatch)
    sections: dict[str, Any] = {
        "rollout": {"mode": "process"},
        "train": {"steps": 4, "overlap": overlap, "tokens_per_micro_batch": 32},
    }
    whole, counts = train_counting(monkeypatch, run_config(tmp_path, "whole", **sections))
    config = run_config(tmp_path, "parts", **sections)
    with monkeypatch.context() as patch:
        kill_at(patch, place, sum(counts[:2]) + PLACES.index(place))
        with pytest.raises(Interrupted):
            train(config)
    folder = Path(config.output_dir)
    assert newest(folder) == "step-000002"
    train(config, resume="newest")
    assert same(whole, folder)
    assert metrics(whole) == metrics(folder)


@pytest.mark.parametrize("apart", [False, True])
def test_a_second_signal_does_not_wait_unless_it_is_the_same_one(tmp_path, monkeypatch, apart):
    """A terminal and a launcher both signal a rank for one Ctrl-C: these count as one and cost no checkpoint."""
    config = run_config(tmp_path)
    save = rlplus.train.checkpoint.save

    def signalled_again(*args: Any, **options: Any) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return save(*args, **options)

    with monkeypatch.context() as patch:
        kill_at(patch, "generate", 2)
        patch.setattr(rlplus.train.checkpoint, "save", signalled_again)
        if apart:
            patch.setattr("rlplus.train.trainer.progress.ONE_SIGNAL_S", 0.0)
        with pytest.raises(Interrupted) as stop:
            train(config)
    assert stop.value.signal == (signal.SIGINT if apart else signal.SIGTERM)
    assert ("at once by signal 2, without a checkpoint" in str(stop.value)) == apart
    assert (Path(config.output_dir) / "checkpoints/latest").exists() != apart


@pytest.mark.slow
def test_a_terminal_that_is_gone_costs_no_checkpoint(tmp_path):
    """Ctrl-C on `rlplus train … 2>&1 | tee log` ends tee, too: whatever is written to the pipe then fails."""
    config = run_config(tmp_path, train={"steps": 100_000})
    path, folder = tmp_path / "run.yaml", Path(config.output_dir)
    path.write_text(config.to_yaml())
    command, lines = [sys.executable, "-m", "rlplus", "train", str(path)], folder / "metrics.jsonl"
    with processes.started(command, env=environment(), stderr=subprocess.PIPE) as process:
        processes.wait_until(lambda: lines.exists() and lines.read_text().count("\n") >= 2, process)
        assert process.stderr is not None
        process.stderr.close()
        logged = lines.read_text().count("\n")
        processes.wait_until(lambda: process.poll() is not None or lines.read_text().count("\n") >= logged + 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(processes.PATIENCE_S) == 128 + signal.SIGINT
    assert newest(folder) == f"step-{lines.read_text().count(chr(10)):06d}"


def test_an_engine_that_gives_up_costs_one_step(tmp_path, monkeypatch):
    """The steps before it are in a checkpoint, though none was due."""
    fail(monkeypatch, 3, 4)
    config = run_config(tmp_path, train={"steps": 4})
    with pytest.raises(EngineFailed, match="illegal memory access"):
        train(config)
    assert newest(Path(config.output_dir)) == "step-000002"
    monkeypatch.undo()
    train(config, resume="newest")
    assert same(train(run_config(tmp_path, "whole", train={"steps": 4})), Path(config.output_dir))


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_is_interrupted_in_the_middle_of_generating(tmp_path, monkeypatch):
    rollout = {"engine": "vllm", "kv_cache_memory_mb": 16}
    whole = train(run_config(tmp_path, "whole", rollout=rollout))
    config = run_config(tmp_path, "parts", rollout=rollout)
    with monkeypatch.context() as patch:
        in_the_middle_of_vllms(patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(config)
    folder = Path(config.output_dir)
    assert newest(folder) == "step-000001"
    assert same(whole, train(config, resume="newest"))
    assert metrics(whole) == metrics(folder)


ONE_IS_SIGNALLED = """
import os, signal, sys, time
from rlplus.train.config import load_config
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import Interrupted, run_parts, train
from rlplus.train.trainer.engine import PROBE_TOKENS
original, calls = TransformersEngine._generate_batch, []
def generate(engine, batch, sampling):
    if batch[0].max_tokens != PROBE_TOKENS:
        calls.append(1)
        if len(calls) == 2 and run_parts.dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    return original(engine, batch, sampling)
TransformersEngine._generate_batch = generate
try:
    train(load_config(sys.argv[1]))
except Interrupted as stop:
    print("interrupted by", stop.signal, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_signal_to_one_rank_gives_up_the_step_of_all(tmp_path, zero_stage):
    section = {"steps": 3, "zero_stage": zero_stage}
    config = run_config(tmp_path, "parts", train=section)
    path, script = tmp_path / "parts.yaml", tmp_path / "signalled.py"
    path.write_text(config.to_yaml())
    script.write_text(ONE_IS_SIGNALLED)
    assert on_ranks(script, path).count("interrupted by 15") == 2
    folder = Path(config.output_dir)
    assert newest(folder) == "step-000001"
    on_ranks("-m", "rlplus", "train", path, "--resume")
    whole = run_config(tmp_path, "whole", train=section)
    (tmp_path / "whole.yaml").write_text(whole.to_yaml())
    on_ranks("-m", "rlplus", "train", tmp_path / "whole.yaml")
    assert same(Path(whole.output_dir), folder)
    assert metrics(Path(whole.output_dir)) == metrics(folder)


@pytest.mark.slow
def test_torchrun_waits_as_long_as_it_is_told(tmp_path):
    """SIGTERM to the launcher, as a cluster sends it, in the middle of a step: a checkpoint, and no rank is left."""
    config = run_config(tmp_path, train={"steps": 100_000})
    path, folder = tmp_path / "run.yaml", Path(config.output_dir)
    path.write_text(config.to_yaml())
    command = by_torchrun("--shutdown-timeout", 300, "-m", "rlplus", "train", path)
    lines = folder / "metrics.jsonl"
    with processes.started(command, env=environment(), stderr=subprocess.PIPE) as process:
        processes.wait_until(lambda: lines.exists() and lines.read_text().count("\n") >= 3, process)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=processes.PATIENCE_S)
    assert process.returncode != 0
    assert "--resume goes on from here" in error
    assert newest(folder) == f"step-{json.loads(lines.read_text().splitlines()[-1])['step']:06d}"
