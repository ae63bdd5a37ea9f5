"""Runs one grading process and ends everything that it leaves behind. Started by path (`python -P`), without rlplus.

    python -P supervisor.py PID_OF_THE_PARENT

The grader is a fork that runs grading_worker.py with this process's stdin and stdout. Linux hands its orphans to this
process (PR_SET_CHILD_SUBREAPER), in whatever session they are: killing children until none is left ends every
descendant. That happens on SIGTERM, which Linux also sends when the parent dies, and when the grader ends. The exit
status is then the grader's. A grader runs under the same user: code that kills this process on purpose can leave
children behind.

What the grader prints is passed on to stderr with control characters escaped, up to `OUTPUT_LIMIT` bytes.
"""

import codecs
import contextlib
import ctypes
import os
import resource
import runpy
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

OUTPUT_LIMIT = 1 << 16  # bytes over the life of one grader
_KILL_PAUSE_S = 0.001

# These are from linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """prctl(2); OSError if Linux refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def end_with_parent(signal_number: int, parent: int) -> None:
    """Have Linux send this process the signal when `parent`, or the thread that started it, ends."""
    prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it ended before the call took effect
        raise SystemExit(1)


def _children() -> list[int]:
    """Processes that have this one as their parent, the ended ones too. Whose parent ends is there at once."""
    with open("/proc/thread-self/children") as file:
        return [int(word) for word in file.read().split()]


class _Output:
    """Forwards the grader's stdout and stderr up to the limit, and discards the rest."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.left = OUTPUT_LIMIT
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def pass_on(self) -> None:
        try:
            data = os.read(self.descriptor, OUTPUT_LIMIT)
        except BlockingIOError:
            return
        if not data or not self.left:
            return
        shown = self._decoder.decode(data[: self.left])
        self.left -= len(data[: self.left])
        if not self.left:
            shown += "\n[reward worker: the rest of its output is not shown]\n"
        text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in shown)
        with contextlib.suppress(OSError):  # stderr is gone
            os.write(2, text.encode(errors="backslashreplace"))


class _Supervisor:
    """This process. `run` once, after `pid` and `output` are the grader's."""

    def __init__(self) -> None:
        self.pid = 0
        self.status: int | None = None  # the grader's, as of waitpid
        self.told_to_end = False
        self.woken, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it only has to wake `run`

    def _end(self, *_: object) -> None:
        self.told_to_end = True

    def run(self, output: _Output) -> int:
        """Wait for SIGTERM or the grader's end, then end all descendants; the grader's status, as of waitpid."""
        while self._reap() and self.status is None and not self.told_to_end:
            readable, _, _ = select.select([output.descriptor, self.woken], [], [])
            if self.woken in readable:
                os.read(self.woken, 1 << 10)
            if output.descriptor in readable:
                output.pass_on()
        while self._reap():
            for process in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(_KILL_PAUSE_S)
        output.pass_on()
        assert self.status is not None
        return self.status

    def _reap(self) -> bool:
        """Collect the children that have ended; False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self.pid:
                self.status = status


def _run_grader(supervisor: int, output: int) -> None:
    """In the forked child: run grading_worker.py in a new session, with its prints going to `output`."""
    os.setsid()  # a signal to its own group does not reach the supervisor
    end_with_parent(signal.SIGKILL, supervisor)
    os.dup2(output, 2)
    os.close(output)
    runpy.run_path(str(Path(__file__).with_name("grading_worker.py")), run_name="__main__")


def _exit_like(status: int) -> NoReturn:
    """Exit as the process with this waitpid status did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has its default action already
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = _Supervisor()
    end_with_parent(signal.SIGTERM, int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _children()  # OSError where Linux has no such list
    own = os.getpid()
    reading, writing = os.pipe()
    supervisor.pid = os.fork()
    if supervisor.pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (supervisor.woken, supervisor.wake, reading):
            os.close(descriptor)
        _run_grader(own, writing)
        return
    # `writing` stays open: the end of the output is not what ends the loop.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    _exit_like(supervisor.run(_Output(reading)))


if __name__ == "__main__":
    main()
