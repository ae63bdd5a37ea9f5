"""examples/slurm.sh with stand-ins for Slurm's commands: its signals, its commands, and a run that is requeued."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import processes
import pytest
from engine_runs import same
from torch.distributed.run import get_args_parser
from trainer_runs import environment, metrics, run_config

from rlplus.tools.cli import parse
from rlplus.train.trainer import train

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm.sh"
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf '127.0.0.1\\nsecond\\n'; else echo "$*" >> scontrol.txt; fi
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""
TORCHRUN = """#!/bin/bash
trap 'echo TERM >> signals.txt; exit 1' TERM
printf '%s\\n' "$@" > arguments.new
mv arguments.new arguments.txt
while true; do sleep 0.05; done
"""


def job(folder: Path, **programs: str) -> Mapping[str, str]:
    """The environment of a job of one node and one GPU, whose programs are these, Slurm's and the tests' own."""
    place = folder / "bin"
    place.mkdir()
    for name, text in ({"scontrol": SCONTROL, "srun": SRUN} | programs).items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    slurm = {"JOB_ID": "77", "JOB_NODELIST": "node[1-2]", "JOB_NUM_NODES": "1", "NODEID": "0", "GPUS_ON_NODE": "1"}
    path = os.pathsep.join((str(place), str(Path(sys.executable).parent), os.environ["PATH"]))
    return environment() | {f"SLURM_{name}": value for name, value in slurm.items()} | {"PATH": path}


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_ends_the_ranks_and_only_the_end_of_time_requeues(
    tmp_path: Path, number: signal.Signals, requeued: bool
) -> None:
    arguments = tmp_path / "arguments.txt"
    command = ["bash", str(SCRIPT), "run.yaml", "train.steps=3"]
    with processes.started(command, job(tmp_path, torchrun=TORCHRUN), cwd=tmp_path) as script:
        processes.wait_until(arguments.exists, script)
        os.kill(script.pid, number)
        assert script.wait(processes.PATIENCE_S) == 1
    assert (tmp_path / "signals.txt").read_text() == "TERM\n"
    said = tmp_path / "scontrol.txt"
    assert (said.read_text() if said.exists() else "") == ("requeue 77\n" if requeued else "")
    launch = get_args_parser().parse_args(arguments.read_text().splitlines())
    assert (launch.training_script, launch.module, launch.master_addr) == ("rlplus", True, "127.0.0.1")
    asked = parse(launch.training_script_args)
    assert (asked.command, asked.config, asked.overrides, asked.resume) == (
        "train",
        "run.yaml",
        ["train.steps=3"],
        "auto",
    )


@pytest.mark.slow
def test_a_requeued_job_trains_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    """The signal comes in the middle; the same job, started again, ends with the same metrics and weights."""
    whole = train(run_config(tmp_path, "whole", train={"steps": 30}))
    config = run_config(tmp_path, "parts", train={"steps": 30})
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    folder, jobs = Path(config.output_dir), job(tmp_path)
    command = ["bash", str(SCRIPT), "run.yaml"]
    with processes.started(command, jobs, cwd=tmp_path) as script:
        processes.wait_until(lambda: (folder / "metrics.jsonl").is_file() and metrics(folder), script)
        os.kill(script.pid, signal.SIGUSR1)
        assert script.wait(processes.PATIENCE_S) != 0
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77\n"
    assert 0 < int((folder / "checkpoints/latest").read_text()[-6:]) < 30
    assert processes.run(command, env=jobs, cwd=tmp_path).returncode == 0
    assert same(whole, folder)
    assert metrics(whole) == metrics(folder)
