"""Disks that fail at a call: a message, no promise broken, and the same end after a resume; on two ranks, too."""

import errno
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
from crash_runs import Truth, check_run, numbers, recorded, same_end, train_as, train_marked, write_config
from file_calls import Call, Watched, need_notifications, watch

from rlplus import checkpoint
from rlplus.config import load_config
from rlplus.trainer import train
from rlplus.trainer.ranks import initialize_distributed

EACH = 6  # one in so many kinds of calls, that is a call and a file, fails


@pytest.fixture(autouse=True)
def _seen() -> None:
    need_notifications()


def plain(path: str) -> str:
    """Without what differs between processes."""
    return re.sub(r"(\.\d+)?\.new$|\.tmp\w+$|(?<=tfevents).*|(?<=\.rlplus-)\w+", "", path)


def failing(kind: str, path: str, nth: int, number: int) -> Callable[[Call], int]:
    """Answers calls: the nth of this kind on this path fails; when the disk is full, all that write fail from there."""
    seen = 0

    def decide(call: Call) -> int:
        nonlocal seen
        if seen == nth:
            writes = call.kind in ("write", "mkdir", "truncate") or call.create
            return number if writes and number == errno.ENOSPC else 0
        seen += (call.kind, plain(call.path)) == (kind, path)
        return number if seen == nth and (call.kind, plain(call.path)) == (kind, path) else 0

    return decide


def places(calls: Sequence[Call]) -> list[tuple[str, str, int]]:
    """A call in the middle of the run for each kind of call and of file: kind, path and its number among equal ones."""
    found: dict[tuple[str, str], list[tuple[str, str, int]]] = {}
    before = Counter[tuple[str, str]]()
    for call in calls:
        key = call.kind, plain(call.path)
        before[key] += 1
        if call.kind != "mark":
            found.setdefault((call.kind, re.sub(r"\d", "", key[1])), []).append((*key, before[key]))
    return [each[len(each) // 2] for each in found.values()]


def check_failure(place: Path, done: Watched, truth: Truth, path: Path) -> None:
    """One message that names the place, all promises kept, and the end of the undisturbed run after a resume."""
    config = load_config(path)
    assert "Traceback" not in done.said
    if done.status:
        message = done.said.rpartition("rlplus train: ")[2].replace("\n", " ")
        assert done.status == 2
        assert f"{place}" in message
        assert re.search("No space left on device|Input/output error|as on a full disk", message)
    check_run(config, [call.path for call in done.calls if call.kind == "mark"], Truth(done.calls))
    if done.status:
        train(config, resume="auto")
    same_end(place / "run", truth)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_one_message_and_costs_no_checkpoint(tmp_path: Path, number: int) -> None:
    """At a call of each kind, on each kind of file; a full disk stays full until the process has ended."""
    initialize_distributed()
    path, place = write_config(tmp_path, tmp_path / "out/run"), tmp_path / "out"
    calls = recorded(place, train_marked, str(path))
    truth, ended = Truth(calls), Counter[int]()
    for kind, name, nth in (chosen := places(calls)[number % EACH :: EACH]):
        shutil.rmtree(place)
        place.mkdir()
        done = watch(place, train_marked, [str(place), str(path)], failing(kind, name, nth, number))
        try:
            check_failure(place, done, truth, path)
        except Exception as error:
            raise AssertionError(f"{kind} of {name}, number {nth}: {error!r}\n{done.said[-2000:]}") from error
        ended[done.status] += 1
    sys.stderr.write(f"{errno.errorcode[number]}: {len(chosen)} calls, {ended[2]} runs ended, {ended[0]} went on\n")
    assert ended[2] > 0.8 * len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_for_one_of_two_ranks_ends_both(tmp_path: Path, rank: int) -> None:
    """At calls of a save, of each kind, and where rank 0 makes the folders, which DeepSpeed would else do."""
    path, place = write_config(tmp_path, tmp_path / "out/run"), tmp_path / "out"

    def ranks(decide: Callable[[Call], int]) -> list[Watched]:
        port = processes.free_port()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with ThreadPoolExecutor(2) as pool:
            answers = (decide if each == rank else lambda call: 0 for each in (0, 1))
            each = [
                pool.submit(watch, place, train_as, [str(place), number, port, str(path)], answer)
                for number, answer in enumerate(answers)
            ]
            return [one.result() for one in each]

    whole = ranks(lambda call: 0)
    assert [one.status for one in whole] == [0, 0], whole[1].said[-2000:]
    made = [("mkdir", f"run/checkpoints/saving{name}", 1) for name in ("", "/policy") if not rank]
    second = [place for place in places(whole[rank].calls) if place[1].startswith("run/checkpoints/saving")]
    for kind, name, nth in (chosen := made + second[rank :: 1 if rank else EACH // 2]):
        both = ranks(failing(kind, name, nth, errno.EIO))
        statuses = [one.status for one in both]
        if statuses == [0, 0] and kind == "mkdir":  # a folder that is there
            continue
        assert statuses == [2, 2], f"{kind} of {name}: {both[0].said[-2000:]}{both[1].said[-2000:]}"
        for one in both:
            assert "could not write the checkpoint of step" in one.said
            assert f"{place}" in one.said.rpartition("rlplus train: ")[2].replace("\n", " ")
        found = checkpoint.latest(place / "run/checkpoints")
        saved = numbers([call.path for call in both[0].calls if call.kind == "mark"], "saved")[-1]
        assert (checkpoint.read_state(found)["step"] if found else 0) in (saved, saved + 1)
    sys.stderr.write(f"rank {rank} of two: {len(chosen)} calls\n")
    assert len(chosen) > 3
