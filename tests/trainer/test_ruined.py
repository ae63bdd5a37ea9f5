"""Runs that learn nothing, and updates that ruin the weights."""

from pathlib import Path
from typing import Any

import pytest
import quick
from engine_runs import changed, same
from trainer_runs import metrics, run_config

from rlplus.train.learner.policy import Policy
from rlplus.train.rollout import RunFailed
from rlplus.train.trainer import Run, train


def ruin(monkeypatch: pytest.MonkeyPatch, lr: float, updates: int) -> None:
    """Give the update after `updates` others that learning rate."""
    usual: Any = Policy.lr

    def too_large(policy: Policy) -> float:
        return lr if policy.engine.global_steps == updates else float(usual.fget(policy))

    monkeypatch.setattr(Policy, "lr", property(too_large))


@pytest.mark.parametrize(
    ("lr", "where"),
    quick.first(
        1,
        [
            (1e37, "the logprobs of a test batch, though in no parameter"),
            (float("inf"), r"parameter model\.embed_tokens\.weight"),
        ],
    ),
)
def test_an_update_that_ruins_the_weights_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lr: float, where: str
) -> None:
    """Also if only one is kept; and a resumed run ends as an undisturbed one."""
    once = {"checkpoint": {"every": 1, "keep": 1}}
    whole = train(run_config(tmp_path, "whole", train={"steps": 4}, **once))
    config = run_config(tmp_path, "ruined", train={"steps": 4}, **once)
    with monkeypatch.context() as patch:
        ruin(patch, lr, 2)
        message = rf"step 3: an update left NaN or infinity in {where}\..* newest checkpoint is .*step-000002\."
        with pytest.raises(RunFailed, match=message):
            train(config)
    folder = Path(config.output_dir)
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000002"]
    assert (folder / "checkpoints/latest").read_text() == "step-000002"
    assert same(whole, train(config, resume="newest"))
    assert metrics(whole) == metrics(folder)


@pytest.mark.parametrize("preset", ["rlplus", "sft"])
def test_neither_the_sampler_nor_the_gradient_is_blamed_for_ruined_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """In steps without a checkpoint, which would have found it."""
    config = run_config(tmp_path, algorithm={"preset": preset}, train={"steps": 9}, checkpoint={"every": 2})
    ruin(monkeypatch, float("inf"), 2)
    with pytest.raises(RunFailed, match=r"^step [345]: an update left NaN or infinity in parameter "):
        train(config)
    assert (Path(config.output_dir) / "checkpoints/latest").read_text() == "step-000002"


def test_ruined_weights_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = {"data": {"path": "-", "max_prompt_length": 8}, "every": 1}
    config = run_config(tmp_path, train={"steps": 3}, evaluation=evaluation)
    ruin(monkeypatch, float("inf"), 1)
    seen: list[int] = []

    def evaluate(run: Run) -> dict[str, float]:
        seen.append(run.progress.step + 1)
        return {}

    with pytest.raises(RunFailed, match="step 2: an update left NaN or infinity in parameter "):
        train(config, evaluate=evaluate)
    assert seen == [1]


def test_a_checkpoint_with_ruined_weights_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, train={"steps": 1})

    def poison(policy: Policy) -> str:
        next(policy.engine.module.parameters()).data.fill_(float("nan"))
        return ""

    with monkeypatch.context() as patch:
        nonfinite = [lambda _: "", poison]  # one before, one after the update
        patch.setattr(Policy, "nonfinite", lambda policy: nonfinite.pop(0)(policy))
        train(config)
    with pytest.raises(ValueError, match=r"step-000001 has NaN or infinity in parameter model\.embed_tokens\.weight"):
        train(changed(config, "train", steps=2), resume="newest")


def test_a_run_that_trains_nothing_says_so(tmp_path: Path, capsys: Any) -> None:
    """After 4 steps, again after 8, and at its end. An untrained model never gets a reward."""
    train(run_config(tmp_path, "grpo", algorithm={"preset": "grpo"}, train={"steps": 9}))
    told = " ".join(capsys.readouterr().err.split())
    for steps in (4, 8):
        text = f"no update in {steps} steps: the rewards in each group are equal (mean reward 0 in this step; 0% of"
        assert told.count(text) == 1, told
    assert told.count("no update in") == 2
    assert "(no step had an update: it is the one that the run began with)" in told


def test_a_run_without_any_reward_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every grader failed: the samples are masked, and there is no mean reward."""

    def mask(samples: Any, *_: Any) -> None:
        for sample in samples:
            sample.reward, sample.status = float("nan"), "crash"

    monkeypatch.setattr("rlplus.train.trainer.loop.score", mask)
    train(run_config(tmp_path, algorithm={"preset": "grpo"}, train={"steps": 4}))
    told = " ".join(capsys.readouterr().err.split())
    assert "in each group are equal (no reward in this step; 100% of the responses not graded, " in told


def test_a_run_that_trains_says_no_such_thing(tmp_path: Path, capsys: Any) -> None:
    train(run_config(tmp_path, "rlplus", train={"steps": 5}))
    assert "no update" not in capsys.readouterr().err
    assert "no step" not in capsys.readouterr().err
