"""A failing run keeps every finished step, as an undisturbed run would have it."""

import json
import os
from pathlib import Path
from typing import Any

import processes
import pytest
from engine_runs import changed, fail, launched, same
from trainer_runs import metrics, run_config

from rlplus.common.errors import RunFailed, SharedFailure
from rlplus.train import checkpoint
from rlplus.train.config import Config
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import evaluator, train
from rlplus.train.trainer.metrics import RunLog
from rlplus.train.trainer.rollouts import Rollouts

# Fails on the answer "fails", and on one rank once it finds a file of that rank's name; else a lottery.
GRADER = """
import os
def reward(text, answer):
    if answer == "fails" or (os.path.exists("rank " + os.environ.get("RANK", "")) and not text.startswith("<")):
        raise KeyError("no such rule")
    return float(text.startswith("<") or sum(map(ord, text)) % 2)
"""


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The section reward of a run that ends where its grader fails. The current directory has the grader."""
    (tmp_path / "own_grader.py").write_text(GRADER)
    monkeypatch.chdir(tmp_path)
    return {"kind": None, "pattern": None, "function": "own_grader:reward", "on_failure": "error"}


def evaluated(folder: Path, output: str, reward: dict[str, Any], every: int, steps: int) -> Config:
    """A run whose evaluations fail: on two ranks at the second one's problem."""
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": "1+1=", "answer": answer}) + "\n" for answer in ("2", "fails")))
    evaluation = {"data": {"path": str(problems), "max_prompt_length": 8}, "every": every, "samples": 1}
    return run_config(folder, output, reward=reward, evaluation=evaluation, train={"steps": steps})


def steps_in(log: Path) -> int:
    return log.read_text().count("\n")


def newest(config: Config) -> str | None:
    last = checkpoint.latest(Path(config.output_dir) / "checkpoints")
    return last and last.name


def test_an_evaluation_whose_grader_fails_costs_no_step(tmp_path: Path, grader: dict[str, Any]) -> None:
    """Nor is it the engine that is blamed. Resumed without it, the run ends as one that was never evaluated."""
    config = evaluated(tmp_path, "run", grader, every=2, steps=3)
    said = r"^responses could not be graded: rank 0: the grader failed twice on a text, .*: crash, KeyError: 'no such"
    with pytest.raises(SharedFailure, match=said):
        train(config, evaluate=evaluator(config))
    assert newest(config) == "step-000002"
    assert [row["step"] for row in metrics(Path(config.output_dir))] == [1, 2]
    folder = train(changed(config, "evaluation", every=0), resume="newest")
    whole = train(evaluated(tmp_path, "whole", grader, every=0, steps=3))
    assert same(whole, folder)
    assert metrics(whole) == metrics(folder)


@pytest.mark.slow
def test_a_grader_that_fails_on_one_rank_costs_neither_a_step(tmp_path: Path, grader: dict[str, Any]) -> None:
    """In an evaluation, whose step is kept; then in a step, which is given up, with the steps before it kept."""
    config = evaluated(tmp_path, "run", grader, every=2, steps=100_000)

    def fails(config: Config, said: str, when: int) -> None:
        folder = Path(config.output_dir)
        log = folder / "metrics.jsonl"
        with launched(config, "--resume=auto") as ranks:
            processes.wait_until(lambda: ranks.poll() is not None or (log.exists() and steps_in(log) >= when))
            (tmp_path / "rank 1").touch()
            _, error = ranks.communicate(timeout=processes.PATIENCE_S)
        (tmp_path / "rank 1").unlink()
        assert error.count(f"rlplus train: {said}: rank 1: the grader failed twice on a text") == 2, error[-4000:]
        assert newest(config) == f"step-{len(metrics(folder)):06d}"

    fails(config, "responses could not be graded", when=100_000)
    assert newest(config) == "step-000002"
    fails(changed(config, "evaluation", every=0), "the step's responses could not be graded", when=4)
    assert newest(config) >= "step-000004"


def test_metrics_that_cannot_be_written_leave_no_wrong_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished step is not given up: its prompts would be drawn, and trained on, once more."""
    sections: dict[str, Any] = {"train": {"steps": 3}, "checkpoint": {"every": 1}}
    whole = train(run_config(tmp_path, "whole", **sections))
    config, write = run_config(tmp_path, "broken", **sections), RunLog.write

    def failing(log: RunLog, step: int, *rest: Any) -> None:
        if step == 2:
            raise OSError(5, "Input/output error")
        write(log, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", failing)
        with pytest.raises(OSError, match="Input/output error"):
            train(config)
    assert newest(config) == "step-000001"
    folder = train(config, resume="newest")
    assert same(whole, folder)
    assert metrics(whole) == metrics(folder)


@pytest.mark.slow
def test_an_engine_that_fails_ahead_of_an_evaluation_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished step is in a checkpoint, and the prompts of the batch that was lost are drawn again."""

    def make(config: Any, *rest: Any, seed: int, **settings: Any) -> TransformersEngine:
        return TransformersEngine(config, *rest, **settings)

    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_engine", make)
    drawn: list[list[int]] = []
    draw = Rollouts.draw

    def recorded(rollouts: Rollouts, *arguments: Any) -> Any:
        batch = draw(rollouts, *arguments)
        drawn.append([example.index for example in batch.examples])
        return batch

    monkeypatch.setattr(Rollouts, "draw", recorded)
    sections: dict[str, Any] = {
        "rollout": {"mode": "process"},
        "train": {"steps": 4, "overlap": True},
        "evaluation": {"data": {"path": "-", "max_prompt_length": 8}, "every": 2},
    }
    train(run_config(tmp_path, "whole", **sections), evaluate=lambda run: {})
    whole, drawn[:] = list(drawn), []
    config = run_config(tmp_path, "broken", **sections)
    with monkeypatch.context() as patch:
        fail(patch, 3)
        with pytest.raises(RunFailed, match="illegal memory access"):
            train(config, evaluate=lambda run: {})
    assert newest(config) == "step-000002"
    train(config, resume="newest", evaluate=lambda run: {})
    assert [row["step"] for row in metrics(Path(config.output_dir))] == [1, 2, 3, 4]
    assert drawn == whole


def test_a_second_failure_does_not_hide_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is gone, and no room for a checkpoint."""
    fail(monkeypatch, 2, 3)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush", full)
    with pytest.raises(RunFailed, match=r"illegal memory access.* And no checkpoint could be written then: .*No space"):
        train(run_config(tmp_path))


def test_a_checkpoint_that_somebody_removed_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make room, say, while the run goes on."""
    config = run_config(tmp_path, train={"steps": 3}, checkpoint={"every": 1})
    save = checkpoint.save

    def save_and_remove(*arguments: Any, **options: Any) -> Path:
        saved = save(*arguments, **options)
        if saved.name == "step-000001":
            os.rename(saved, tmp_path / "elsewhere")
        return saved

    monkeypatch.setattr(checkpoint, "save", save_and_remove)
    train(config)
    assert newest(config) == "step-000003"
