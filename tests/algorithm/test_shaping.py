"""Rewards as the advantages have them: wrong answers, overlong responses, and what is left as the grader gave it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import metrics, run_config

from rlplus.train.algorithm import Shaping
from rlplus.train.data import Sample
from rlplus.train.recipe import Batch, Recipe
from rlplus.train.reward.scorer import shape
from rlplus.train.trainer import train


@pytest.mark.parametrize(
    ("options", "reward", "length", "want"),
    [
        ({}, 0.25, 20480, 0.25),
        ({"wrong": -1.0}, 0.0, 20480, -1.0),
        ({"wrong": -1.0}, 1.0, 20480, 1.0),
        ({"wrong": -1.0}, 0.25, 20480, -0.5),
        ({"wrong": -0.5}, 0.5, 20480, 0.25),
        ({"overlong": 0.2}, 1.0, 1, 1.0),
        ({"overlong": 0.2}, 1.0, 16384, 1.0),
        ({"overlong": 0.2}, 1.0, 16385, 1.0 - 1 / 4096),
        ({"overlong": 0.2}, 1.0, 18432, 0.5),
        ({"overlong": 0.2}, 1.0, 20480, 0.0),
        ({"overlong": 1.0}, 1.0, 5120, 0.75),
        ({"wrong": -1.0, "overlong": 0.2}, 0.0, 20480, -2.0),
    ],
)
def test_the_shaped_reward(options: dict[str, float], reward: float, length: int, want: float) -> None:
    """DAPO's numbers: 20,480 tokens, of which the last 4,096 are penalised."""
    assert Shaping(**options).reward(reward, length, 20480) == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrong": 1.0}, "wrong\n.*less than 1"),
        ({"wrong": "a"}, "wrong\n.*valid number"),
        ({"overlong": 1.5}, "overlong\n.*less than or equal to 1"),
        ({"overlong": float("nan")}, "overlong\n.*less than or equal to 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shaping(**options)


def test_demonstrations_are_never_too_long() -> None:
    samples = [
        Sample([1], [2] * 10, 0, external, False, None, reward=1.0)
        for external in (False, True, [True] * 9 + [False], [True] * 10)
    ]
    shape(samples, Shaping(wrong=-1.0, overlong=0.5), 10)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 0.0, 1.0]


def test_a_run_learns_from_shaped_rewards_and_logs_the_graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, int]] = []
    learnt: list[float] = []
    credit = Recipe.credit

    def every_other(samples: Sequence[Sample], *_: Any) -> None:
        for member, sample in enumerate(samples):
            sample.reward = float(member % 2)
            given.append((sample.reward, len(sample.response)))

    def note_and_credit(recipe: Recipe, batch: Batch) -> None:
        learnt.extend(sample.reward for sample in batch.samples)
        credit(recipe, batch)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", every_other)
    monkeypatch.setattr(Recipe, "credit", note_and_credit)
    algorithm = {"preset": "grpo", "shaping": {"wrong": -1.0, "overlong": 0.5}}
    (row,) = metrics(train(run_config(tmp_path, algorithm=algorithm, train={"steps": 1})))
    assert row["reward/mean"] == row["reward/internal"] == 0.5
    assert row["batch/solve_none"] == 0
    assert row["reward/shaped"] == pytest.approx(sum(learnt) / len(learnt))
    assert learnt == [2 * reward - 1 - max(0, length - 4) / 4 for reward, length in given]
    assert min(learnt) < -1
