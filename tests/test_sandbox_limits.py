"""The limits of a program's time, by a clock of the tests."""

import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace

import processes
import pytest
from reward_graders import linux
from sandboxes import run

from rlplus.reward.graders.sandbox import Sandbox, _Meter, _runnable
from rlplus.reward.supervisor import Process
from rlplus.reward.worker_handle import Worker

pytestmark = linux

TICK, LOOK = 0.01, 0.05


def ended(looks: Iterable[tuple[float, float, bool, int]]) -> tuple[str, float]:
    """The limit of a program with 1 s that ends it, and when. A look: when, CPU time, runnable, bytes of output."""
    meter = _Meter(memory=1 << 30, seconds=1.0, began=0.0)
    for now, cpu, runs, received in looks:
        used = {1: Process(parent=0, ticks=round(cpu / TICK), state="S", pages=1)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlplus.reward.graders.sandbox._runnable", lambda process, runs=runs: runs)
            patch.setattr("rlplus.reward.graders.sandbox.os.sysconf", lambda name: round(1 / TICK))
            if fault := meter.fault(now, used, received):
                return fault, now
    return "", now


def times(every: float, until: float = 60.0) -> list[float]:
    return [every * number for number in range(1, round(until / every) + 1)]


def test_time_asleep_counts_like_cpu_time() -> None:
    def just_after(limit: float, end: tuple[str, float], every: float = LOOK) -> bool:
        return end[0] == "time" and limit < end[1] < limit + 2 * every

    assert just_after(1.0, ended((now, 0.0, False, 0) for now in times(LOOK)))
    assert just_after(1.0, ended((now, min(now, 0.5), False, 0) for now in times(LOOK)))  # half of it awake
    assert just_after(5.0, ended((now, 0.0, True, 0) for now in times(LOOK)))  # the machine is busy
    assert just_after(5.0, ended((now, 0.1 * now, True, 0) for now in times(LOOK)))
    assert just_after(5.0, ended((now, 0.0, False, number) for number, now in enumerate(times(LOOK), 1)))  # it is heard
    assert ended((now, now, True, 0) for now in times(LOOK)) == ("CPU time", pytest.approx(1 + LOOK))
    assert ended((now, 4 * now, False, 0) for now in times(LOOK))[0] == "CPU time"  # four that end soon
    assert ended((now, 0.0, False, 0) for now in times(LOOK, until=1.0)) == ("", 1.0)


def test_a_late_look_tells_little_about_the_time_before() -> None:
    """This process had no processor either; 0.2 s of each are counted."""
    assert ended((now, 0.0, False, 0) for now in times(2.0, until=4.0)) == ("", 4.0)
    assert ended((now, 0.0, False, 0) for now in times(0.8)) == ("time", pytest.approx(4.8))


def test_threads_tell_whether_a_process_could_run() -> None:
    """The state of a process is its first thread's, which waits here."""
    code = "import threading, time\nthreading.Thread(target={}).start()\nprint(flush=True)\n"
    for target, expected in (("lambda: [0 for _ in iter(int, 1)]", True), ("lambda: time.sleep(600)", False)):
        command = [sys.executable, "-S", "-c", code.format(target)]
        with processes.started(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            processes.wait_until(lambda pid=process.pid, expected=expected: _runnable(pid) is expected, process)
    assert not _runnable(process.pid)


def test_a_program_that_sleeps_is_ended_before_the_wall_clocks_limit(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.reward.graders.sandbox._WALL_CLOCK_FACTOR", 1e9)
    asleep = "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(1e8)"
    assert run(sandbox, asleep) == [(False, "over the limit of time")]
    assert sandbox.test("import time\ndef f(): time.sleep(1e8)", "", "f()") == (False, "over the limit of time")


def test_a_grader_may_still_say_that_a_program_was_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 processes burn seconds of CPU time between two looks: the program is wrong, and the grader has not failed."""
    now, cpu = 0.0, 0.0
    monkeypatch.setattr("rlplus.reward.worker_handle.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("rlplus.reward.worker_handle.cpu_seconds", lambda process: cpu)
    worker = Worker.__new__(Worker)
    monkeypatch.setattr(worker, "_ended", lambda: False)
    worker.ready, worker.pending, worker._broken, worker.process = True, deque([0]), "", SimpleNamespace(pid=1)
    worker._restart_clocks()
    for now, cpu in ((1.0, 0.0), (11.0, 9.0), (12.0, 12.0), (12.9, 90.0)):
        assert worker.fault(10.0) is None, (now, cpu)
    now = 13.1
    assert worker.fault(10.0) == ("timeout", "used 10 s of CPU time")
