"""Commands that take long say so: a word before the slow libraries are imported, and lines while they work."""

import os
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
from report_pages import RLPLUS, step_line
from trainer_runs import environment, run_config, write_task

from rlplus.common import activity
from rlplus.tools.cli import common, main
from rlplus.tools.plan import data_report
from rlplus.train.config import path_checks

NO_TORCH = "import sys\nsys.stderr.write('torch\\n')\nsys.exit(7)\n"  # a module that says when it is imported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    evaluation = {"data": {"path": str(write_task(folder)), "max_prompt_length": 8}}
    (folder / "run.yaml").write_text(run_config(folder, evaluation=evaluation).to_yaml())
    run = folder / "made"
    run.mkdir()
    (run / "config.yaml").write_text(RLPLUS)
    (run / "metrics.jsonl").write_text(str(step_line(1)).replace("'", '"') + "\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    (folder / "stand-in").mkdir()
    (folder / "stand-in/torch.py").write_text(NO_TORCH)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        "train run.yaml", "eval run.yaml --model model", "plan run.yaml", "plan run.yaml --data", "compare run.yaml",
        "init --model nowhere --data task.jsonl --out new.yaml", "push made owner/name", "verify made",
    ],
)  # fmt: skip
def test_a_word_comes_before_what_is_slow(folder: Path, arguments: str) -> None:
    first = os.pathsep.join((str(folder / "stand-in"), environment()["PYTHONPATH"]))
    command = [sys.executable, "-m", "rlplus", *arguments.split()]
    done = processes.run(command, env=environment() | {"PYTHONPATH": first}, cwd=folder)
    assert (done.returncode, done.stderr, done.stdout) == (7, "loading the libraries\ntorch\n", "")


def test_other_ranks_are_silent(folder: Path) -> None:
    first = os.pathsep.join((str(folder / "stand-in"), environment()["PYTHONPATH"]))
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = [sys.executable, "-m", "rlplus", "train", str(folder / "run.yaml")]
    done = processes.run(command, env=environment() | {"PYTHONPATH": first} | launched)
    assert done.stderr == "torch\n"


class Said:
    """Everything that was written to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.text = capsys, ""

    def has(self, part: str) -> bool:
        self.text += self._capsys.readouterr().err
        return part in self.text


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setattr(common, "EVERY_S", 0.001)
    return Said(capsys)


def test_a_plan_of_data_counts_what_is_graded(folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> None:
        activity.current.begin("demonstrations")
        activity.grading.begin(7000)
        activity.grading.add(812)
        line = "rlplus plan  grading demonstrations 812 of 7,000 demonstrations, 0 s\n"
        processes.wait_until(lambda: said.has(line))
        raise ValueError("that was it")

    monkeypatch.setattr(data_report, "plan_data", slow)
    assert main(["plan", str(folder / "run.yaml"), "--data"]) == 2
    assert not said.has("Traceback")


def test_init_says_what_takes_long(said: Said, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> None:
        processes.wait_until(lambda: said.has("rlplus init  reading the data and trying settings, 0 s\n"))
        raise ValueError("that was it")

    monkeypatch.setattr("rlplus.tools.init.start", slow)
    assert main(["init", "--model", "m", "--data", "d", "--out", str(folder / "new.yaml")]) == 2


def test_a_plan_of_data_has_the_phases_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, phases = activity.Activity.begin, list[str]()

    def noted(current: activity.Activity, phase: str) -> None:
        phases.append(phase)
        begin(current, phase)

    monkeypatch.setattr(activity.Activity, "begin", noted)
    data_report.plan_data(run_config(tmp_path))
    assert phases == ["data", "demonstrations"]


def test_a_wait_for_the_hub_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def slow(*_: Any, **__: Any) -> None:
        processes.wait_until(lambda: "waiting for https://hub.test, 10.0 s at most" in caplog.text)
        raise OSError("no route")

    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.test")
    monkeypatch.setattr(path_checks, "SILENT_S", 0.0)
    monkeypatch.setattr(path_checks, "urlopen", slow)
    assert path_checks._unreachable() == "https://hub.test cannot be reached (no route)"
