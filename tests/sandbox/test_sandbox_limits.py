"""The limits of a program's time, by a clock of the tests."""

import itertools
import subprocess
import sys
from collections.abc import Iterable

import processes
import pytest
from sandboxes import linux, run

from rlplus.sandbox import Sandbox
from rlplus.sandbox.process_table import Process, runnable
from rlplus.sandbox.sandbox import _Meter

pytestmark = linux

TICK, LOOK = 0.01, 0.05


def ended(looks: Iterable[tuple[float, float, bool, int]]) -> tuple[str, float]:
    """The limit of a program with 1 s that ends it, and when. A look: when, CPU time, runnable, bytes of output."""
    meter = _Meter(memory=1 << 30, seconds=1.0, began=0.0)
    for now, cpu, runs, received in looks:
        used = {1: Process(parent=0, ticks=round(cpu / TICK), state="S", pages=1)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlplus.sandbox.sandbox.runnable", lambda process, runs=runs: runs)
            patch.setattr("rlplus.sandbox.sandbox.os.sysconf", lambda name: round(1 / TICK))
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
    code = "import threading, time\ndef work():\n    {}\nthreading.Thread(target=work).start()\nprint(flush=True)\n"
    for work, busy in (("while True: pass", True), ("time.sleep(600)", False)):
        command = [sys.executable, "-S", "-c", code.format(work)]
        with processes.started(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if busy:  # at any time one of its threads has the interpreter's lock, and runs
                assert any(runnable(process.pid) for _ in range(1000))
            else:
                processes.wait_until(lambda pid=process.pid: not runnable(pid), process)
    assert not runnable(process.pid)


def test_a_program_that_sleeps_is_ended_before_the_wall_clocks_limit(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.sandbox.sandbox._WALL_CLOCK_FACTOR", 1e9)
    asleep = "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(1e8)"
    assert run(sandbox, asleep) == [(False, "over the limit of time")]
    assert sandbox.test("import time\ndef f(): time.sleep(1e8)", "", "f()") == (False, "over the limit of time")


@pytest.mark.parametrize("costly", ["the output", "looking"])
def test_what_reading_its_output_costs_counts_for_a_program(
    closed: Sandbox, monkeypatch: pytest.MonkeyPatch, costly: str
) -> None:
    """Looking at its processes does not. By a clock that goes on in the reader's time, or within each look."""
    calls, read = itertools.count(), [0.0]
    looks = (number // 2 * 5.0 for number in calls)  # 0 at the start; then two calls a look
    clock = {"the output": lambda: read[0], "looking": lambda: next(looks)}[costly]
    monkeypatch.setattr("rlplus.sandbox.sandbox.time.process_time", clock)
    results = closed.run("import time\nprint(1, flush=True)\ntime.sleep(float(input()))", ["0", "1e8"])
    assert next(results) == (True, "1\n")
    read[0] = 5.0
    assert list(results) == [(False, f"over the limit of {'CPU time' if costly == 'the output' else 'time'}")]
