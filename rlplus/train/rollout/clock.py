"""A deadline between two signs of progress, for waits that could be endless: a push, a generation."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rlplus.common.errors import RunFailed

GRACE_S = 15.0  # an overdue body gets an exception; a process that cannot raise it ends this much later
EXIT_OVERDUE = 70
STDERR = 2


class Clock:
    """Ends a body that shows no progress for timeout_s. body: its name in the message, key: the setting's.

    The stacks of all threads go to stderr, then RunFailed interrupts what Python can interrupt in the main thread.
    If Python cannot interrupt it (a collective waiting for a dead rank), the process exits after a grace period.
    """

    def __init__(self, body: str, key: str, timeout_s: float) -> None:
        self._body = body
        self._key = key
        self._timeout_s = timeout_s
        self._ending = threading.Lock()

    def at(self, waiting_for: str) -> None:
        """Report progress: from now on the body has timeout_s for `waiting_for`."""
        self._waiting_for = waiting_for
        self._deadline = time.monotonic() + self._timeout_s

    @contextmanager
    def running(self, waiting_for: str) -> Iterator[None]:
        """Watch the body from a thread."""
        self._done = threading.Event()
        self.at(waiting_for)
        main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGALRM, self._overdue) if main else None
        try:
            threading.Thread(target=self._watch, args=(self._done, main), daemon=True).start()
            yield
        finally:
            try:
                if main:  # first: an alarm that comes now is for a body that is over; one that is due is raised here
                    signal.signal(signal.SIGALRM, signal.SIG_IGN)
            finally:
                self._stop()
                if main:
                    signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)  # None: one that Python did not set

    def _stop(self) -> None:
        with self._ending:
            self._done.set()

    def _overdue(self, *_: Any) -> None:
        raise RunFailed(self._message)

    @property
    def _message(self) -> str:
        return (
            f"rank {rank()}: {self._body} waited more than {self._timeout_s:g} s for {self._waiting_for} "
            f"({self._key}). Look for a rank or an engine that died or hangs"
        )

    def _watch(self, done: threading.Event, interrupt: bool) -> None:
        """Watch one body; `done` is its own event, as another body may already have followed it."""
        while not done.wait(max(0.0, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                break
        with self._ending:
            if done.is_set():
                return
            sys.stderr.write(f"rlplus: {self._message}. Stacks of process {os.getpid()}:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(STDERR)
            if interrupt:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if not (interrupt and done.wait(GRACE_S)):
            os._exit(EXIT_OVERDUE)


def rank() -> int:
    """This process's rank, for messages, also before torch.distributed is initialized."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
