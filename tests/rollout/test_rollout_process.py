"""An engine in a process of its own: the same answers, also when the process is killed in the middle of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import processes
import pytest
from rollout_models import PROMPTS, gap, requests, save, start, start_process, tiny_model
from transformers import Qwen2ForCausalLM

import rlplus.train.rollout.process_engine
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import RolloutEngine, RunFailed, Sampling, make_engine
from rlplus.train.rollout.parcels import shared_memory
from rlplus.train.rollout.process_engine import ProcessEngine, _EngineDied, _limit

KINDS = ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]


def ask(engine: RolloutEngine, n: int = 4) -> object:
    return engine.generate(requests(PROMPTS, [n] * 3, 64), Sampling(1.0, 3))


def killed_when_busy(engine: ProcessEngine, delay_s: float) -> threading.Thread:
    """Stopped first: it cannot have answered before it dies, however late that is."""
    os.kill(engine.pid, signal.SIGSTOP)
    thread = threading.Timer(delay_s, os.kill, (engine.pid, signal.SIGKILL))
    thread.start()
    return thread


def wait_until_gone(pid: int) -> None:
    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    processes.wait_until(gone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_engine_answers_as_if_nothing_had_been(tmp_path: Path, kind: str) -> None:
    """The answers equal an engine's in this process with the weights pushed last, before and after the kill."""
    model, pushed = tiny_model(tied=True), tiny_model(tied=True, seed=1)
    save(model, tmp_path)
    inside = start(kind, tmp_path)
    inside.push_weights(pushed.named_parameters(), 1)
    want = ask(inside, n=256)
    inside.close()
    engine = start_process(kind, tmp_path)
    try:
        first = engine.pid
        engine.push_weights(pushed.named_parameters(), 1)
        assert ask(engine, n=256) == want
        killer = killed_when_busy(engine, 0.1)
        assert ask(engine, n=256) == want
        killer.join()
        assert engine.restarts == 1
        assert engine.pid != first
        assert gap(pushed, ask(engine), PROMPTS, 1.0) <= 1e-5  # type: ignore[arg-type]
        engine.push_weights(model.named_parameters(), 2)
        assert gap(model, ask(engine), PROMPTS, 1.0) <= 1e-5  # type: ignore[arg-type]
    finally:
        engine.close()
    wait_until_gone(engine.pid)
    with pytest.raises(RuntimeError, match="closed"):
        ask(engine)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    path, model = tmp_path_factory.mktemp("model"), tiny_model(tied=False)
    save(model, path)
    return path, model


@pytest.mark.slow
def test_death_in_a_push_and_refusals(shared: tuple[Path, Qwen2ForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = shared
    engine = start_process("transformers", path)
    try:
        with pytest.raises(ValueError, match="prompt 0 has 0"):
            engine.generate(requests([[]], [1], 8), Sampling(1.0, 0))
        with pytest.raises(ValueError, match=r"1 did not come: lm_head\.weight"):
            engine.push_weights([(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"], 1)
        assert engine.restarts == 0, "a refusal is no death"
        with pytest.raises(RuntimeError, match="push of version 1 failed half-way"):
            ask(engine)

        def dying() -> object:  # complete files need nothing more of the trainer
            yield from model.named_parameters()
            os.kill(engine.pid, signal.SIGKILL)

        engine.push_weights(dying(), 2)  # type: ignore[arg-type]
        assert engine.restarts == 1
        original = engine._start

        def start_with_time() -> None:
            monkeypatch.setattr(rlplus.train.rollout.process_engine, "GRACE_S", processes.PATIENCE_S)
            original()

        monkeypatch.setattr(engine, "_start", start_with_time)
        monkeypatch.setattr(
            rlplus.train.rollout.process_engine, "GRACE_S", 0.5 - engine._timeout_s
        )  # half a second in all
        os.kill(engine.pid, signal.SIGSTOP)  # it hangs: killed after a time, and another one loads
        engine.push_weights(model.named_parameters(), 3)
        assert engine.restarts == 2
        assert gap(model, ask(engine), PROMPTS, 1.0) <= 1e-5  # type: ignore[arg-type]

        def unwanted() -> None:
            with pytest.raises(RuntimeError, match="closed"):
                ask(engine, n=20_000)

        thread = threading.Thread(target=unwanted)
        thread.start()
        time.sleep(0.5)
        engine.close()  # another thread's question is under way
        thread.join(processes.PATIENCE_S)
        assert not thread.is_alive()
    finally:
        engine.close()
    wait_until_gone(engine.pid)


@pytest.mark.slow
def test_an_engine_that_dies_of_the_question_is_given_up(
    shared: tuple[Path, Qwen2ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_process("transformers", shared[0])
    original = engine._start

    def start_and_die() -> None:
        original()
        killed_when_busy(engine, 0.0).join()

    killed_when_busy(engine, 0.0).join()
    monkeypatch.setattr(rlplus.train.rollout.process_engine, "ATTEMPTS", 2)
    monkeypatch.setattr(engine, "_start", start_and_die)
    with pytest.raises(
        RunFailed, match=r"died 2 times at one generate; the last time: process \d+ ended with status -9"
    ):
        ask(engine)
    engine.close()


@pytest.mark.slow
def test_a_process_that_cannot_start_says_why(shared: tuple[Path, Qwen2ForCausalLM], tmp_path: Path) -> None:
    config = RolloutConfig(engine="transformers", mode="process", max_response_length=8)
    (tmp_path / "model").mkdir()
    (shared[0] / "config.json").read_text()
    (tmp_path / "model/config.json").write_text((shared[0] / "config.json").read_text())
    with pytest.raises(RunFailed, match=r"transformers .process.: OSError: .*no file named model"):
        make_engine(
            config, str(tmp_path / "model"), dtype="float32", max_model_len=32, end_ids=[1], pad_token_id=0, seed=0
        )


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where a file "now" makes the engine's process hang."""
    folder = tmp_path / "hang"
    folder.mkdir()
    monkeypatch.setenv("HANG", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(processes.SUPPORT), *sys.path]))
    monkeypatch.setattr(rlplus.train.rollout.process_engine, "WORKER", "hanging_worker")
    return folder


@pytest.mark.slow
def test_a_hung_engine_shows_its_stacks_and_is_started_again(
    shared: tuple[Path, Qwen2ForCausalLM],
    hanging: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One that keeps the interpreter's lock; then it is stopped, between two questions and half-way through one."""
    path, model = shared
    engine = start_process("transformers", path)
    try:
        engine.push_weights(model.named_parameters(), 1)
        (hanging / "now").touch()
        processes.wait_until((hanging / "hangs").exists)
        question = ("generate", (requests([[1]], [1], 4), Sampling(1.0, 0)))
        with pytest.raises(_EngineDied, match=rf"process {engine.pid} hangs: no progress for 0.2 s$"):
            engine._exchange(question, 0.2)
        stacks = ""

        def shown() -> bool:
            nonlocal stacks
            stacks += capfd.readouterr().err
            return "in hold_the_lock" in stacks and "in serve" in stacks

        processes.wait_until(shown)  # stacks of all threads
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(_EngineDied, match=r"hangs: no progress for 0.2 s; it is stopped .SIGSTOP"):
            engine._exchange(question, 0.2)
        _limit(engine._pipe, 0.2)
        engine._progress_s, large = 0.2, ("generate", (requests([[1] * 1_000_000], [1], 4), Sampling(1.0, 0)))
        with pytest.raises(_EngineDied, match=r"hangs: no progress for 0.2 s; it is stopped .SIGSTOP"):
            engine._exchange(large, 600.0)
        restart = engine._restart

        def restart_patiently(*, loading: bool) -> None:
            engine._progress_s = processes.PATIENCE_S
            (hanging / "now").unlink()
            restart(loading=loading)

        monkeypatch.setattr(engine, "_restart", restart_patiently)
        assert gap(model, ask(engine), PROMPTS, 1.0) <= 1e-5  # type: ignore[arg-type]
        assert engine.restarts == 1
    finally:
        engine.close()


TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from rollout_models import start_process, tiny_model
import rlplus.train.rollout.process_engine
rlplus.train.rollout.process_engine.WORKER = "hanging_worker"
engine = start_process("transformers", Path(sys.argv[1]))
engine.push_weights(tiny_model(tied=False).named_parameters(), 1)
print(engine.pid, engine._held[0].fd, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_engine_and_no_weights(tmp_path: Path, hanging: Path) -> None:
    """Nor a child of the engine, which keeps the interpreter's lock and is stopped."""
    save(tiny_model(tied=False), tmp_path)
    command = [sys.executable, "-c", TRAINER, str(tmp_path), str(processes.SUPPORT)]
    with processes.started(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pid, memory = map(int, trainer.stdout.readline().split())
        child = int((hanging / "child").read_text())
        assert len(shared_memory(trainer.pid, memory)) > 0
        (hanging / "now").touch()
        processes.wait_until((hanging / "hangs").exists)
        for process in (pid, child):
            os.kill(process, signal.SIGSTOP)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        wait_until_gone(pid)
        wait_until_gone(child)
    with pytest.raises(ValueError, match="want the trainer's memory at /proc/"):
        shared_memory(trainer.pid, memory)


@pytest.mark.slow
def test_a_dead_engine_whose_pipe_is_still_held_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that it started has the other end, too: the pipe takes a question until its buffer is full."""
    model = tiny_model(tied=True)
    save(model, tmp_path)
    held: list[int] = []

    def holding() -> tuple[Connection, Connection]:
        ours, theirs = Pipe()
        held.append(os.dup(theirs.fileno()))
        return ours, theirs

    monkeypatch.setattr(rlplus.train.rollout.process_engine, "Pipe", holding)
    engine = start_process("transformers", tmp_path)
    try:
        engine.push_weights(model.named_parameters(), 1)
        os.kill(engine.pid, signal.SIGKILL)
        time.sleep(0.5)
        prompts = [PROMPTS[0]] * 20_000  # more than the buffer of a pipe
        answers = engine.generate(requests(prompts, [0] * (len(prompts) - 1) + [1], 2), Sampling(1.0, 0))
        assert len(answers[-1]) == 1
        assert engine.restarts == 1
    finally:
        engine.close()
        for descriptor in held:
            os.close(descriptor)
