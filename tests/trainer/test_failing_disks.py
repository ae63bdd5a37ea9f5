"""Disks that fail at a call: a message, no promise broken, and the same end after a resume; on two ranks, too."""

import errno
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import processes
import pytest
from crash_runs import (
    COLD,
    Truth,
    check_comparison,
    check_run,
    compare,
    evaluate,
    numbers,
    recorded,
    same_end,
    train_as,
    train_marked,
    write_comparison,
    write_config,
    write_problems,
)
from file_calls import Call, Watched, need_notifications, watch

from rlplus.common.agree import initialize_distributed
from rlplus.tools.compare.outcomes import Results
from rlplus.train import checkpoint
from rlplus.train.config import load_config
from rlplus.train.data import KeptSample, read_kept
from rlplus.train.evaluation.results import load_results
from rlplus.train.trainer import train

EACH = 6  # one in so many kinds of calls, that is a call and a file, fails
SIMILAR = re.compile(r"\d|(?<=/)(Base|SFT|SFT\+GRPO)(?=/|$)")  # steps, seeds and methods are of one kind


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
            found.setdefault((call.kind, SIMILAR.sub("", key[1])), []).append((*key, before[key]))
    return [each[len(each) // 2] for each in found.values()]


def check_message(place: Path, done: Watched, command: str) -> None:
    """A command that failed said what failed, once, and where."""
    assert "Traceback" not in done.said
    if done.status:
        message = done.said.rpartition(f"rlplus {command}: ")[2].replace("\n", " ")
        assert done.status == 2
        assert f"{place}" in message
        assert re.search("No space left on device|Input/output error|as on a full disk", message)


def each_failure(
    place: Path,
    chosen: Sequence[tuple[str, str, int]],
    number: int,
    action: Callable[..., int],
    arguments: Sequence[str],
    check: Callable[[Watched], None],
) -> None:
    """Run the command for each call that fails, in an empty folder, and check what it leaves."""
    ended = Counter[int]()
    for kind, name, nth in chosen:
        shutil.rmtree(place)
        place.mkdir()
        done = watch(place, action, [str(place), *arguments], failing(kind, name, nth, number))
        try:
            check(done)
        except Exception as error:
            raise AssertionError(f"{kind} of {name}, number {nth}: {error!r}\n{done.said[-2000:]}") from error
        ended[done.status] += 1
    sys.stderr.write(f"{errno.errorcode[number]}: {len(chosen)} calls, {ended[2]} runs ended, {ended[0]} went on\n")
    assert ended[2] > 0.8 * len(chosen)


def check_failure(place: Path, done: Watched, truth: Truth, path: Path) -> None:
    """One message that names the place, all promises kept, and the end of the undisturbed run after a resume."""
    config = load_config(path)
    check_message(place, done, "train")
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
    truth, chosen = Truth(calls), places(calls)[number % EACH :: EACH]
    each_failure(place, chosen, number, train_marked, [str(path)], lambda done: check_failure(place, done, truth, path))


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_evaluation_on_a_disk_that_fails_goes_on_with_what_it_kept(tmp_path: Path, number: int) -> None:
    """Samples that were kept are the undisturbed command's, and are not drawn again."""
    place, problems = tmp_path / "out", write_problems(tmp_path)
    calls = recorded(place, evaluate, *problems)

    def kept() -> dict[str, list[KeptSample]]:
        return {path.name: read_kept(path) for path in (place / "eval/samples").glob("*.parquet")}

    truth, samples = load_results(place / "eval")["bench"], kept()
    assert len(samples) == 3

    def same_result() -> bool:
        return replace(load_results(place / "eval")["bench"], seconds=0.0) == replace(truth, seconds=0.0)

    def check(done: Watched) -> None:
        check_message(place, done, "eval")
        marks = [call.path for call in done.calls if call.kind == "mark"]
        before = kept()
        assert before == {name: samples[name] for name in before}
        assert len(before) >= len(numbers(marks, "kept")) - 1
        result = (place / "eval/evaluation-bench.json").exists()
        assert same_result() if result else done.status
        again = watch(place, evaluate, [str(place), *problems])
        assert again.status == 0, again.said[-2000:]
        drawn = len(numbers([call.path for call in again.calls if call.kind == "mark"], "kept")) - 1
        assert drawn == (0 if result else 3 - len(before))
        assert same_result()
        assert kept() == samples

    each_failure(place, places(calls)[number % 2 :: 2], number, evaluate, problems, check)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_comparison_on_a_disk_that_fails_goes_on_to_the_same_results(tmp_path: Path, number: int) -> None:
    """Also where the disk fails for the commands that it starts, which are stand-ins here."""
    path, place = write_comparison(tmp_path), tmp_path / "out"
    calls = recorded(place, compare, str(path))
    truth = Results.load(place / "all/results.json").outcomes

    def check(done: Watched) -> None:
        check_message(place, done, "compare")
        check_comparison(place, path, [call.path for call in done.calls if call.kind == "mark"])
        if done.status:
            again = watch(place, compare, [str(place), str(path), COLD])
            assert again.status == 0, again.said[-2000:]
        assert Results.load(place / "all/results.json").outcomes == truth

    each_failure(place, places(calls)[number % EACH :: EACH], number, compare, [str(path)], check)


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
