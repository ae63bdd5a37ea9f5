"""Live trackers, as stubs with the interface of the real ones: what they get, resumes, failures, missing packages."""

import importlib
import logging
import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engine_runs import changed
from trainer_runs import environment, metrics, on_ranks, run_config

from rlplus.common.agree import initialize_distributed
from rlplus.tools.cli import TRAIN, main
from rlplus.train.trainer import train
from rlplus.train.trainer.metrics import RunLog
from rlplus.train.trainer.progress import Progress
from rlplus.train.trainer.reporter import Reporter
from rlplus.train.trainer.trackers import open_trackers

# Signatures of wandb 0.31 and trackio 0.43.
STUBS = {
    "wandb": """
class errors:
    class UsageError(Exception):
        pass
class Run:
    def log(self, data, step=None, commit=None):
        fail("log")
        logged.append((step, dict(data)))
    def finish(self, exit_code=None):
        fail("finish")
        finished.append(exit_code)
def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
         config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None,
         mode=None, force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None,
         tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None):
    return begin(locals())
""",
    "trackio": """
class Run:
    def log(self, metrics, step=None):
        fail("log")
        logged.append((step, dict(metrics)))
    def finish(self):
        fail("finish")
        finished.append(0)
def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
         resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
         auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None):
    return begin(locals())
""",
}
COMMON = """
import os
started, logged, finished, failing = [], [], [], set()
def fail(what):
    if what in failing:
        raise ConnectionError(f"{what}: no route to host")
def begin(options):
    fail("init")
    started.append({name: value for name, value in options.items() if value is not None})
    if folder := os.environ.get("STARTED"):
        open(os.path.join(folder, os.environ["RANK"]), "x").close()
    return Run()
"""


@pytest.fixture(params=STUBS)
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stub, which remembers what it was told."""
    module = ModuleType(request.param)
    module.__spec__ = ModuleSpec(request.param, None, origin="a stub")
    exec(COMMON + STUBS[request.param], vars(module))
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def identity(started: dict[str, Any]) -> str:
    """The identity of a tracker's run: equal ones are the same run."""
    return str(started.get("id") or started["name"])


def test_a_tracker_gets_every_step_and_the_configuration(tmp_path: Path, tracker: Any) -> None:
    config = run_config(tmp_path, log={tracker.__name__: "my project"})
    folder = train(config)
    (started,) = tracker.started
    assert (started["project"], started["resume"]) == ("my project", "allow")
    assert started["config"] == config.model_dump(mode="json")
    assert started.get("dir", str(folder)) == str(folder)
    rows = metrics(folder)
    assert [step for step, _ in tracker.logged] == [row["step"] for row in rows] == [1, 2]
    for (step, got), row in zip(tracker.logged, rows, strict=True):
        assert {"step": step} | {k: v for k, v in got.items() if k in row} == row
    assert len(tracker.finished) == 1
    assert list((folder / "tensorboard").iterdir())


def tracked(folder: Path, name: str, *, resumed: bool = False) -> None:
    """The calls of a run of two steps, without one."""
    initialize_distributed()
    config = run_config(folder, log={name: "p"})
    with ExitStack() as stack:
        tracks = open_trackers(config, folder, resumed=resumed, stack=stack)
        for step in (1, 2):
            for track in tracks:
                track(step, {"reward/mean": 0.5})


def test_a_resumed_run_is_the_same_and_others_are_not(tmp_path: Path, tracker: Any) -> None:
    (tmp_path / "another").mkdir()
    for folder, resumed in ((tmp_path, False), (tmp_path, True), (tmp_path, False), (tmp_path / "another", False)):
        tracked(folder, tracker.__name__, resumed=resumed)
    first, again, anew, other = map(identity, tracker.started)
    assert first == again
    assert len({first, anew, other}) == 3


@pytest.mark.parametrize(("step", "tracked"), [(1, [4, 5]), (3, [4, 5]), (0, [1, 2, 3, 4, 5])])
def test_steps_that_are_done_again_are_not_tracked_again(tmp_path: Path, step: int, tracked: list[int]) -> None:
    """Three were done before a resume at `step`; a run that begins anew, at 0, is another one."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in (1, 2, 3)))
    seen: list[int] = []
    progress = Progress(run_config(tmp_path, train={"steps": 5}))
    progress.step = step
    log = RunLog(tmp_path, progress, Reporter(tmp_path, "title"), [lambda step, metrics: seen.append(step)])
    for i in range(step + 1, 6):
        log.write(i, {"time/step": 1.0})
    assert seen == tracked
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_was_in_its_tracker(tmp_path: Path, tracker: Any) -> None:
    config = run_config(tmp_path, log={tracker.__name__: "p"}, checkpoint={"every": 1, "keep": 9})
    train(config)
    train(changed(config, "train", steps=3), resume="step-000001")
    first, second = tracker.started
    assert identity(first) == identity(second)
    assert [step for step, _ in tracker.logged] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_that_begins_anew_is_another(tmp_path: Path, tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed before its first checkpoint has left metrics, and nothing to go on from."""
    config = run_config(tmp_path, log={tracker.__name__: "p"})
    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.trainer.run.Run.save_checkpoint", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    train(config)
    first, second = tracker.started
    assert identity(first) != identity(second)
    assert [step for step, _ in tracker.logged] == [1, 2, 1, 2]


@pytest.mark.parametrize("failing", [["init"], ["log"], ["finish"], ["log", "finish"]], ids="+".join)
def test_a_tracker_that_fails_is_one_warning(
    tmp_path: Path, tracker: Any, failing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tracker.failing.update(failing)
    with caplog.at_level(logging.WARNING, "rlplus.train.trainer.trackers"):
        tracked(tmp_path, tracker.__name__)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "rlplus.train.trainer.trackers"]
    assert warning.startswith(f"{tracker.__name__} failed, and may miss steps that metrics.jsonl has: ConnectionError(")
    assert len(tracker.finished) == ("init" not in failing and "finish" not in failing)


def test_what_no_later_try_could_mend_is_an_error(tmp_path: Path, tracker: Any) -> None:
    """A key that is missing, a name that is not allowed."""
    kind = tracker.errors.UsageError if tracker.__name__ == "wandb" else ValueError

    def refuse(**_: Any) -> None:
        raise kind("log in first")

    tracker.init = refuse
    with pytest.raises(ValueError, match="log in first"):
        tracked(tmp_path, tracker.__name__)


def test_a_tracker_that_fails_once_gets_what_comes_later(
    tmp_path: Path, tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, calls = tracker.Run.log, []

    def fails_once(run: Any, values: dict[str, float], step: int) -> None:
        calls.append(step)
        if step == 1:
            raise ConnectionError
        log(run, values, step)

    monkeypatch.setattr(tracker.Run, "log", fails_once)
    tracked(tmp_path, tracker.__name__)
    assert calls == [1, 2]
    assert [step for step, _ in tracker.logged] == [2]


@pytest.mark.parametrize("name", STUBS)
def test_a_missing_package_is_said_before_anything_starts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of that name, in which wandb keeps what it could not send, is no package."""
    monkeypatch.chdir(tmp_path)
    for package in TRAIN:
        importlib.import_module(package)
    monkeypatch.setattr(sys, "path", ["", str(Path(__file__).parents[2])])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()
    config = run_config(tmp_path, log={name: "p"})
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    assert main(["train", str(path)]) == 2
    message = f'log.{name} needs the package {name}: pip install -e ".[{name}]"'
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"needs the package {name}"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", STUBS)
def test_one_rank_of_several_tracks(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(COMMON + STUBS[name])
    (tmp_path / "started").mkdir()
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, log={name: "p"}, train={"steps": 1}).to_yaml())
    here = f"{tmp_path}:{environment()['PYTHONPATH']}"
    on_ranks("-m", "rlplus", "train", path, STARTED=str(tmp_path / "started"), PYTHONPATH=here)
    assert [file.name for file in (tmp_path / "started").iterdir()] == ["0"]
