"""The activity of this process: its phase, and how much of its work is done, for lines in the terminal and a watcher.

The parts of a run report here as they go, from any thread; a report is a few assignments.
"""

import threading
import time


class Activity:
    """The phase of this process, the `since` of its begin, and `moved`, the time of the last report of anything."""

    def __init__(self) -> None:
        self.begin("the start")

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.since = self.moved = time.monotonic()


class Work:
    """Pieces of one kind: `done` of `total`, and the tokens that they consist of so far, `since` its begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = self.done = self.tokens = 0
        self.since = 0.0

    def begin(self, total: int) -> None:
        self.restore((total, 0, 0, time.monotonic()))

    def add(self, done: int = 1, tokens: int = 0) -> None:
        with self._lock:
            self.done += done
            self.tokens += tokens
        current.moved = time.monotonic()

    def state(self) -> tuple[int, int, int, float]:
        """The numbers, for another process of this machine, whose clock is the same."""
        with self._lock:
            return self.total, self.done, self.tokens, self.since

    def restore(self, state: tuple[int, int, int, float]) -> None:
        with self._lock:
            self.total, self.done, self.tokens, self.since = state
        current.moved = time.monotonic()


current = Activity()
rollouts = Work()  # responses, of the engine's last call
grading = Work()  # responses
micro_batches = Work()  # an update's
