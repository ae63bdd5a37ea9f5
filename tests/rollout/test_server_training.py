"""Whole runs with a real vLLM server: what the other modes do, bit for bit, also when the server dies or hangs.

Every response has a seed of its own, and a float32 row on the CPU does not depend on the rows beside it, so it makes no
difference which requests the server happens to run together. On a GPU it makes one, of rounding.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import processes
import pytest
from engine_runs import changed, launched, model, same, torchrun, write_start
from safetensors.torch import load_file
from servers import Server, metric
from trainer_runs import metrics, run_config

import rlplus.train.rollout.http_engine
import rlplus.train.rollout.server_engine
from rlplus.train import checkpoint
from rlplus.train.config import Config
from rlplus.train.rollout import RunFailed
from rlplus.train.rollout.server_engine import ServerEngine
from rlplus.train.rollout.server_push import Control
from rlplus.train.trainer import Interrupted, train
from rlplus.train.trainer.engine import PROBE_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTH = 48
LONGEST = 8 + LENGTH  # includes the prompt


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start"), tied=False)


@pytest.fixture(scope="module")
def server(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(start, tmp_path_factory.mktemp("server") / "log", LONGEST) as server:
        yield server


def run_of(folder: Path, start: Path, output: str, steps: int, server: Server | None, **changes: Any) -> Config:
    """RL-PLUS with long responses; without a server, vLLM in the trainer's process."""
    rollout = {"engine": "vllm", "max_response_length": LENGTH} | changes.pop("rollout", {})
    if server is None:
        rollout |= {"kv_cache_memory_mb": 16}
    else:
        rollout |= {"mode": "server", "server_url": server.url}
    train_section = {"steps": steps, "lr": 3e-3} | changes.pop("train", {})
    start_from = {"scratch": None, "path": str(start)}
    return run_config(folder, output, model=start_from, rollout=rollout, train=train_section, **changes)


def check(one: Path, other: Path, steps: int) -> None:
    rows = metrics(one)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert len({row["generated_tokens"] for row in rows}) > 1
    assert all(row["actor/prob_external"] > 0 for row in rows), "demonstrations take part"
    assert metrics(other) == rows
    assert same(one, other)


def test_a_server_trains_as_an_engine_of_ones_own(tmp_path: Path, start: Path, server: Server) -> None:
    """Four steps; and two, two more after a resume, of which the first push is to a server with other weights."""
    colocated = train(run_of(tmp_path, start, "colocated", 4, None))
    served = train(run_of(tmp_path, start, "served", 4, server))
    check(colocated, served, 4)
    before = load_file(start / "model.safetensors")
    moved = max(float((p - before[name]).abs().max()) for name, p in model(served).items())
    assert moved > 5e-3
    config = run_of(tmp_path, start, "parts", 2, server)
    train(config)
    train(changed(config, "train", steps=4), resume="newest")
    check(colocated, Path(config.output_dir), 4)


def test_a_server_generates_ahead(tmp_path: Path, start: Path, server: Server) -> None:
    """With the same results as an engine in a separate process; over a resume, too."""
    ahead = {"overlap": True, "prompts_per_update": 2}
    process = train(run_of(tmp_path, start, "process", 4, None, train=ahead, rollout={"mode": "process"}))
    check(process, train(run_of(tmp_path, start, "served", 4, server, train=ahead)), 4)
    config = run_of(tmp_path, start, "parts", 2, server, train=ahead)
    train(config)
    train(changed(config, "train", steps=4), resume="newest")
    check(process, Path(config.output_dir), 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_signal_does_not_wait_for_the_server(
    tmp_path: Path, start: Path, server: Server, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """The server stops working on requests without a caller; the resumed run ends like an undisturbed one."""
    sections: dict[str, Any] = {"train": {"overlap": overlap}}
    whole = train(run_of(tmp_path, start, "whole", 3, server, **sections))
    config = run_of(tmp_path, start, "stopped", 3, server, **sections)
    with monkeypatch.context() as patch:
        # Ahead: in the third batch, so that a finished step can be resumed, wherever the signal meets the second.
        in_batch(patch, 3 if overlap else 2, os.kill, os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            train(config)
    processes.wait_until(lambda: not metric(server, "vllm:num_requests_running"))
    train(config, resume="newest")
    check(whole, Path(config.output_dir), 3)


def test_two_ranks_share_a_server(tmp_path: Path, start: Path, server: Server) -> None:
    """ZeRO-3; the same as two engines, one per rank. And over a resume."""
    sharded = {"zero_stage": 3, "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    processes = run_of(tmp_path, start, "processes", 4, None, train=sharded, rollout={"mode": "process"})
    torchrun(processes)
    for steps in (2, 4):
        served = run_of(tmp_path, start, "served", steps, server, train=sharded)
        torchrun(served, "--resume=auto")
    check(Path(processes.output_dir), Path(served.output_dir), 4)


@pytest.fixture
def own_server(start: Path, tmp_path: Path) -> Iterator[Server]:
    """A server that the test may kill."""
    with Server(start, tmp_path / "log", LONGEST) as server:
        yield server


def in_batch(monkeypatch: pytest.MonkeyPatch, batch: int, call: Callable[..., object], *what: int) -> None:
    """Call once the `batch`-th batch has been asked for, before any of its answers is taken."""
    generate, answers, batches = ServerEngine.generate, ServerEngine._await, []

    def counted(engine: Any, requests: Any, sampling: Any) -> Any:
        batches.append(requests[0].max_tokens != PROBE_TOKENS)
        return generate(engine, requests, sampling)

    def call_and_await(engine: Any, asked: Any) -> None:
        if batches[-1] and sum(batches) == batch:
            call(*what)
        answers(engine, asked)

    monkeypatch.setattr(ServerEngine, "generate", counted)
    monkeypatch.setattr(ServerEngine, "_await", call_and_await)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_that_dies_costs_no_finished_step(
    tmp_path: Path, start: Path, own_server: Server, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """SIGKILL when the third batch has been asked for. Resumed with a new one, the run ends as an undisturbed one.

    With train.overlap that is while the second one trains; the third is generated again, from the weights of then.
    """
    sections = {"train": {"overlap": overlap}, "checkpoint": {"every": 1}}
    whole = train(run_of(tmp_path, start, "whole", 4, own_server, **sections))
    config = run_of(tmp_path, start, "broken", 4, own_server, **sections)
    in_batch(monkeypatch, 3, own_server.signal, signal.SIGKILL)
    with pytest.raises(RunFailed, match=rf"{own_server.url} did not answer.*Start it again, and the run with --resume"):
        train(config)
    folder = Path(config.output_dir)
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None
    assert checkpoint.read_state(last)["step"] == 2
    assert len(metrics(folder)) == 2
    with Server(start, tmp_path / "log", LONGEST, port=processes.free_port()) as another:
        train(changed(config, "rollout", server_url=another.url), resume="newest")
    if overlap:
        assert metrics(folder)[:2] == metrics(whole)[:2]
        assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    else:
        check(whole, folder, 4)


def test_a_server_that_hangs_ends_the_run(
    tmp_path: Path, start: Path, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its connections stay, but it does not even say that it is well. Then a server that dies in a push."""
    with monkeypatch.context() as patch:
        patch.setattr(rlplus.train.rollout.http_engine, "wait", lambda left, _, when: wait(left, 3.0, when))

        def stop() -> None:
            patch.setattr(
                rlplus.train.rollout.server_engine, "PATIENCE_S", 3.0
            )  # not before: a loaded server is slow to start
            own_server.signal(signal.SIGSTOP)

        in_batch(patch, 2, stop)
        config = run_of(tmp_path, start, "run", 4, own_server)
        with pytest.raises(RunFailed, match=r"did not answer: GET /metrics: TimeoutError timed out"):
            train(config)
    own_server.signal(signal.SIGCONT)
    resume = Control.resume

    def kill_and_resume(control: Control, version: int) -> None:
        if version == 2:
            own_server.signal(signal.SIGKILL)
        resume(control, version)

    monkeypatch.setattr(Control, "resume", kill_and_resume)
    with pytest.raises(RunFailed, match=r"not take the weights of version 2: .*Start it again, and the run with --res"):
        train(config, resume="newest")
    assert [row["step"] for row in metrics(Path(config.output_dir))] == [1, 2]


def test_a_server_that_dies_ends_all_ranks(tmp_path: Path, start: Path, own_server: Server) -> None:
    """With the message of each, and without a traceback of ours."""
    config = run_of(tmp_path, start, "run", 100_000, own_server)
    log = Path(config.output_dir) / "metrics.jsonl"
    with launched(config) as ranks:
        processes.wait_until(lambda: log.exists() and log.read_text().count("\n") >= 3, ranks)
        own_server.signal(signal.SIGKILL)
        _, error = ranks.communicate(timeout=processes.PATIENCE_S)
    assert ranks.returncode == 1, "torchrun's"
    assert "Start it again, and the run with --resume" in error
    assert "rollout/server_engine.py" not in error
