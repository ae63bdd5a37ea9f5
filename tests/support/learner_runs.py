"""Runs whose recipe trains a model alongside the policy, killed and resumed."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_runs import same
from trainer_runs import metrics

from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.trainer import Interrupted, train


def grade(monkeypatch: pytest.MonkeyPatch, reward: Callable[[Sample], float]) -> None:
    """Rewards without a grader."""

    def score(samples: Sequence[Sample], *_: Any) -> None:
        for sample in samples:
            sample.reward = reward(sample)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", score)


def killed_and_resumed(
    config: Callable[[str], Config],
    monkeypatch: pytest.MonkeyPatch,
    credit: tuple[Any, str],
    update: tuple[Any, str],
) -> list[dict[str, float]]:
    """The metrics of a run. Another that is killed twice has the same metrics and weights, bit for bit.

    config: makes one from a folder's name. credit: the method in which the third step, which can be redone, is killed.
    update: one of the learner, of which each step has two or more; the second one in the third step is killed.
    """
    whole, parts = train(config("whole")), config("parts")
    for method, call, saved in ((credit, 3, "step-000002"), (update, 2, "step-000003")):
        with monkeypatch.context() as patch:
            _kill_at(patch, *method, call)
            with pytest.raises(Interrupted):
                train(parts, resume="auto")
        assert (Path(parts.output_dir) / "checkpoints/latest").read_text() == saved
    train(parts, resume="newest")
    assert same(whole, Path(parts.output_dir))
    rows = metrics(whole)
    assert metrics(Path(parts.output_dir)) == rows
    return rows


def _kill_at(monkeypatch: pytest.MonkeyPatch, kind: Any, method: str, call: int) -> None:
    """SIGTERM at the end of that call of a method."""
    original, calls = getattr(kind, method), []

    def killed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(kind, method, killed)
