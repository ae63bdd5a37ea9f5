"""The trainer's side of one reward worker: its items, its answers, and whether it is late or broken."""

import contextlib
import json
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from rlplus.sandbox.process_table import cpu_seconds

Status = Literal["ok", "cut_off", "no_box", "unparsed", "timeout", "crash", "bad_gold"]

POLL_S = 0.05  # how often the workers are looked at while none answers
WALL_CLOCK_FACTOR = 10  # wall clock limit / CPU time limit: for a busy machine, or one that sleeps
_GRACE = 0.1  # share of the time limit, beyond it, in which a grader that ends its programs itself may still say so
_UNWATCHED = 0.05  # share of the time limit before an item is looked at: reading /proc costs milliseconds
_START_TIMEOUT_S = 300.0  # wall clock; importing a user's module from a busy network disk
_END_TIMEOUT_S = 10.0  # wall clock
_MAX_READ = 1 << 16  # bytes at a time: a worker that never stops writing must not hold the trainer
_MAX_LINE = 1 << 16  # bytes; an honest reply has a tenth of it at most
_STATUSES = frozenset(get_args(Status))
_NO_SCORE = "wrote something that is no score"

_SUPERVISOR = Path(__file__).with_name("supervisor.py")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """`value` is the reward. `detail` says why the status is not "ok", for the log.

    "cut_off": the limit of tokens ended the response. "no_box": it has no box where one is wanted. "unparsed": it holds
    no answer. "bad_gold": the reference answer cannot be read. `value` is 0 for these, or the other graders' part.
    "timeout": the grader was killed at its limit. "crash": it raised, died or ran out of memory. Both after a second
    try in a fresh process; nothing is known about the text, and `value` is NaN, or 0 with reward.on_failure "zero".
    """

    value: float
    status: Status
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the grader failed, so that nothing is known about the text."""
        return self.status in ("timeout", "crash")


class Item(NamedTuple):
    """A response to be graded. cut: the limit of tokens ended it. asked: the prompt asks for a box."""

    text: str
    answer: str
    columns: Mapping[str, Any]
    cut: bool
    asked: bool


class Worker:
    """One process, and the items it was sent and has not answered yet (it is at the first one)."""

    def __init__(self, settings: dict[str, object]) -> None:
        # One thread each: a BLAS pool in every worker would crowd the machine and eat the memory limit.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SUPERVISOR), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the trainer only
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin: IO[bytes] = self.process.stdin
        self.stdout: IO[bytes] = self.process.stdout
        for pipe in (self.stdin, self.stdout):  # the trainer never waits for a worker
            os.set_blocking(pipe.fileno(), False)
        self.ready = False
        self.fresh = True  # it has graded nothing
        self.pending: deque[int] = deque()
        self.unsent = memoryview(b"")
        self.setup_error = ""
        self.note = ""  # the grader's remark about itself, such as the kind of its sandbox
        self._broken = ""  # how, where it cannot go on
        self._partial = b""
        self._token = secrets.token_hex(16).encode()
        self._send(settings | {"token": self._token.decode()})

    def grade(self, numbers: deque[int], items: Sequence[Item]) -> None:
        """Send the items with these indices."""
        self.fresh = False
        self.pending = numbers
        self._send([(i, *items[i]) for i in numbers])

    def _send(self, message: object) -> None:
        self.unsent = memoryview(json.dumps(message).encode() + b"\n")
        self._restart_clocks()
        self.flush()

    def flush(self) -> None:
        """Write as much of `unsent` as the pipe accepts."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it died: `fault` says so, and the item it was at pays
            self.unsent = memoryview(b"")

    def receive(self) -> list[tuple[int, Score]]:
        """The scores that have arrived, with the items' indices. Reading stops at the first line that is no reply."""
        if self._broken:
            return []
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.stdout.fileno(), _MAX_READ)
            self._partial += data
            if not data:
                self._broken = "ended, or closed its end of the pipe"
        *lines, self._partial = self._partial.split(b"\n")
        if lines:
            self._restart_clocks()
        scores: list[tuple[int, Score]] = []
        for line in lines:
            if not self._take(line, scores):
                self._broken = _NO_SCORE
                break
        if len(self._partial) > _MAX_LINE:
            self._broken = _NO_SCORE
        return scores

    def _take(self, line: bytes, scores: list[tuple[int, Score]]) -> bool:
        """Read one line; False if it is not the expected reply."""
        if not line.startswith(self._token):
            return False
        try:
            first, *rest = json.loads(line[len(self._token) :].decode())
            if self.ready:
                value, status, detail = rest
                if first != self.pending[0] or status not in _STATUSES or not math.isfinite(value):
                    return False
                scores.append((self.pending.popleft(), Score(value, status, detail)))
            elif first == "ready":
                (self.note,) = map(str, rest)
                self.ready = True
            else:
                (self.setup_error,) = rest
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
            return False
        return True

    def _restart_clocks(self) -> None:
        """Restart the clocks, at the start of the process and of each item."""
        self._since = time.monotonic()
        self._cpu_before: float | None = None
        self._next_look = 0.0
        self._over = False  # the limit of CPU time, at the last look

    def fault(self, timeout_s: float) -> tuple[Status, str] | None:
        """Why it cannot continue: "crash" if it ended or wrote an invalid reply, "timeout" if it is late."""
        if self._broken:
            return "crash", self._broken
        if self._ended():
            return "crash", "ended"
        now = time.monotonic()
        waited = time.monotonic() - self._since
        limit = WALL_CLOCK_FACTOR * timeout_s if self.ready else _START_TIMEOUT_S
        if (self.pending or not self.ready) and waited > limit:
            return "timeout", f"gave no answer for {limit:g} s of the wall clock"
        if not self.pending or waited < _UNWATCHED * timeout_s:
            return None
        # One thread cannot use more CPU time than has passed: until then there is nothing to look at.
        if self._cpu_before is None:
            self._cpu_before = cpu_seconds(self.process.pid)
            self._next_look = now + timeout_s
        elif now >= self._next_look:
            left = timeout_s - (cpu_seconds(self.process.pid) - self._cpu_before)
            if left <= 0 and self._over:
                return "timeout", f"used {timeout_s:g} s of CPU time"
            self._over = left <= 0
            self._next_look = now + max(left, POLL_S) if left > 0 else now + _GRACE * timeout_s
        return None

    def _ended(self) -> bool:
        """Whether the process is a zombie; it stays one until `stop`, so that its number stays its own."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        """Tell the supervisor to kill the grader and all that it started; `stop` waits for that."""
        if not self._ended():
            os.kill(self.process.pid, signal.SIGTERM)  # Popen.terminate would reap one that has ended just now

    def stop(self) -> int | None:
        """End it; returns its exit status (negative: the signal that ended it), None if it does not end."""
        self.end()
        for pipe in (self.stdin, self.stdout):
            pipe.close()
        try:
            return self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("the processes of a reward worker do not end; process %d goes on trying", self.process.pid)
            return None
