"""Answers of a server's workers to their trainer: every failure, also a late one, and who still listens."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
from rollout_models import save, tiny_model
from servers import FINISHING, INIT, STARTING, FakeServer, ask, connect

from rlplus.train.rollout import RunFailed, worker_answers
from rlplus.train.rollout.worker_answers import Answers, Trainer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_answers, "ANSWERS_S", 0.1)


def test_every_worker_is_heard() -> None:
    answers = Answers(3)
    workers = [Trainer("run", os.getpid(), answers.fd) for _ in range(3)]
    for worker in workers:
        worker.tell("start")
    assert [answer["failure"] for answer in answers.check("start")] == ["", "", ""]
    for number, worker in enumerate(workers):
        worker.tell("update", f"no memory on {number}" + "\N{SNOWMAN}" * 10_000 if number else "")
    with pytest.raises(OSError, match=r"update: no memory on 1☃+; no memory on 2☃+$"):
        answers.check("update")
    for worker in workers[:2]:
        worker.tell("finish")
    with pytest.raises(OSError, match=r"want 3 workers' answers to finish; got 2 in 0.1 s. Are they all"):
        answers.take("finish")
    for worker in (*workers[:2], workers[0]):
        worker.tell("start" if worker is workers[1] else "finish")
    with pytest.raises(OSError, match=r"want its workers' answers to finish; got one to start: does another"):
        answers.take("finish")
    answers.close()
    answers.close()
    workers[0].tell("no reader")
    for worker in workers:
        worker.close()


def test_only_a_pipe_is_written_to(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(ValueError, match=r"want a pipe at /proc/\d+/fd/\d+; got something else"):
        Trainer("run", os.getpid(), file)
    os.close(file)
    with pytest.raises(ValueError, match=r"trainer's pipe at .*: both processes on one machine.*; got No such file"):
        Trainer("run", os.getpid(), file)
    assert (tmp_path / "file").read_bytes() == b""


HOLDS = """
import os, sys, time
from rlplus.train.rollout.worker_answers import Answers
answers = Answers(1)
print(answers.fd, flush=True)
if os.fork() == 0:
    os.close(1)
time.sleep(600)
"""


def test_a_trainer_is_alive_until_it_closes_its_pipe_or_ends() -> None:
    """The one that is killed has a child with the pipe, as it has from a fork."""
    answers = Answers(1)
    worker = Trainer("run", os.getpid(), answers.fd)
    assert worker.alive()
    answers.close()
    assert not worker.alive()
    worker.close()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with processes.started([sys.executable, "-c", HOLDS], environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = Trainer("run", process.pid, int(process.stdout.readline()))
        assert worker.alive()
        process.kill()
        processes.wait_until(lambda: not worker.alive())
        worker.close()


def test_a_failure_of_any_worker_fails_the_push(fake: FakeServer, tmp_path: Path) -> None:
    """Whatever the server answers to the call; and the push after it begins with what that one left open."""
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine: Any = connect(fake.url, tmp_path)
    engine.push_weights(model.named_parameters(), 1)
    for version, call in enumerate((STARTING[1], "/update_weights", FINISHING[0]), start=2):
        fake.failures = {call: "w of another shape"}
        with pytest.raises(RunFailed, match=rf"weights of version {version}: {call[1:]}: w of another shape$"):
            engine.push_weights(model.named_parameters(), version)
        with pytest.raises(RuntimeError, match=f"version {version} failed half-way"):
            ask(engine)
        assert fake.paused
        assert fake.version == "1"
        fake.failures, before = {}, len(fake.calls)
        engine.push_weights(model.named_parameters(), 1)
        end = [] if call == FINISHING[0] else ["/pause", FINISHING[0]]
        assert fake.calls[before:] == [INIT, *end, *STARTING, "/update_weights", *FINISHING]
        assert not fake.paused
    fake.failures = {INIT: "want one run at a time; process 1 pushes its weights here"}
    with pytest.raises(ValueError, match=r"this run's weights, .*; init_weight.*: want one run at a time"):
        connect(fake.url, tmp_path)
    engine.close()


@pytest.mark.parametrize("line", [b"{", b"\xff", b"[]", b"null", b'{"call": "update_weights"}', b'{"failure": ""}'])
def test_what_is_no_answer_is_told_to_the_other_ranks(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """They wait for word of this rank: a ValueError of its own would leave them there."""
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine: Any = connect(fake.url, tmp_path)
    tell, told = fake.tell, []

    def write(path: str, **more: Any) -> None:
        if path == "/update_weights":
            assert fake.trainer is not None
            os.write(fake.trainer._pipe, line + b"\n")
        else:
            tell(path, **more)

    def gathered(failure: str) -> list[str]:
        told.append(failure)
        return [failure, ""]

    fake.tell = write  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.rollout.http_engine.dist.is_initialized", lambda: True)
        patch.setattr("rlplus.train.rollout.http_engine.agree.gathered", gathered)
        with pytest.raises(RunFailed, match="weights of version 1: want a worker's answer, JSON with call and failure"):
            engine.push_weights(model.named_parameters(), 1)
    assert told == [f"want a worker's answer, JSON with call and failure, in this process's pipe; got {line!r}"]
    fake.tell = tell  # type: ignore[method-assign]
    engine.push_weights(model.named_parameters(), 2)
    assert len(ask(engine)) == 3
    engine.close()


def test_an_answer_that_comes_late_has_no_reader(fake: FakeServer, tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine: Any = connect(fake.url, tmp_path)
    late: list[Any] = []
    tell = fake.tell

    def tell_late(path: str, **more: Any) -> None:
        if path == "/update_weights":
            assert fake.trainer is not None
            fake.trainer.tell(path[1:])
            late.append(lambda trainer=fake.trainer: trainer.tell(path[1:], "too late"))
        else:
            tell(path, **more)

    fake.tell = tell_late  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=r"version 1: want 2 workers' answers to update_weights; got 1 in 0.1 s"):
        engine.push_weights(model.named_parameters(), 1)
    fake.tell = tell  # type: ignore[method-assign]
    late.pop()()
    engine.push_weights(model.named_parameters(), 2)
    assert len(ask(engine)) == 3
    assert fake.trainer is not None
    assert fake.trainer.alive()
    engine.close()
    assert not fake.trainer.alive(), "another run may push"
    assert "/shutdown_weight_transfer_engine" not in fake.calls, "it would not say whose"
