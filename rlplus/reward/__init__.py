"""Answer -> score, in worker processes that can be killed: the text is a model's and may hang or exhaust any grader."""

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, Self

from rlplus.config import RewardConfig
from rlplus.data import Example

Status = Literal["ok", "unparsed", "timeout", "crash", "bad_gold"]

_WORKER = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 120.0  # importing a user's module from a busy network disk
_MAX_CHUNK = 32  # items in one message: fewer wake-ups for short items
_MAX_CHUNK_LENGTH = 1 << 18  # characters; a longer text travels alone, and alone pays if it does not fit in memory
_POLL_S = 0.05  # a dead worker whose pipe a child of it still holds is noticed this late

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """`value` is the reward, 0 unless `status` is "ok".

    "unparsed": the text holds no answer. "timeout": killed after `timeout_s`. "crash": the grader raised, died or ran
    out of memory. "bad_gold": the reference answer itself cannot be read. `detail` says why, for the log.
    """

    value: float
    status: Status
    detail: str = ""


class _Worker:
    """One process, and the items it was sent and has not answered yet (it is at the first one)."""

    def __init__(self, settings: dict[str, object]) -> None:
        # One thread each: a BLAS pool in every worker would crowd the machine and eat the memory limit.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # its own process group, killed as one; Ctrl-C reaches the trainer only
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin: IO[bytes] = self.process.stdin
        self.stdout: IO[bytes] = self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.ready = False
        self.closed = False  # its end of the pipe
        self.pending: deque[int] = deque()
        self.since = time.monotonic()  # when the first pending item, or the process, was started
        self._partial = b""
        self.send(settings)

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: `dead` says so, and the item it was at pays
            self.stdin.write(json.dumps(message).encode() + b"\n")
            self.stdin.flush()
        self.since = time.monotonic()

    def read(self) -> list[bytes]:
        """The complete lines that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.stdout.fileno(), 1 << 16):
                self._partial += data
            self.closed = True
        *lines, self._partial = self._partial.split(b"\n")
        return lines

    def dead(self) -> bool:
        """Leaves a dead process a zombie until `kill`, so that the number of its group stays its own."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.closed or os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self) -> int:
        """Kill the whole group; the exit status of the worker (negative: the signal that ended it)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS, when only the zombie is left
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):  # what a dead worker did not read
                pipe.close()
        return status


class Scorer:
    """Grades texts against answers in `config.workers` processes. Use as a context manager, or call `close`.

    The constructor raises ValueError when the grader cannot be set up (a broken import, a pattern without its group).
    `counts` holds the number of scores so far by status. For one thread, which should live as long as the Scorer does:
    Linux ends the workers with the thread that started them.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._settings: dict[str, object] = {
            "kind": config.kind,
            "function": config.function,
            "pattern": config.pattern,
            "require_think": config.require_think,
            "memory_mb": config.memory_mb,
            "parent": os.getpid(),
        }
        self._selector = selectors.DefaultSelector()
        self._workers: set[_Worker] = set()
        try:
            for _ in range(config.workers):
                self._start_worker()
            while not all(worker.ready for worker in self._workers):
                self._collect({}, deque())
        except BaseException:
            self.close()
            raise

    def __call__(self, texts: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """Scores in the order of `texts`. An item that hangs or kills its worker costs only its own score."""
        if len(texts) != len(answers):
            raise ValueError(f"want one answer a text, got {len(texts)} texts and {len(answers)} answers")
        if not self._workers:
            raise ValueError("this Scorer is closed")
        scores: dict[int, Score] = {}
        queue = deque(range(len(texts)))
        try:
            self._collect(scores, queue, wait_s=0.0)  # replaces workers that died since the last call
            while len(scores) < len(texts):
                for worker in self._workers:
                    if worker.ready and not worker.pending and queue:
                        worker.pending = self._take(queue, texts)
                        worker.send([(i, texts[i], answers[i]) for i in worker.pending])
                self._collect(scores, queue)
        except BaseException:
            self.close()  # the answers still under way must not reach the next call
            raise
        for i in range(len(texts)):
            self._count(scores[i])
        return [scores[i] for i in range(len(texts))]

    def close(self) -> None:
        """Kill the workers and whatever they left behind in their process groups."""
        for worker in list(self._workers):
            self._stop_worker(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, queue: deque[int], texts: Sequence[str]) -> deque[int]:
        """The next chunk: smaller towards the end, so that no worker sits on the last items while the others wait."""
        size = min(_MAX_CHUNK, -(-len(queue) // (2 * len(self._workers))))
        chunk = deque([queue.popleft()])
        length = len(texts[chunk[0]])
        while queue and len(chunk) < size and length + len(texts[queue[0]]) <= _MAX_CHUNK_LENGTH:
            chunk.append(queue.popleft())
            length += len(texts[chunk[-1]])
        return chunk

    def _collect(self, scores: dict[int, Score], queue: deque[int], wait_s: float = _POLL_S) -> None:
        """Take what the workers have answered; replace those that died or are late and put back what they had left."""
        for key, _ in self._selector.select(wait_s):
            self._take_replies(key.data, scores)
        for worker in list(self._workers):
            dead = worker.dead()
            limit = self.config.timeout_s if worker.ready else _START_TIMEOUT_S
            late = (worker.pending or not worker.ready) and time.monotonic() - worker.since > limit
            if not dead and not late:
                continue
            self._take_replies(worker, scores)  # what it wrote before it died
            status = self._stop_worker(worker)
            end = f"ended with exit status {status}" if dead else f"killed after {limit:g} s"
            if not worker.ready:
                raise ValueError(f"a reward worker could not start: {end} (memory_mb={self.config.memory_mb})")
            if worker.pending:
                at = worker.pending.popleft()
                scores[at] = Score(0.0, "crash" if dead else "timeout", f"worker {end}")
                queue.extendleft(reversed(worker.pending))
            self._start_worker()

    def _take_replies(self, worker: _Worker, scores: dict[int, Score]) -> None:
        for line in worker.read():
            reply = json.loads(line)
            if worker.ready:
                index, value, status, detail = reply
                expected = worker.pending.popleft()
                assert index == expected
                scores[index] = Score(value, status, detail)
            elif "error" in reply:
                raise ValueError(f"the reward could not be set up: {reply['error']}")
            worker.ready = True
            worker.since = time.monotonic()

    def _start_worker(self) -> None:
        worker = _Worker(self._settings)
        self._workers.add(worker)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def _stop_worker(self, worker: _Worker) -> int:
        self._selector.unregister(worker.stdout)
        self._workers.remove(worker)
        return worker.kill()

    def _count(self, score: Score) -> None:
        if score.status in ("timeout", "crash", "bad_gold") and not self.counts[score.status]:
            log.warning("first reward with status %s: %s; more are only counted", score.status, score.detail)
        self.counts[score.status] += 1


@dataclass(frozen=True)
class DemonstrationReport:
    """Grading of the demonstrations. `dropped`: by status, "ok" being one that was read and found wrong."""

    graded: int
    kept: int
    dropped: dict[str, int]

    @property
    def dropped_share(self) -> float:
        return 1 - self.kept / self.graded if self.graded else 0.0

    def summary(self) -> str:
        names = {"ok": "wrong"}
        reasons = ", ".join(f"{count} {names.get(status, status)}" for status, count in sorted(self.dropped.items()))
        text = f"demonstrations: {self.kept} of {self.graded} pass the run's own reward"
        return f"{text}; dropped: {reasons}" if reasons else text


def grade_demonstrations(
    examples: Sequence[Example], scorer: Scorer, decode: Callable[[Sequence[int]], str]
) -> tuple[list[Example], DemonstrationReport]:
    """Set `demonstration` to None where the run's own reward gives it less than 1: training would take it for right.

    `decode` must leave out the special tokens: a demonstration ends with one.
    """
    with_one = [i for i, example in enumerate(examples) if example.demonstration is not None]
    texts = [decode(examples[i].demonstration or ()) for i in with_one]
    scores = scorer(texts, [examples[i].answer for i in with_one])
    graded = list(examples)
    dropped: Counter[str] = Counter()
    for i, score in zip(with_one, scores, strict=True):
        if score.value < 1:
            graded[i] = replace(graded[i], demonstration=None)
            dropped[score.status] += 1
    return graded, DemonstrationReport(len(with_one), len(with_one) - dropped.total(), dict(dropped))
