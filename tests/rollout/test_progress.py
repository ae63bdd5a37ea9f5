"""Signs of progress of a generation, and how the trainer waits for them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
from rollout_models import PROMPTS, requests, save, start, tiny_model

import rlplus.train.rollout.process_engine
from rlplus.common import activity
from rlplus.train.rollout import Sampling
from rlplus.train.rollout.process_engine import POLL_S, ProcessEngine, _EngineDied, _Heartbeat
from rlplus.train.rollout.push import Clock


class Ticks:
    """Replaces an engine's clock."""

    def __init__(self) -> None:
        self.ticks: list[str] = []

    def at(self, waiting_for: str) -> None:
        self.ticks.append(waiting_for)

    @contextmanager
    def running(self, waiting_for: str) -> Iterator[None]:
        self.at(waiting_for)
        yield


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def test_each_token_is_progress(tmp_path: Path, kind: str) -> None:
    """Not only each finished response: the longest one may take minutes."""
    model = tiny_model(tied=True)
    save(model, tmp_path)
    engine: Any = start(kind, tmp_path)
    try:
        engine.push_weights(model.named_parameters(), 1)
        engine.clock = Ticks()
        groups = engine.generate(requests(PROMPTS, [2, 2, 2], 64), Sampling(1.0, 0))
    finally:
        engine.close()
    longest = max(len(c.tokens) for group in groups for c in group)
    assert longest > 8
    assert engine.clock.ticks == ["the first token"] + ["the next token"] * longest


def test_bodies_that_follow_each_other_are_not_taken_for_one_another() -> None:
    """The thread that watched the last one may wake up in the middle of the next."""
    clock = Clock("the body", "some.key", processes.PATIENCE_S)
    for _ in range(2000):
        with clock.running("its end"):
            pass


class ScriptedPipe:
    """Time passes in `poll` only; a message comes at every other one until there are none left."""

    def __init__(self, *messages: Any) -> None:
        self.messages, self.now, self.polls = list(messages), 0.0, 0

    def send(self, _: Any) -> None:
        pass

    def poll(self, seconds: float) -> bool:
        self.now += seconds
        self.polls += 1
        return bool(self.messages) and self.polls % 2 == 0

    def recv(self) -> Any:
        return self.messages.pop(0)


def test_progress_is_what_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It brings the engine's counts along."""
    counts = (64, 37, 5000, 12.5)
    engine = object.__new__(ProcessEngine)
    engine._process = SimpleNamespace(pid=os.getpid())  # type: ignore[assignment]
    monkeypatch.setattr(engine, "_dead", lambda: False)
    monkeypatch.setattr(engine, "_hanging", lambda limit: _EngineDied(f"hangs for {limit}"))
    for messages, answer in ((["progress"] * 99, "ok"), (["progress"] * 2, None)):
        pipe = ScriptedPipe(*((message, counts) for message in messages), *([(answer, 7)] if answer else []))
        engine._pipe = pipe  # type: ignore[assignment]
        monkeypatch.setattr(
            rlplus.train.rollout.process_engine, "time", SimpleNamespace(monotonic=lambda pipe=pipe: pipe.now)
        )
        if answer:
            assert engine._exchange("question", 1.5) == 7
            assert pipe.now == 100 * 2 * POLL_S
            assert activity.rollouts.state() == counts
        else:
            with pytest.raises(_EngineDied, match=r"hangs for 1\.5"):
                engine._exchange("question", 1.5)
            assert pipe.now == 2 * 2 * POLL_S + 1.5 + POLL_S


def test_signs_of_progress_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    heartbeat, now = _Heartbeat(theirs), 1000.0
    activity.rollouts.restore((64, 37, 5000, 12.5))
    monkeypatch.setattr(rlplus.train.rollout.process_engine, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rlplus.train.rollout.process_engine, "BEAT_S", 1 / 8)
    with heartbeat.running("the first token"):
        for _ in range(100):
            now += 1 / 32
            heartbeat.at("the next token")
    theirs.close()
    assert [ours.recv() for _ in range(25)] == [("progress", (64, 37, 5000, 12.5))] * 25
    with pytest.raises(EOFError):
        ours.recv()
