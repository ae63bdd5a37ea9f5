"""Faults around a run: kills, a full disk, signals, a grader that hangs, dies or exhausts memory; and a soak test."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import processes
import pytest
import quick
import torch
from safetensors.torch import load_file
from trainer_runs import environment, metrics, run_config

from rlplus.train import checkpoint
from rlplus.train.config import Config
from rlplus.train.trainer import Run, open_run, train


def write_config(config: Config, folder: Path) -> Path:
    path = folder / f"{Path(config.output_dir).name}.yaml"
    path.write_text(config.to_yaml())
    return path


def start(path: Path, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rlplus", "train", str(path), *options]
    return processes.started(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def steps_logged(folder: Path) -> int:
    """The last step whose line is complete."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; every file that `latest` promises is there."""
    found = checkpoint.latest(folder / "checkpoints")
    if found is None:
        return 0
    state = checkpoint.read_state(found)
    assert {p.name for p in found.rglob("*")} >= {"rng-0.pt", "state.json", "mp_rank_00_model_states.pt"}
    return state["step"]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model/model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("segment", [None, 3])
def test_killed_twenty_times_a_run_ends_as_if_it_never_had_been(tmp_path, segment):
    """SIGKILL: 14 times some random steps and milliseconds into training, 6 times at a random time from the start.

    With segments two batches wait unfinished in each checkpoint.
    """
    draw, every, kills = random.Random(0), 3, 20
    rollout = {"segment": segment}
    config = run_config(tmp_path, "killed", train={"steps": 200}, checkpoint={"every": every}, rollout=rollout)
    path, folder = write_config(config, tmp_path), Path(config.output_dir)
    lost, moments, start_up = [], [], 0.0
    for kill in range(kills):
        before = newest(folder)
        with start(path, "--resume=auto") as process:
            began = time.monotonic()
            if kill % 3 == 2:
                until, most = began + draw.uniform(0.2, 1.2 * start_up), max(before, steps_logged(folder)) + 12
                processes.wait_until(
                    lambda until=until, most=most: time.monotonic() > until or steps_logged(folder) >= most, process
                )
                moments.append("any time")
            else:
                goal = max(before, steps_logged(folder)) + draw.randint(1, 6)  # lines of lost steps are still there
                processes.wait_until(lambda goal=goal: steps_logged(folder) >= goal, process, every_s=0.001)
                start_up = start_up or time.monotonic() - began
                time.sleep(draw.uniform(0, 0.06))  # a step takes 20 to 60 ms, a checkpoint as long
                moments.append(f"after step {goal}")
            process.kill()
            _, error = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"kill {kill}: the run ended by itself\n{error[-3000:]}"
        after = newest(folder)
        assert after >= before, f"kill {kill}, {moments[-1]}: checkpoint {before} is gone, there is {after}"
        lost.append(steps_logged(folder) - after)
        assert lost[-1] <= every, f"kill {kill}, {moments[-1]}: {lost[-1]} steps lost"
    assert max(lost) > 0
    with start(path, "--resume") as finished:
        _, error = finished.communicate(timeout=processes.PATIENCE_S)
    assert finished.returncode == 0, error[-3000:]
    whole = train(config.model_copy(update={"output_dir": str(tmp_path / "whole")}))
    assert metrics(folder) == metrics(whole)
    assert all((row.get("batch/waiting", 0) > 0) == (segment is not None) for row in metrics(whole))
    assert same_weights(folder, whole)
    assert {p.name for p in (folder / "checkpoints").iterdir() if p.is_dir()} == {"step-000198", "step-000200"}


FULL_DISK = """
import json, os, pathlib, subprocess, sys
config, disk, rlplus = sys.argv[1], pathlib.Path(sys.argv[2]), [sys.executable, "-m", "rlplus", "train", sys.argv[1]]
def run(*options):
    done = subprocess.run([*rlplus, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    latest = disk / "checkpoints/latest"
    return [done.returncode, done.stderr[-1500:], latest.read_text() if latest.exists() else ""]
results = [run("train.steps=1")]
free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
(disk / "filler").write_bytes(bytes(free - int(sys.argv[3])))
results.append(run("train.steps=3", "--resume"))
(disk / "filler").unlink()
results.append(run("train.steps=3", "--resume"))
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [100_000, 0])
def test_a_full_disk_is_one_message_and_costs_no_checkpoint(tmp_path, room):
    """A real one, of 4 MB, that has so many bytes left: too few for a checkpoint, or none at all."""
    config = run_config(tmp_path, "disk", checkpoint={"every": 1})
    path, disk = write_config(config, tmp_path), Path(config.output_dir)
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=4m none "{disk}" && exec "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no right to mount a disk of its own")
    command = [*namespace, sys.executable, "-c", FULL_DISK, str(path), str(disk), str(room)]
    done = processes.run(command, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    first, full, after = json.loads(done.stdout.splitlines()[-1])
    assert (first[0], first[2]) == (0, "step-000001"), first
    assert full[0] == 2, full
    assert full[2] == "step-000001"
    assert "could not write the " + ("checkpoint of step 2 under" if room else "model to") in full[1]
    assert "Traceback" not in full[1]
    assert (after[0], after[2]) == (0, "step-000003"), after


@pytest.mark.parametrize("write", quick.first(1, ["rename", "write_text"]))
def test_a_disk_that_fails_at_the_end_of_a_save(tmp_path, monkeypatch, write):
    """After DeepSpeed's shards: in state.json, or in the rename."""
    config = run_config(tmp_path, train={"steps": 1})
    folder = train(config)

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    more = config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})})
    with monkeypatch.context() as patch, open_run(more, resume="newest") as run:
        patch.setattr(checkpoint.Path if write == "rename" else checkpoint, write, full)
        run.progress.step = 2
        with pytest.raises(OSError, match=r"could not write the checkpoint of step 2 under .*rank 0: .*No space left"):
            run.save_checkpoint()
    assert newest(folder) == 1
    train(more, resume="newest")
    assert newest(folder) == 2


GRADER = """
import os, time
def reward(text, answer):
    if "<" in text and ">" in text:  # a demonstration
        return 1.0
    kind = (len(text) + sum(map(ord, text))) % 5
    if kind == 0:
        time.sleep(3600)
    if kind == 1:
        os._exit(3)
    if kind == 2:
        return float(len(bytearray(8 << 30)))
    return 0.5 if kind == 3 else 0.0
"""


@pytest.mark.slow
def test_a_grader_that_hangs_dies_and_eats_memory_does_not_stop_a_run(tmp_path, monkeypatch):
    (tmp_path / "bad_grader.py").write_text(GRADER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = {"kind": None, "pattern": None, "function": "bad_grader:reward", "timeout_s": 0.5, "memory_mb": 512}
    rows = metrics(train(run_config(tmp_path, reward=reward)))
    assert [row["step"] for row in rows] == [1, 2]
    for problem in ("timeout", "crash"):
        assert sum(row[f"reward/{problem}"] for row in rows) > 0
    assert any(0 < row["reward/internal"] < 0.5 for row in rows)
    assert all(row["reward/external"] == 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_command_with_the_usual_status(tmp_path, number):
    """128 + the signal's number, after the step and a checkpoint; a second one does not wait."""
    config = run_config(tmp_path, train={"steps": 100_000})
    path, folder = write_config(config, tmp_path), Path(config.output_dir)
    with start(path) as process:
        processes.wait_until(lambda: steps_logged(folder) >= 3, process)
        process.send_signal(number)
        _, error = process.communicate(timeout=processes.PATIENCE_S)
    assert process.returncode == 128 + number, error[-3000:]
    assert "--resume goes on from here" in error
    assert newest(folder) == steps_logged(folder) >= 3
    assert not (folder / "model").exists()


@pytest.mark.slow
def test_two_thousand_steps_take_no_more_memory(tmp_path):
    """RSS after each step; the trend of the last thousand steps, by least squares, is below 1 kB a step.

    For the first thousand the allocators still settle: 4 MB in all.
    """
    config = run_config(
        tmp_path,
        train={"steps": 2000},
        checkpoint={"every": 50},
        evaluation={"data": {"path": "-", "max_prompt_length": 8}, "every": 1},
    )
    rss: list[int] = []

    def measure(run: Run) -> dict[str, float]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        return {}

    train(config, evaluate=measure)
    late = torch.tensor(rss[1000:], dtype=torch.float64)
    step = torch.arange(len(late), dtype=torch.float64)
    step -= step.mean()
    slope = float((step * (late - late.mean())).sum() / (step * step).sum())
    sys.stderr.write(f"RSS {rss[0] / 1e6:.1f} MB at first, {rss[-1] / 1e6:.1f} MB at last, {slope:.0f} bytes a step\n")
    assert slope < 1000
    assert rss[-1] - rss[1000] < 2e6
