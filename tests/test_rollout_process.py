"""An engine in a process of its own: the same answers, also when the process is killed in the middle of them."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import processes
import pytest
import torch
from rollout_models import EOS, MAX_MODEL_LEN, PAD, PROMPTS, gap, save, start, tiny_model
from transformers import Qwen2ForCausalLM

import rlplus.rollout.process
from rlplus.config import RolloutConfig
from rlplus.rollout import RolloutEngine, RunFailed, make_engine, push
from rlplus.rollout.process import ProcessEngine
from rlplus.rollout.push import WeightFiles

KINDS = ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]


def start_process(kind: str, path: Path, **changes: object) -> ProcessEngine:
    config = RolloutConfig(
        engine=kind,  # type: ignore[arg-type]
        mode="process",
        max_response_length=16,
        kv_cache_memory_mb=16,
        push_folder=str(path / "push"),
        **changes,  # type: ignore[arg-type]
    )
    engine = make_engine(
        config,
        str(path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        eos_token_id=EOS,
        pad_token_id=PAD,
        seed=0,
    )
    assert isinstance(engine, ProcessEngine)
    return engine


def ask(engine: RolloutEngine, n: int = 4) -> object:
    return engine.generate(PROMPTS, [n] * 3, temperature=1.0, max_tokens=64, seed=3)


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
    """The answers are those of an engine in this process, and of the weights pushed last, before and after the kill."""
    model, pushed = tiny_model(tied=True), tiny_model(tied=True, seed=1)
    save(model, tmp_path)
    inside = start(kind, tmp_path)
    inside.push_weights(pushed.named_parameters(), 1)
    want = ask(inside, n=256)
    inside.close()
    engine = start_process(kind, tmp_path, push_bucket_mb=1)
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
    assert list((tmp_path / "push").iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        ask(engine)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    path, model = tmp_path_factory.mktemp("model"), tiny_model(tied=False)
    save(model, path)
    return path, model


def test_death_in_a_push_and_refusals(shared: tuple[Path, Qwen2ForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = shared
    engine = start_process("transformers", path)
    try:
        with pytest.raises(ValueError, match="prompt 0 has 0"):
            engine.generate([[]], [1], temperature=1.0, max_tokens=8, seed=0)
        with pytest.raises(ValueError, match=r"1 did not come: lm_head\.weight"):
            engine.push_weights([(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"], 1)
        assert engine.restarts == 0, "a refusal is no death"
        with pytest.raises(RuntimeError, match="push of version 1 failed half-way"):
            ask(engine)

        def dying() -> object:  # after the files are complete nothing of the trainer's is needed any more
            yield from model.named_parameters()
            os.kill(engine.pid, signal.SIGKILL)

        engine.push_weights(dying(), 2)  # type: ignore[arg-type]
        assert engine.restarts == 1
        original = engine._start

        def start_with_time() -> None:
            monkeypatch.setattr(rlplus.rollout.process, "GRACE_S", processes.PATIENCE_S)
            original()

        monkeypatch.setattr(engine, "_start", start_with_time)
        monkeypatch.setattr(rlplus.rollout.process, "GRACE_S", 0.5 - engine._timeout_s)  # half a second in all
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
        engine.close()  # in the middle of a question of another thread
        thread.join(processes.PATIENCE_S)
        assert not thread.is_alive()
    finally:
        engine.close()
    wait_until_gone(engine.pid)


def test_an_engine_that_dies_of_the_question_is_given_up(
    shared: tuple[Path, Qwen2ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_process("transformers", shared[0])
    original = engine._start

    def start_and_die() -> None:
        original()
        killed_when_busy(engine, 0.0).join()

    killed_when_busy(engine, 0.0).join()
    monkeypatch.setattr(rlplus.rollout.process, "ATTEMPTS", 2)
    monkeypatch.setattr(engine, "_start", start_and_die)
    with pytest.raises(
        RunFailed, match=r"died 2 times at one generate; the last time: process \d+ ended with status -9"
    ):
        ask(engine)
    engine.close()


def test_a_process_that_cannot_start_says_why(shared: tuple[Path, Qwen2ForCausalLM], tmp_path: Path) -> None:
    config = RolloutConfig(engine="transformers", mode="process", max_response_length=8, push_folder=str(tmp_path))
    (tmp_path / "model").mkdir()
    (shared[0] / "config.json").read_text()
    (tmp_path / "model/config.json").write_text((shared[0] / "config.json").read_text())
    with pytest.raises(RunFailed, match=r"transformers .process.: OSError: .*no file named model"):
        make_engine(
            config, str(tmp_path / "model"), dtype="float32", max_model_len=32, eos_token_id=1, pad_token_id=0, seed=0
        )
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_rollout_process import start_process
engine = start_process("transformers", Path(sys.argv[1]))
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_trainer_leaves_no_engine_and_no_weights(tmp_path: Path) -> None:
    save(tiny_model(tied=False), tmp_path)
    command = [sys.executable, "-c", TRAINER, str(tmp_path), str(Path(__file__).parent)]
    with processes.started(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        wait_until_gone(pid)
    left = list((tmp_path / "push").iterdir())
    assert len(left) == 1
    files = WeightFiles(str(tmp_path / "push"), 1, per_node=True)
    assert list((tmp_path / "push").iterdir()) == [files.folder], "the next run removes what a killed one left"
    files.close()


def test_files_are_cut_at_the_budget(tmp_path: Path) -> None:
    files = WeightFiles(str(tmp_path), 1, per_node=True)
    weights = {f"w{i}": torch.randn(size) for i, size in enumerate((200_000, 50_000, 12_144, 1, 400_000, 5))}
    files.write(weights.items())
    sizes = [path.stat().st_size for path in sorted(files.folder.glob("*.safetensors"))]
    assert len(sizes) == 4  # 250,000 floats fill a MiB but for 12,144; the 1 starts a second one; then one too large
    assert sum(size > 2**20 + 4096 for size in sizes) == 1
    got = dict(files)
    assert list(got) == list(weights)
    assert all(torch.equal(got[name], weights[name]) for name in weights)
    files.write([("w0", torch.zeros(3))])
    assert list(dict(files)) == ["w0"]
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    first, second = (WeightFiles(str(tmp_path), 1, per_node=True) for _ in range(2))
    assert first.folder.exists()
    os.close(push._locks.pop(str(first.folder)))  # as the death of its process does
    third = WeightFiles(str(tmp_path), 1, per_node=True)
    assert not first.folder.exists()
    assert second.folder.exists()
    second.close()
    third.close()
    assert not list(tmp_path.iterdir())


def killed(base: Path) -> Path:
    """A folder with weights, as a killed run leaves it."""
    files = WeightFiles(str(base), 1, per_node=True)
    files.write([("w0", torch.zeros(3))])
    os.close(push._locks.pop(str(files.folder)))
    return files.folder


def test_planted_names_neither_hang_nor_fail_a_run_nor_cost_a_file(tmp_path: Path) -> None:
    """Anyone can create a name in /dev/shm, and swap what it stands for."""
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in (".lock", "thesis"):
        (precious / name).write_text("mine")

    def fifo(name: Path) -> None:
        os.mkfifo(name)

    def fifo_as_lock(name: Path) -> None:
        name.mkdir()
        os.mkfifo(name / ".lock")

    def link(name: Path) -> None:
        name.symlink_to(precious)

    def link_as_lock(name: Path) -> None:
        name.mkdir()
        (name / ".lock").symlink_to(precious / ".lock")

    def closed(name: Path) -> None:
        name.mkdir(mode=0)

    def file(name: Path) -> None:
        name.write_text("")

    for plant in (fifo, fifo_as_lock, link, link_as_lock, closed, file):
        base = tmp_path / plant.__name__
        base.mkdir()
        planted = base / f"{push._prefix()}planted"
        plant(planted)
        killed(base)
        WeightFiles(str(base), 1, per_node=True).close()
        assert list(base.iterdir()) == [planted], "a run's own goes, whatever is beside it"
    assert sorted(path.name for path in precious.iterdir()) == [".lock", "thesis"]


def test_what_is_swapped_while_it_is_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder without a sticky bit another user can rename a folder between the check and the removal."""
    base, precious = tmp_path / "shared", tmp_path / "precious"
    base.mkdir()
    precious.mkdir()
    (precious / "thesis").write_text("mine")
    left = killed(base)
    flock = fcntl.flock

    def swap(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if precious.exists():
            left.rename(tmp_path / "moved")
            precious.rename(left)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", swap)
        push._remove_abandoned(base)
    assert (left / "thesis").read_text() == "mine"
    assert list((tmp_path / "moved").iterdir()) == [], "what was checked is what was emptied"


def test_two_users_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second user's run starts beside a living run's folder and a dead run's; neither user loses a folder."""
    with TemporaryDirectory(prefix="rlplus-test-") as name:
        base = Path(name)
        base.chmod(0o1777)  # as /dev/shm
        living, dead = WeightFiles(str(base), 1, per_node=True), killed(base)
        user = os.geteuid()
        other = 12345 if user == 0 else user + 1
        try:
            if user == 0:
                os.seteuid(other)
            else:  # the kernel lets only root be another user: this one's files then look like another's
                monkeypatch.setattr(os, "geteuid", lambda: other)
            (base / f"rlplus-weights-{user}-planted").mkdir()
            theirs = WeightFiles(str(base), 1, per_node=True)
            mine = killed(base)
        finally:
            if user == 0:
                os.seteuid(user)
            monkeypatch.undo()
        assert (dead / ".lock").exists()
        # A name of this user's, planted by the other one.
        lure = base / f"{push._prefix()}lure"
        if user == 0:
            mine.rename(lure)
        WeightFiles(str(base), 1, per_node=True).close()
        assert not dead.exists()
        assert living.folder.exists()
        assert theirs.folder.exists()
        assert user != 0 or (lure / ".lock").exists()
        living.close()
        theirs.close()


def test_a_dead_engine_whose_pipe_is_still_held_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that it started has the other end, too: the pipe takes a question until its buffer is full."""
    model = tiny_model(tied=True)
    save(model, tmp_path)
    held: list[int] = []

    def holding() -> tuple[Connection, Connection]:
        ours, theirs = Pipe()
        held.append(os.dup(theirs.fileno()))
        return ours, theirs

    monkeypatch.setattr(rlplus.rollout.process, "Pipe", holding)
    engine = start_process("transformers", tmp_path)
    try:
        engine.push_weights(model.named_parameters(), 1)
        os.kill(engine.pid, signal.SIGKILL)
        time.sleep(0.5)
        prompts = [PROMPTS[0]] * 20_000  # more than the buffer of a pipe
        answers = engine.generate(prompts, [0] * (len(prompts) - 1) + [1], temperature=1.0, max_tokens=2, seed=0)
        assert len(answers[-1]) == 1
        assert engine.restarts == 1
    finally:
        engine.close()
        for descriptor in held:
            os.close(descriptor)
