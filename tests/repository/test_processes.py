"""The processes that tests start end with them."""

import sys
import threading

import processes
import pytest

# A child in a session of its own, and a grandchild whose parent is gone; both print their number.
STRAYS = """
import os, subprocess, sys, time
sleeper = "import os, time; os.write(1, str(os.getpid()).encode() + bytes([10])); time.sleep(3600)"
subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    subprocess.Popen([sys.executable, "-c", sleeper])
    os._exit(0)
time.sleep(3600)
"""


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("end", [AssertionError, KeyboardInterrupt, SystemExit])
def test_nothing_that_a_failing_test_started_is_left(end: type[BaseException]) -> None:
    with pytest.raises(end), processes.started([sys.executable, "-c", STRAYS], stdout=-1) as process:  # noqa: PT012
        assert process.stdout is not None
        strays = [int(process.stdout.readline()) for _ in range(2)]
        assert not any(gone(pid) for pid in strays)
        raise end
    assert all(gone(pid) for pid in [process.pid, *strays])


def test_a_command_that_hangs_is_ended() -> None:
    before = threading.active_count()
    with pytest.raises(processes.subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(3600)"], patience_s=0.1)
    assert threading.active_count() <= before


def test_waiting_for_a_process_that_ended_says_what_it_said() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('out of luck')"]
    with (
        processes.started(command, stderr=-1) as process,
        pytest.raises(AssertionError, match="ended with 1: out of luck"),
    ):
        processes.wait_until(lambda: False, process)
