"""Commands end with the process that started them, and leave nothing behind; a run among it writes its checkpoint."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
import pytest
from comparisons import FILE, QUICK, written

from rlplus.common.commands import ending_with_this_process

# Writes its process id, and at SIGTERM what a run would save.
RUN = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    Path(sys.argv[1]).with_suffix(".saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(10**6)
"""
PARENT = """
import subprocess, sys
from rlplus.common.commands import ending_with_this_process
subprocess.run(ending_with_this_process(sys.argv[1:]))
"""


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def number_in(file: Path) -> int:
    processes.wait_until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """The process that has started the command."""
    with processes.started([sys.executable, "-c", PARENT, *command]) as parent:
        yield parent


@pytest.mark.parametrize("launcher", ["exec {run}", "{run}; true", "setsid {run} & setsid {other} & wait"])
def test_a_killed_process_takes_its_commands_along(tmp_path: Path, launcher: str) -> None:
    """A run itself, one whose launcher dies at once, and those in sessions of their own: each saves."""
    (script := tmp_path / "run.py").write_text(RUN)
    files = [tmp_path / name for name in ("run", "other")[: 2 if "other" in launcher else 1]]
    run, other = (f"{sys.executable} {script} {tmp_path / name}" for name in ("run", "other"))
    with running("sh", "-c", launcher.format(run=run, other=other)) as parent:
        numbers = [number_in(file) for file in files]
        parent.kill()
        processes.wait_until(lambda: not any(map(is_running, numbers)))
    assert all(file.with_suffix(".saved").exists() for file in files)


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    deaf = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf += "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(10**6)"
    hasty = "import rlplus.common.commands as c\nc.PATIENCE_S = 0.2\nc.main()"
    command = ["sh", "-c", f'{sys.executable} -c "{deaf}" {tmp_path / "run"}; true']
    with processes.started([sys.executable, "-c", hasty, str(os.getpid()), *command]) as between:
        number = number_in(tmp_path / "run")
        between.send_signal(signal.SIGTERM)
        assert between.wait(processes.PATIENCE_S) == -signal.SIGTERM
        assert not is_running(number)


def test_it_ends_as_the_command_did() -> None:
    def ended(script: str) -> int:
        return processes.run(ending_with_this_process(["sh", "-c", script])).returncode

    assert [ended("exit 0"), ended("exit 7")] == [0, 7]
    assert [ended("kill -TERM $$"), ended("kill -KILL $$"), ended("kill -INT $$")] == [-15, -9, -2]
    missing = processes.run(ending_with_this_process(["/no/such/launcher"]))
    assert (missing.returncode, missing.stderr) == (127, "/no/such/launcher: No such file or directory\n")


def test_the_command_has_the_signals_of_its_starter(tmp_path: Path) -> None:
    """None is blocked or ignored that is not otherwise."""
    shown = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]  # a shell would unblock them
    assert processes.run(ending_with_this_process(shown)).stdout == processes.run(shown).stdout


COMPARE = """
import sys
from rlplus.tools.cli import main
sys.exit(main(["compare", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_killed_comparison_leaves_nothing_running(tmp_path: Path) -> None:
    """Neither a training nor the making of a base model."""
    (script := tmp_path / "run.py").write_text(RUN)
    launcher = f"{sys.executable} {script} {tmp_path / 'run'}"
    options = ["--output", str(tmp_path / "out"), "--presets", "GRPO", "--seeds", "1", "--launcher", launcher]
    path = written(tmp_path, FILE | {"search": None})
    with processes.started([sys.executable, "-c", COMPARE, str(path), *options]) as compare:
        number = number_in(tmp_path / "run")
        compare.kill()
        processes.wait_until(lambda: not is_running(number))
    assert (tmp_path / "run.saved").exists()
    endless = {"prepare": "experiments.toy:prepare", "options": {"base": QUICK["base"] | {"sloppy_steps": 10**9}}}
    path = written(tmp_path, FILE | {"search": None, "settings": {"one": endless}})
    options[1] = str(tmp_path / "endless")

    def workers() -> list[int]:
        found = Path(f"/proc/{compare.pid}/task/{compare.pid}/children")
        started = map(int, found.read_text().split()) if found.exists() else ()
        return [number for number in started if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes()]

    with processes.started([sys.executable, "-c", COMPARE, str(path), *options]) as compare:
        processes.wait_until(workers, compare)
        (worker,) = workers()
        wait_for_work(worker)
        compare.kill()
        processes.wait_until(lambda: not is_running(worker))


def wait_for_work(number: int) -> None:
    """Until the process has used five seconds: it has imported what it needs, and works."""
    tick = os.sysconf("SC_CLK_TCK")
    stat = Path(f"/proc/{number}/stat")
    processes.wait_until(lambda: int(stat.read_text().rpartition(")")[2].split()[11]) > 5 * tick)
