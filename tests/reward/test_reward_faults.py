"""Graders that hang, crash or attack: what they cost, what becomes of their items, and what is left behind."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from math import isnan
from pathlib import Path

import pytest
from processes import has_name, started, wait_until
from reward_graders import alive, linux, reward_config

from rlplus.train.reward import Score, Scorer, worker_handle
from rlplus.train.reward import scorer as scorer_module
from rlplus.train.reward.supervisor import OUTPUT_LIMIT

Grader = Callable[..., Scorer]
RIGHT = Score(1.0, "ok")
pytestmark = linux


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock for a machine that is loaded, and takes long for a little CPU time."""
    monkeypatch.setattr(worker_handle, "WALL_CLOCK_FACTOR", 100)


# Items that the grader fails on


def test_hang_costs_only_that_item(grader: Grader, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["a"] * 40
    texts[3], texts[17], texts[30] = "sleep", "regex", "burn"
    with caplog.at_level(logging.WARNING), grader(timeout_s=0.2) as scorer:
        scores = scorer(texts, ["a"] * 40)
        assert scorer.counts == {"ok": 37, "timeout": 3}
        assert scorer(["a"], ["a"]) == [RIGHT]
    assert [i for i, score in enumerate(scores) if score.status == "timeout"] == [3, 17, 30]
    assert all(isnan(scores[i].value) for i in (3, 17, 30))
    assert all(score == RIGHT for i, score in enumerate(scores) if i not in (3, 17, 30))
    assert "wall clock" in scores[3].detail
    assert len([record for record in caplog.records if "timeout" in record.message]) == 1


@pytest.mark.parametrize("command", ["exit", "hog", "list", "raise", "nan", "segfault"])
def test_crash_costs_only_that_item(grader: Grader, caplog: pytest.LogCaptureFixture, command: str) -> None:
    texts = ["a"] * 12
    texts[0] = texts[5] = texts[11] = command
    with caplog.at_level(logging.WARNING), grader(memory_mb=256) as scorer:
        scores = scorer(texts, ["a"] * 12)
        assert scorer.counts == {"ok": 9, "crash": 3}
    assert [i for i, score in enumerate(scores) if score.status == "crash"] == [0, 5, 11]
    assert all(isnan(scores[i].value) for i in (0, 5, 11))
    assert all(score == RIGHT for i, score in enumerate(scores) if i not in (0, 5, 11))
    assert len([record for record in caplog.records if "crash" in record.message]) == 1


@pytest.mark.parametrize("command", ["exit", "raise", "burn"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_failed_is_graded_again_in_a_fresh_worker(
    grader: Grader, tmp_path: Path, command: str, workers: int
) -> None:
    texts = ["a", f"first-{command} {tmp_path}/one", "a", f"first-{command} {tmp_path}/two", "a"]
    with grader(workers=workers, timeout_s=0.3) as scorer:
        assert scorer(texts, ["a"] * 5) == [RIGHT] * 5
        assert scorer.counts == {"ok": 5}
        for name in ("one", "two"):
            first, second = (tmp_path / name).read_text().split()
            assert first != second


def test_a_worker_that_one_text_has_spoilt_costs_the_others_nothing(grader: Grader) -> None:
    with grader(workers=1) as scorer:
        scores = scorer(["a", "poison", "a", "poison", "a"], ["a"] * 5)
    assert [score.status for score in scores] == ["ok", "crash", "ok", "crash", "ok"]


def test_on_failure(grader: Grader) -> None:
    with grader(on_failure="zero", timeout_s=0.1) as scorer:
        scores = scorer(["raise", "burn", "a"], ["a"] * 3)
        assert [(score.value, score.status) for score in scores] == [(0.0, "crash"), (0.0, "timeout"), (1.0, "ok")]
    with grader(on_failure="error") as scorer:
        assert scorer(["a"], ["a"]) == [RIGHT]
        with pytest.raises(
            ValueError, match=r"twice on a text, and reward\.on_failure is error: crash, KeyError: 'this'"
        ):
            scorer(["a", "raise this", "a"], ["a"] * 3)


def test_the_limit_is_cpu_time_so_that_a_busy_machine_makes_no_answer_wrong(grader: Grader, patient: None) -> None:
    """Waiting for the processor is like sleeping."""
    with grader(workers=1, timeout_s=0.4) as scorer:
        assert scorer(["nap 1.2", "a"], ["nap 1.2", "a"]) == [RIGHT] * 2


def test_the_cpu_time_of_children_counts(grader: Grader, patient: None) -> None:
    with grader(workers=1, timeout_s=0.3) as scorer:
        (score,) = scorer(["burn-in-a-child"], [""])
    assert score.status == "timeout"
    assert "CPU time" in score.detail


def test_the_cpu_time_of_earlier_items_does_not_count(grader: Grader, patient: None) -> None:
    """In one message, by one worker, without a second try: each needs less than the limit, all together more."""
    source = Path("own_graders.py")
    source.write_text(source.read_text() + SPIN)
    with Scorer(reward_config(function="own_graders:spin", workers=1, timeout_s=0.5)) as scorer:
        scores = scorer(["0.2"] * 6, [""] * 6)
        assert {score.status for score in scores} == {"ok"}
        assert len({score.value for score in scores}) == 1


SPIN = """
def spin(text, answer):
    end = time.process_time() + float(text)
    while time.process_time() < end:
        pass
    return os.getpid()
"""


# Processes that are left behind


def noted(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.parametrize("end", ["", "-then-burn", "-then-exit"])
def test_no_descendant_outlives_its_worker_in_whatever_session_it_is(
    grader: Grader, patient: None, tmp_path: Path, end: str
) -> None:
    """Children, a session of their own, double forks with and without one."""
    texts = [f"descendants{end} {tmp_path}/pids", "a"]
    with grader(timeout_s=2.0, workers=1) as scorer:
        scores = scorer(texts, ["a"] * 2)
        assert [score.status for score in scores] == [
            {"": "ok", "-then-burn": "timeout", "-then-exit": "crash"}[end],
            "ok",
        ]
        pids = noted(tmp_path / "pids")
        assert len(set(pids)) == (10 if end else 5)
        if end:  # two workers were ended
            wait_until(lambda: not any(alive(pid) for pid in pids))
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_descendant_that_is_never_the_same_process_is_ended(grader: Grader) -> None:
    name = f"hop{time.monotonic_ns() % 10**10}"
    with grader(workers=1) as scorer:
        assert scorer([f"hop {name}"], [""])[0].status == "ok"
    assert not any(has_name(name) for _ in range(20))


def test_a_signal_to_the_graders_own_group_is_its_own_affair(grader: Grader) -> None:
    with grader(workers=1) as scorer:
        assert scorer(["ignore-own-signal"], ["ignore-own-signal"]) == [RIGHT]


def test_close_leaves_no_process(grader: Grader) -> None:
    scorer = grader(workers=3)
    pids = {int(score.value) for _ in range(5) for score in scorer(["pid"] * 50, [""] * 50)}
    assert len(pids) == 3
    supervisors = [worker.process.pid for worker in scorer._workers]
    scorer.close()
    wait_until(lambda: not any(alive(pid) for pid in (*pids, *supervisors)))
    scorer.close()
    with pytest.raises(ValueError, match="closed"):
        scorer(["a"], ["a"])


PARENT = """
import json, sys
from rlplus.train.config import RewardConfig
from rlplus.train.reward import Scorer
scorer = Scorer(RewardConfig(**json.loads(sys.argv[1])))
pids = sorted({int(s.value) for _ in range(5) for s in scorer(["pid"] * 20, [""] * 20)})
scorer([f"descendants {sys.argv[2]}"], [""])
print(json.dumps(pids + [worker.process.pid for worker in scorer._workers]), flush=True)
scorer(["regex", "sleep"], ["", ""])
"""


def test_nothing_outlives_a_parent_that_is_killed(grader: Grader, tmp_path: Path) -> None:
    config = {"function": "own_graders:grade", "workers": 2, "timeout_s": 500, "memory_mb": 512}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PARENT, json.dumps(config), str(tmp_path / "pids")]
    with started(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 4
        pids += noted(tmp_path / "pids")
        assert len(set(pids)) == 9
        time.sleep(0.5)  # the hanging call has begun
        assert all(alive(pid) for pid in pids)
        parent.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))


# Workers that do not start


DYING = """
import os, signal, time
with open("starts", "a") as file:
    file.write("x")
if os.path.getsize("starts") <= int(open("deaths").read()):
    os.kill(os.getpid(), signal.SIGKILL)

def grade(text, answer):
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return float(os.getpid())
"""


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """How many workers from the first on are killed while they start."""
    (tmp_path / "dying_graders.py").write_text(DYING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scorer_module, "_FIRST_PAUSE_S", 0.001)
    return lambda count: (tmp_path / "deaths").write_text(str(count)) and None


def test_a_worker_that_is_killed_while_it_starts_is_started_again(deaths: Callable[[int], None]) -> None:
    deaths(5)
    with Scorer(reward_config(function="dying_graders:grade", workers=2)) as scorer:
        assert {score.status for score in scorer(["a"] * 40, [""] * 40)} == {"ok"}
    assert Path("starts").stat().st_size >= 6


def test_the_run_ends_when_no_worker_ever_started(deaths: Callable[[int], None]) -> None:
    deaths(1000)
    with pytest.raises(ValueError, match=r"a reward worker could not start: .*exit status -9"):
        Scorer(reward_config(function="dying_graders:grade", workers=2))
    assert Path("starts").stat().st_size >= 8


def test_fewer_workers_go_on_until_others_start_again(deaths: Callable[[int], None]) -> None:
    deaths(0)
    with Scorer(reward_config(function="dying_graders:grade", workers=2)) as scorer:
        deaths(1000)
        first = {int(score.value) for score in scorer(["a"] * 40, [""] * 40)}
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        wait_until(lambda: not alive(min(first)))
        for _ in range(20):
            assert {score.value for score in scorer(["a"] * 4, [""] * 4)} == {float(max(first))}
        deaths(0)
        while len(second := {int(score.value) for score in scorer(["a"] * 40, [""] * 40)}) < 2:
            assert max(first) in second


def test_a_worker_killed_between_calls_is_replaced_and_no_item_pays(grader: Grader) -> None:
    with grader(workers=1) as scorer:
        first = int(scorer(["pid"], [""])[0].value)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not alive(first))
        (second,) = scorer(["pid"], [""])
        assert second.status == "ok"
        assert int(second.value) != first


# Output of graders


@pytest.mark.parametrize(
    "data",
    [
        r'[1, 1.0, "ok", ""]\n',  # a score, as the worker writes it
        "0" * 32 + r'[1, 1.0, "ok", ""]\n',  # one with a token, but a wrong one
        r'["ready"]\n',
        r"junk\n",
        r"junk",
        r"\x00\xff\n\n\n",
        "[" * 9000 + r"\n",  # deeper than a parser may go
    ],
)
def test_writing_on_all_descriptors_forges_no_score_and_ends_no_trainer(grader: Grader, data: str) -> None:
    with grader(workers=1, timeout_s=2.0) as scorer:
        scores = scorer(["a", f"write {data}", "a", "a"], ["a"] * 4)
        assert scorer(["a"], ["a"]) == [RIGHT]
    assert [score.status for score in scores] == ["ok", "crash", "ok", "ok"]
    assert isnan(scores[1].value)


@pytest.mark.parametrize("command", ["flood-replies", "close"])
def test_flooding_or_closing_the_pipe_costs_only_that_item(grader: Grader, command: str) -> None:
    with grader(workers=1, timeout_s=2.0) as scorer:
        scores = scorer(["a", command, "a"], ["a", command, "a"])
    assert [score.status for score in scores] == ["ok", "crash", "ok"]


def test_writing_between_two_calls_costs_no_item(grader: Grader) -> None:
    with grader(workers=1) as scorer:
        assert scorer(["write-later"], ["write-later"]) == [RIGHT]
        time.sleep(0.5)
        assert scorer(["a", "a"], ["a", "a"]) == [RIGHT] * 2


def test_a_worker_that_does_not_read_does_not_hold_the_trainer(grader: Grader) -> None:
    long = "b" * (1 << 20)  # more than a pipe holds
    with grader(workers=1, timeout_s=0.3) as scorer:
        assert scorer(["stop-later"], ["stop-later"]) == [RIGHT]
        time.sleep(0.5)
        assert scorer([long, "a"], [long, "a"]) == [RIGHT] * 2


def test_the_output_of_a_worker_is_bounded_and_cannot_steer_a_terminal(
    grader: Grader, capfd: pytest.CaptureFixture[str]
) -> None:
    with grader(workers=1) as scorer:
        assert scorer([r"print \x1b[2Jclear\r\xc3\xbcml\xc3\n"], [""]) == [RIGHT]
        assert scorer(["flood"] * 3, [""] * 3) == [RIGHT] * 3
    printed = capfd.readouterr().err
    assert "\\x1b[2Jclear\\rüml\\xc3\n" in printed
    assert "\x1b" not in printed
    assert "the rest of its output is not shown" in printed
    assert printed.count("y") <= OUTPUT_LIMIT < 3 * 64 * 65535
