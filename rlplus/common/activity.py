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
rows = Work()  # rows of data, as they are read: their number is not known before, so `total` is 0
rollouts = Work()  # responses, of the engine's last call
grading = Work()  # responses
micro_batches = Work()  # an update's

LABELS = {
    "the start": "start",
    "first settings": "reading the data and trying settings",
    "data": "loading data",
    "demonstrations": "grading demonstrations",
    "memory": "planning the memory",
    "model": "loading the model",
    "engine": "starting the rollout engine",
    "sync": "weights to the engine",
    "generate": "rollouts",
    "score": "grading",
    "pack": "packing",
    "old_logprob": "old logprobs",
    "samples": "samples to keep",
    "learners": "critic, reward model or teacher",
    "statistics": "statistics",
    "forward_backward": "training",
    "evaluate": "evaluation",
    "export": "writing the model",
}  # phases whose names say it are left out
WORK = {
    "data": (rows, "rows"),
    "generate": (rollouts, "responses"),
    "evaluate": (rollouts, "responses"),
    "validation": (rollouts, "responses"),
    "demonstrations": (grading, "demonstrations"),
    "score": (grading, "responses"),
    "old_logprob": (micro_batches, "micro-batches"),
    "learners": (micro_batches, "micro-batches"),
    "forward_backward": (micro_batches, "micro-batches"),
}


def label() -> str:
    """The present phase in words."""
    return LABELS.get(current.phase, current.phase)


def work() -> tuple[Work | None, str]:
    """The work of the present phase, None in one of no pieces, and the name of its pieces."""
    found, unit = WORK.get(current.phase, (None, ""))
    if found and found.since < current.since and (found.done == found.total or not found.total):  # an earlier phase's
        found = None
    return found, unit


def counts() -> str:
    """The pieces of the present phase that are done, of how many where that is known; empty for one of none."""
    pieces, unit = work()
    if pieces is None or not (pieces.total or pieces.done):
        return ""
    return f"{pieces.done:,} of {pieces.total:,} {unit}" if pieces.total else f"{pieces.done:,} {unit}"


def in_words() -> str:
    """The present phase, how much of it is done, and its seconds so far."""
    return f"{' '.join(filter(None, (label(), counts())))}, {time.monotonic() - current.since:,.0f} s"
