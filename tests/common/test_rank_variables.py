"""The variables of a launcher: what describes no rank is refused in a line, before anything waits."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import processes
import pytest
from trainer_runs import environment, run_config

from rlplus.common.rank_variables import be_alone, check_launcher, rank
from rlplus.tools.cli import main

# Kubeflow's PyTorchJob sets these four.
FOUR = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OF_LAUNCHERS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The four variables; what is set here, and by what is tested, is gone afterwards."""
    for name, value in FOUR.items():
        monkeypatch.setenv(name, value)
    for name in OF_LAUNCHERS:
        monkeypatch.setenv(name, "0")  # so that it is restored to what it was
        monkeypatch.delenv(name)
    return monkeypatch


def test_one_process_per_machine_is_its_first(launched: pytest.MonkeyPatch) -> None:
    check_launcher()
    assert {name: os.environ[name] for name in OF_LAUNCHERS} == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert rank() == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "0", "WORLD_SIZE a whole number from 1 on; got '0'"),
        ("WORLD_SIZE", "x", "WORLD_SIZE a whole number from 1 on; got 'x'"),
        ("WORLD_SIZE", "", "WORLD_SIZE a whole number from 1 on; got ''"),
        ("WORLD_SIZE", "1", "RANK below WORLD_SIZE=1; got 1"),
        ("WORLD_SIZE", None, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT beside RANK=1; got no WORLD_SIZE."),
        ("RANK", "-1", "RANK a whole number from 0 on; got '-1'"),
        ("RANK", "1.0", "RANK a whole number from 0 on; got '1.0'"),
        ("RANK", None, "RANK of the launcher beside WORLD_SIZE=2; got none"),
        ("LOCAL_RANK", "x", "LOCAL_RANK a whole number from 0 on; got 'x'"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK a whole number from 0 on; got '-1'"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE a whole number from 1 on; got '0'"),
        ("MASTER_PORT", "http", "MASTER_PORT a whole number from 1 on; got 'http'"),
        ("MASTER_PORT", "0", "MASTER_PORT a whole number from 1 on; got '0'"),
        ("MASTER_PORT", "65536", "MASTER_PORT at most 65535; got 65536"),
        ("MASTER_PORT", "9" * 5000, "MASTER_PORT a whole number from 1 on; got '999"),
        ("MASTER_PORT", None, "beside RANK=1; got no MASTER_PORT."),
        ("MASTER_ADDR", "", "beside RANK=1; got no MASTER_ADDR."),
        ("MASTER_ADDR", " ", "beside RANK=1; got no MASTER_ADDR."),
        ("MASTER_ADDR", "one two", "MASTER_ADDR a host's name or address; got 'one two'"),
        ("MASTER_ADDR", "one\n", "MASTER_ADDR a host's name or address; got 'one\\n'"),
        ("LOCAL_WORLD_SIZE", "2", "LOCAL_RANK beside LOCAL_WORLD_SIZE=2; got none"),
        ("LOCAL_WORLD_SIZE", "4", "LOCAL_WORLD_SIZE at most WORLD_SIZE=2; got 4"),
    ],
)
def test_what_is_no_ranks_is_one_line_in_each_command_that_ranks_run(
    name: str,
    value: str | None,
    message: str,
    launched: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if value is None:
        launched.delenv(name)
    else:
        launched.setenv(name, value)
    task = run_config(tmp_path).data.paths[0]
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, evaluation={"data": {"path": task, "max_prompt_length": 8}}).to_yaml())
    (tmp_path / "config.json").write_text("{}")
    for command, *options in (["train"], ["eval", "--model", str(tmp_path)], ["compare"]):
        assert main([command, str(path), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"rlplus {command}: want the")
        assert message in error
        assert error.count("\n") == 1, error


def test_a_local_rank_is_below_its_machines(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_RANK", "1")
    check_launcher()
    launched.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=re.escape("LOCAL_RANK below LOCAL_WORLD_SIZE=1; got 1")):
        check_launcher()
    launched.setenv("LOCAL_WORLD_SIZE", "2")
    launched.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="LOCAL_RANK beside LOCAL_WORLD_SIZE=2; got none"):
        check_launcher()


@pytest.mark.parametrize("name", OF_LAUNCHERS)
def test_a_part_of_a_launcher_is_refused(name: str, launched: pytest.MonkeyPatch) -> None:
    """Without RANK: this process would take another GPU than a run on its own does."""
    for each in FOUR:
        launched.delenv(each)
    launched.setenv(name, "1" if name == "LOCAL_WORLD_SIZE" else "0")
    check_launcher()
    launched.setenv(name, "3")
    with pytest.raises(ValueError, match=f"want the variable RANK of the launcher beside {name}=3; got none"):
        check_launcher()


def test_a_command_of_one_process_forgets_them(launched: pytest.MonkeyPatch) -> None:
    be_alone()
    check_launcher()
    assert rank() == 0
    assert not {*FOUR, *OF_LAUNCHERS} & os.environ.keys()


@pytest.mark.slow
def test_a_job_with_these_four_variables_trains_and_its_shell_plans(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, train={"steps": 1}).to_yaml())
    here = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    rlplus = [sys.executable, "-m", "rlplus"]
    with ExitStack() as stack:
        command = [*rlplus, "train", str(path)]
        ranks = [
            stack.enter_context(processes.started(command, here | {"RANK": str(number)}, **pipes))
            for number in range(2)
        ]
        outputs = [each.communicate(timeout=processes.PATIENCE_S)[0] for each in ranks]
    for each, output in zip(ranks, outputs, strict=True):
        assert each.returncode == 0, output[-4000:]
    assert (tmp_path / "run/checkpoints/step-000001/rng-1.pt").is_file()  # there were two ranks
    done = processes.run([*rlplus, "plan", "--data", "--gpus", "1", str(path)], env=here | {"RANK": "1"})
    assert done.returncode == 0, done.stderr
    assert "A run would draw from 6 prompts." in done.stdout
