"""Commands that end with the process that started them, together with everything that they started.

    python -IS commands.py PID_OF_THE_PARENT COMMAND...

is a process between the two, which needs nothing but Python. It passes SIGTERM on to the command, and Linux sends it
SIGTERM when the parent dies, however it dies (PR_SET_PDEATHSIG). Processes that the command leaves come to this one
(PR_SET_CHILD_SUBREAPER), in whatever session they are, and get SIGTERM, too: a run then writes its checkpoint even if
its launcher has died at once. Those still alive after `PATIENCE_S` are killed. The exit status is the command's.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

PATIENCE_S = 600.0  # limit for the rest of a step and a checkpoint, after SIGTERM or the end of the command
_LOOK_S = 0.1  # interval of looking for processes that are left, while the command is ending
# These are from linux/prctl.h.
_PDEATHSIG = 1
_SUBREAPER = 36
# Ctrl-C and the end of a terminal reach the command as well: it decides.
_WATCHED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """The command line that runs the command so. The thread that starts it must outlive it."""
    return [sys.executable, "-IS", str(Path(__file__)), str(os.getpid()), *command]


@contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM end the program like an exception, so that running commands are ended too."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _end_with(parent: int) -> None:
    _prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)


def _children() -> list[int]:
    """This process's children, from /proc; those that have ended and were not waited for included."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # or it has ended
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


class _Between:
    """This process, after it has started the command."""

    def __init__(self, command: int) -> None:
        self.command = command
        self.status: int | None = None  # the command's, as of waitpid
        self.deadline = float("inf")
        self.told = {command}  # processes that were told to end, or that `_end_what_is_left` must not tell

    def run(self) -> int:
        """Wait for the command's end, end what it leaves; its status, as of waitpid."""
        while self._reap():
            ending = self.status is not None or self.deadline < float("inf")
            if self.status is not None:
                self._end_what_is_left()
            if time.monotonic() >= self.deadline:
                for process in _children():
                    _send(process, signal.SIGKILL)
            got = signal.sigtimedwait(_WATCHED, _LOOK_S if ending else 3600.0)
            if got is not None and got.si_signo == signal.SIGTERM:
                self._set_deadline()
                if self.status is None:
                    _send(self.command, signal.SIGTERM)
        assert self.status is not None
        return self.status

    def _set_deadline(self) -> None:
        self.deadline = min(self.deadline, time.monotonic() + PATIENCE_S)

    def _end_what_is_left(self) -> None:
        self._set_deadline()
        for process in set(_children()) - self.told:
            self.told.add(process)
            _send(process, signal.SIGTERM)

    def _reap(self) -> bool:
        """Collect the children that have ended; False when none is left."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not process:
                return True
            if process == self.command:
                self.status = status


def _execute(command: list[str], mask: set[signal.Signals], parent: int) -> NoReturn:
    """Become the command, in the fork, with the signals as this process found them."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _exit_like(status: int) -> NoReturn:
    """Exit as the process with this waitpid status did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has its default action already
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_SUBREAPER, 1)
    _end_with(int(sys.argv[1]))
    this = os.getpid()
    command = os.fork()
    if command == 0:
        _execute(sys.argv[2:], {signal.Signals(number) for number in mask}, this)
    _exit_like(_Between(command).run())


if __name__ == "__main__":
    main()
