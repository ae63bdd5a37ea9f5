"""Crashes of the machine, enumerated: what the disk may then hold, and what is found and resumed there.

Every call that changes a file is recorded, and each state that a crash may leave is made (`crash_states`).
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crash_runs import (
    COLD,
    Truth,
    check_comparison,
    check_evaluation,
    check_run,
    compare,
    evaluate,
    noise,
    numbers,
    read,
    recorded,
    same_end,
    train_in_parts,
    write_comparison,
    write_config,
    write_problems,
)
from crash_states import Counts, State, states
from file_calls import Call, mark, need_notifications, watch

from rlplus.common.agree import initialize_distributed
from rlplus.common.durable import make_folder, write_text
from rlplus.tools.compare.outcomes import Results
from rlplus.train import checkpoint
from rlplus.train.config import load_config
from rlplus.train.evaluation.results import load_results
from rlplus.train.trainer import train
from rlplus.train.trainer.run_folder import RunFolder

EACH = 6  # one in so many kinds of states, that is sets of names, is resumed
MOST = 100  # combinations that are enumerated whole, where there are so few


@pytest.fixture(autouse=True)
def _seen() -> None:
    need_notifications()


def each_state(
    place: Path, calls: Sequence[Call], check: Callable[[State], None], counts: Counts, **options: Any
) -> Iterator[State]:
    """Write each state into the folder and check it; AssertionError says which failed."""
    for state in states(calls, counts, **options):
        shutil.rmtree(place, ignore_errors=True)
        state.write(place)
        try:
            check(state)
        except Exception as error:
            raise AssertionError(f"{state.what}, with {state.marks}: {error!r}") from error
        yield state


def write_thrice(place: str) -> None:
    make_folder(Path(place) / "new/deeper")
    mark("made 1")
    for number in (1, 2, 3):
        write_text(Path(place) / "new/a.txt", f"{number}" * 9)
        mark(f"written {number}")


def test_a_replaced_file_is_whole_after_every_crash(tmp_path: Path) -> None:
    """It is one of those written, no older than the last that was promised; a folder that was made is there."""
    calls, place, counts = recorded(tmp_path / "disk", write_thrice, method="fork"), tmp_path / "state", Counts()

    def check(state: State) -> None:
        written, file = numbers(state.marks, "written")[-1], place / "new/a.txt"
        text = file.read_text() if file.exists() else "0" * 9
        assert text in [f"{number}" * 9 for number in range(written, written + 2)]
        assert (place / "new/deeper").is_dir() or not state.marks
        others = {path.name.partition(".txt")[2] for path in place.glob("new/a.txt*")}
        assert all(name == "" or name.endswith(".new") for name in others)

    found = [*each_state(place, calls, check, counts, most=MOST)]
    assert len(found) == counts.distinct > 20, counts


class Shards:
    """Stands in for DeepSpeed's engine, whose methods write a checkpoint. Its folder has been made."""

    def __init__(self) -> None:
        self.module, self.checkpoint_engine = torch.nn.Linear(1, 1), Writer()

    def save_checkpoint(self, folder: str, tag: str, **_: Any) -> None:
        self.checkpoint_engine.save({"weight": torch.arange(9.0)}, f"{folder}/{tag}/model_states.pt")
        self._copy_recovery_script(folder)

    def _copy_recovery_script(self, folder: str) -> None:
        (Path(folder) / "script.py").write_text("pass\n")


class Writer:
    def save(self, value: Any, path: str) -> None:
        torch.save(value, path)


def save_twice(place: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for step in (1, 2):
        checkpoint.save({"policy": Shards()}, Path(place) / "run/checkpoints", step, {"step": step}, keep=1)
        mark(f"saved {step}")


def test_the_newest_checkpoint_is_whole_after_every_crash(tmp_path: Path) -> None:
    """It is the last that was saved, or the one being published; nothing else is taken for one."""
    calls, place, counts = recorded(tmp_path / "disk", save_twice, method="fork"), tmp_path / "state", Counts()
    truth = Truth(calls)

    def check(state: State) -> None:
        saved = numbers(state.marks, "saved")[-1]
        found = checkpoint.latest(place / "run/checkpoints")
        step = checkpoint.read_state(found)["step"] if found else 0
        assert saved <= step <= saved + 1
        if found:
            assert checkpoint._damage(checkpoint._checked_files(found)) == []
            assert read(found) == truth.checkpoints[step]

    found = [*each_state(place, calls, check, counts, most=MOST)]
    assert len(found) == counts.distinct > 300, counts


def note_model(place: str) -> None:
    """The end of a run, as far as the folder knows."""
    run = object.__new__(RunFolder)
    run.model, run._exported = Path(place) / "model", Path(place) / "checkpoints/exported"
    make_folder(run._exported.parent)
    run.model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (run.model / name).write_text(name)
    run.note_result(3)
    mark("noted 3")


def test_a_model_is_on_the_disk_before_it_is_noted(tmp_path: Path) -> None:
    calls, place, counts = recorded(tmp_path / "disk", note_model, method="fork"), tmp_path / "state", Counts()

    def check(state: State) -> None:
        noted = (place / "checkpoints/exported").exists()
        assert noted or not state.marks
        if noted:
            assert read(place / "model") == {name: name.encode() for name in ("config.json", "model.safetensors")}

    assert len([*each_state(place, calls, check, counts, most=MOST)]) > 20


def shape(state: State) -> frozenset[str]:
    """The names in a state, without those that differ between processes."""
    return frozenset(re.sub(r"\.\d+\.new$|\.tmp\w+$", "", path) for path in state.files if not noise(path))


def report(what: str, counts: Counts, **more: int) -> None:
    rest = "".join(f", {number} {name}" for name, number in more.items())
    sys.stderr.write(f"{what}: {counts.calls} calls, {counts.states} states, {counts.distinct} distinct{rest}\n")


@pytest.mark.slow
def test_a_run_resumes_after_every_crash(tmp_path: Path) -> None:
    """Each state is what a resumed run may find; from some of each kind, runs go on to the end of the undisturbed."""
    initialize_distributed()
    path, place, counts = write_config(tmp_path, tmp_path / "out/run"), tmp_path / "out", Counts()
    calls, config = recorded(place, train_in_parts, str(path)), load_config(path)
    truth, kinds, resumed = Truth(calls), set[frozenset[str]](), 0
    for state in each_state(place, calls, lambda state: check_run(config, state.marks, truth), counts, noise=noise):
        if (kind := shape(state)) not in kinds:
            kinds.add(kind)
            if len(kinds) % EACH == 0:
                shutil.rmtree(place)
                state.write(place)
                assert train(config, resume="auto") == place / "run"
                same_end(place / "run", truth)
                resumed += 1
    report("train", counts, kinds=len(kinds), resumed=resumed)
    assert counts.distinct > 1000


@pytest.mark.slow
def test_an_evaluation_goes_on_after_every_crash(tmp_path: Path) -> None:
    """With the samples that were kept, which are not drawn again, to the same results."""
    place, problems = tmp_path / "out", write_problems(tmp_path)
    calls, counts, kinds, drawn = recorded(place, evaluate, *problems), Counts(), set(), 0
    truth = load_results(place / "eval")["bench"]
    files = read(place)
    checked = each_state(place, calls, lambda state: check_evaluation(place, state.marks, files), counts)
    for state in checked:
        if (kind := shape(state)) not in kinds:
            kinds.add(kind)
            kept = len([path for path in state.files if path.endswith(".parquet")])
            again = watch(place, evaluate, [str(place), *problems])
            assert again.status == 0, again.said[-2000:]
            marks = [call.path for call in again.calls if call.kind == "mark"]
            assert len(numbers(marks, "kept")) - 1 == (0 if "finished 0" in state.marks else 3 - kept)
            assert replace(load_results(place / "eval")["bench"], seconds=0.0) == replace(truth, seconds=0.0)
            drawn += 1
    report("eval", counts, resumed=drawn)
    assert counts.distinct > 100


@pytest.mark.slow
def test_a_comparison_goes_on_after_every_crash(tmp_path: Path) -> None:
    path, place, counts, kinds = write_comparison(tmp_path), tmp_path / "out", Counts(), set()
    calls = recorded(place, compare, str(path))
    truth = Results.load(place / "all/results.json").outcomes
    checked = each_state(place, calls, lambda state: check_comparison(place, path, state.marks), counts)
    for state in checked:
        if (kind := shape(state)) not in kinds:
            kinds.add(kind)
            if len(kinds) % EACH == 0:
                again = watch(place, compare, [str(place), str(path), COLD])
                assert again.status == 0, f"{state.what}: {again.said[-2000:]}"
                assert Results.load(place / "all/results.json").outcomes == truth
    report("compare", counts, kinds=len(kinds), resumed=len(kinds) // EACH)
    assert counts.distinct > 100
