"""Completion of the command line in the shells themselves: what they make of Tab in a terminal."""

import os
import pty
import shutil
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest

from rlplus.tools.cli import main

# Each shell without its user's files; its start; and a command that ends what was typed with a line to wait for.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set bell-style none'; . ./script"),
    "zsh": (["zsh", "-f", "-i"], 'unsetopt beep; autoload -U compinit; compinit -u -D; eval "$(<script)"'),
}
LINES = {  # text that is typed, with Tab, and the arguments that the command then gets
    "rlplus wat\trun\n": "watch|run",
    "rlplus train --fo\trun.yaml\n": "train|--force|run.yaml",
    "rlplus train my_r\ttrain.weight_d\t0.5\n": "train|my_run.yaml|train.weight_decay=0.5",
    "rlplus plan my_r\t--js\talgorithm.objective.clip_l\t1\n": "plan|my_run.yaml|--json|algorithm.objective.clip_low=1",
    "rlplus train --resume my_r\ttrain.weight_d\t0.5 train.warmup_s\t2\n": (
        "train|--resume|my_run.yaml|train.weight_decay=0.5|train.warmup_steps=2"
    ),
    "rlplus report runs/fi\tres\truns/fi\t\t-o pa\t\n": (
        "report|runs/first/results.json|runs/first/results.json|-o|page.html"
    ),
    "rlplus init --gpu mi\t--gpus 2\n": "init|--gpu|mi300x|--gpus|2",
    "rlplus plan my_r\t--gpu rtx5\t\n": "plan|my_run.yaml|--gpu|rtx5090",
    "rlplus completion z\t\n": "completion|zsh",
}


class Terminal:
    """An interactive shell in a folder, at the other end of a terminal."""

    def __init__(self, folder: Path, shell: list[str]) -> None:
        self.main, inside = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "PS1": "", "LC_ALL": "C.UTF-8"}
        self.shell = processes.started(shell, environment, cwd=folder, stdin=inside, stdout=inside, stderr=inside)
        self.process = self.shell.__enter__()
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def close(self) -> None:
        self.shell.__exit__(None, None, None)
        os.close(self.main)


@pytest.fixture(params=SHELLS)
def terminal(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    """A shell that has read its script, with a function in place of rlplus that writes its arguments into a file."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    assert main(["completion", name]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "my_run.yaml").touch()
    (tmp_path / "page.html").touch()
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/results.json").touch()
    command, start = SHELLS[name]
    got = 'rlplus() { (IFS="|"; printf "%s\\n" "$*") > got.new; mv got.new got; }'
    (tmp_path / "start").write_text(f"{got}\n{start}\n: > started\n")
    terminal = Terminal(tmp_path, command)
    try:
        terminal.type(". ./start\n")
        processes.wait_until((tmp_path / "started").exists, terminal.process)
        yield terminal
    finally:
        terminal.close()


def test_a_shell_completes_commands_options_keys_and_files(terminal: Terminal, tmp_path: Path) -> None:
    got = tmp_path / "got"
    for typed, arguments in LINES.items():
        terminal.type(typed)
        processes.wait_until(got.exists, terminal.process)
        assert got.read_text() == f"{arguments}\n", typed
        got.unlink()
