"""Texts -> scores, by worker processes that may hang, crash and be killed."""

import logging
import math
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, Self

from rlplus.common import activity, agree
from rlplus.common.errors import SharedFailure
from rlplus.train.algorithm import Shaping
from rlplus.train.config import RewardConfig
from rlplus.train.data import Example, Sample
from rlplus.train.reward.graders.rules import BOX
from rlplus.train.reward.worker_handle import POLL_S, Item, Score, Status, Worker

LARGEST = 1e18  # magnitude of a reward: its square is a float32

_MAX_CHUNK = 32  # items in one message: fewer wake-ups for short items
_MAX_CHUNK_LENGTH = 1 << 18  # characters; a longer text travels alone, and alone pays if it does not fit in memory
_FIRST_STARTS = 8  # consecutive starts that may fail while none has succeeded; with the pauses about 13 s
_FIRST_PAUSE_S = 0.1  # after a failed start; doubled by every further one
_LONGEST_PAUSE_S = 30.0

log = logging.getLogger(__name__)


class GraderFailed(ValueError):
    """No worker can be started, or the grader failed twice on a response and reward.on_failure is "error"."""


class Scorer:
    """Grades texts against answers in `config.workers` processes. Use as a context manager, or call `close`.

    columns: names of further values that come with each item, for functions that have a parameter of that name.
    The constructor raises GraderFailed when the grader cannot be set up (a broken import, a pattern without its group).
    `counts` holds the number of scores so far by status, `note` the grader's remark about itself, such as the kind of
    its sandbox. For one thread, which should live as long as the Scorer does: Linux ends the workers with the thread
    that started them.
    """

    def __init__(self, config: RewardConfig, columns: Sequence[str] = ()) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.note = ""
        self._settings: dict[str, object] = config.model_dump(exclude={"workers", "on_failure"}) | {
            "columns": list(columns)
        }
        self._selector = selectors.DefaultSelector()
        self._workers: set[Worker] = set()
        self._closed = False
        self._started = False  # whether any worker ever did
        self._failed_starts = 0  # consecutive
        self._next_start = 0.0
        # The call under way: numbers of the items to be graded, and to be graded again; first failures; results.
        self._queue: deque[int] = deque()
        self._again: deque[int] = deque()
        self._failures: dict[int, Score] = {}
        self._scores: dict[int, Score] = {}
        try:
            while not self._started or any(not worker.ready for worker in self._workers):
                self._collect()
        except BaseException:
            self.close()
            raise

    def __call__(
        self,
        texts: Sequence[str],
        answers: Sequence[str],
        columns: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompts: Sequence[str] | None = None,
        cut: Sequence[bool] | None = None,
    ) -> list[Score]:
        """Scores in the order of `texts`. An item that hangs or kills its worker costs only its own score.

        columns: one mapping per item, with values that JSON can hold. prompts: as the model saw them; None: none asks
        for a box. cut: whether the limit of tokens ended each response; None: it ended none.

        Where the grader fails, by time, memory or an exception, the item is graded again in a fresh worker. If that
        fails too, reward.on_failure decides: "mask": NaN, "zero": 0, "error": this raises GraderFailed.
        """
        if len(texts) != len(answers):
            raise ValueError(f"want one answer per text, got {len(texts)} texts and {len(answers)} answers")
        if self._closed:
            raise ValueError("this Scorer is closed")
        count = len(texts)
        asked = [False] * count if prompts is None else [BOX in prompt for prompt in prompts]
        rest = ([{}] * count if columns is None else columns, [False] * count if cut is None else cut, asked)
        items = list(map(Item, texts, answers, *rest))
        if len(items) < count:
            raise ValueError(f"want columns, prompts and cut of {count} texts; got {[len(part) for part in rest]}")
        self._queue = deque(range(len(texts)))
        self._again = deque()
        self._failures = {}
        self._scores = {}
        activity.grading.begin(len(texts))
        try:
            self._collect(wait_s=0.0)  # replaces workers that died since the last call
            while len(self._scores) < len(texts):
                self._feed(items)
                self._collect()
                activity.grading.add(len(self._scores) - activity.grading.done)
        except BaseException:
            self.close()  # the answers still under way must not reach the next call
            raise
        return [self._counted(self._scores[i]) for i in range(len(texts))]

    def close(self) -> None:
        """Kill the workers and whatever they left behind."""
        self._closed = True
        for worker in self._workers:
            worker.end()
        for worker in list(self._workers):
            self._stop_worker(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _feed(self, items: Sequence[Item]) -> None:
        """Send items to idle workers; items that failed once go to a worker that has graded nothing yet."""
        idle = [worker for worker in self._workers if worker.ready and not worker.pending]
        for worker in idle:
            if self._again and worker.fresh:
                worker.grade(deque([self._again.popleft()]), items)
            elif self._queue:
                worker.grade(self._take(items), items)
            else:
                continue
            self._watch(worker)
        used = [worker for worker in idle if not worker.pending and not worker.fresh]
        coming = sum(worker.fresh for worker in self._workers)
        for worker in used[: max(0, len(self._again) - coming)]:
            self._stop_worker(worker)  # `_collect` starts a fresh one in its place

    def _take(self, items: Sequence[Item]) -> deque[int]:
        """The next chunk, smaller towards the end, so that no worker has many items left while the others wait."""
        queue = self._queue
        size = min(_MAX_CHUNK, -(-len(queue) // (2 * len(self._workers))))
        lengths = (len(items[i].text) + len(items[i].answer) for i in islice(queue, size))
        fit = sum(total <= _MAX_CHUNK_LENGTH for total in accumulate(lengths))
        return deque(queue.popleft() for _ in range(max(1, fit)))

    def _collect(self, wait_s: float = POLL_S) -> None:
        """Receive the workers' answers; replace workers that died or are late, and requeue their remaining items."""
        self._start_missing()
        for key, events in self._selector.select(wait_s):
            if events & selectors.EVENT_WRITE:
                key.data.flush()
                self._watch(key.data)
            else:
                self._receive(key.data)
        for worker in list(self._workers):
            if worker.fault(self.config.timeout_s):
                self._receive(worker)  # its last words before it died; a late one may have answered just now
                if fault := worker.fault(self.config.timeout_s):
                    self._replace(worker, *fault)
        self._start_missing()

    def _receive(self, worker: Worker) -> None:
        was_ready = worker.ready
        for item, score in worker.receive():
            self._take_score(item, score)
        if worker.ready and not was_ready:
            self.note = worker.note
            self._started = True
            self._failed_starts = 0
            self._next_start = 0.0

    def _take_score(self, item: int, score: Score) -> None:
        """Store a score; after a failure the item is tried once more."""
        if not score.failed:
            self._scores[item] = score
        elif item not in self._failures:
            self._failures[item] = score
            self._again.append(item)
        elif self.config.on_failure == "error":
            raise GraderFailed(
                f"the grader failed twice on a text, and reward.on_failure is error: {score.status}, {score.detail}"
            )
        else:
            self._scores[item] = replace(score, value=math.nan if self.config.on_failure == "mask" else 0.0)

    def _replace(self, worker: Worker, status: Status, why: str) -> None:
        """Stop a worker; its current item has failed, the others go back to the queue."""
        end = self._stop_worker(worker)
        why = f"{why} (exit status {end})"
        if not worker.ready:
            error = worker.setup_error and f"the reward could not be set up: {worker.setup_error}"
            killed = status == "crash" and end is not None and end < 0
            self._start_failed(error or why, again=killed and not error)
        elif worker.pending:
            self._take_score(worker.pending.popleft(), Score(0.0, status, f"the worker {why}"))
            self._queue.extendleft(reversed(worker.pending))  # none of them failed before: these are sent alone

    def _start_missing(self) -> None:
        while len(self._workers) < self.config.workers and time.monotonic() >= self._next_start:
            try:
                worker = Worker(self._settings)
            except OSError as error:  # no memory or no process is to be had
                self._start_failed(str(error), again=True)
            else:
                self._workers.add(worker)
                self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
                self._watch(worker)

    def _start_failed(self, why: str, again: bool) -> None:
        """Pause before the next start; GraderFailed while no worker ever started, unless `again` may help."""
        if time.monotonic() >= self._next_start:  # else of several that were started together
            pause = _FIRST_PAUSE_S * 2.0 ** min(self._failed_starts, 20)
            self._failed_starts += 1
            self._next_start = time.monotonic() + min(pause, _LONGEST_PAUSE_S)
        message = f"a reward worker could not start: {why} (memory_mb={self.config.memory_mb})"
        if not self._started and (not again or self._failed_starts >= _FIRST_STARTS):
            raise GraderFailed(message)
        log.warning("%s; %d go on, the next start is tried soon", message, len(self._workers))

    def _stop_worker(self, worker: Worker) -> int | None:
        for pipe in (worker.stdin, worker.stdout):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        self._workers.remove(worker)
        return worker.stop()

    def _watch(self, worker: Worker) -> None:
        """Wake up when the worker's pipe accepts more, while there is more to send."""
        watched = worker.stdin in self._selector.get_map()
        if worker.unsent and not watched:
            self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        elif watched and not worker.unsent:
            self._selector.unregister(worker.stdin)

    def _counted(self, score: Score) -> Score:
        if score.status in ("timeout", "crash", "bad_gold") and not self.counts[score.status]:
            log.warning("first reward with status %s: %s; more are only counted", score.status, score.detail)
        self.counts[score.status] += 1
        return score


def score(samples: Sequence[Sample], examples: Sequence[Example], scorer: Scorer, decode: Callable[..., str]) -> None:
    """Set every sample's reward and status. Collective.

    Demonstrations and replayed rollouts are not graded again: one that the grader fails on now would get a negative
    advantage. SharedFailure if grading fails on one rank.
    """
    ungraded = [s for s in samples if not s.demonstration and not s.scored]
    scores: list[Score] = []
    failure: Exception | None = None
    try:
        rows = [examples[s.group] for s in ungraded]
        prompts = {s.group: decode(examples[s.group].prompt) for s in ungraded}
        scores = scorer(
            [decode(s.response) for s in ungraded],
            [e.answer for e in rows],
            [e.columns for e in rows],
            prompts=[prompts[s.group] for s in ungraded],
            cut=[s.truncated for s in ungraded],
        )
        _check_size([*(s.reward for s in samples if s.scored), *(one.value for one in scores)])
    except ValueError as error:
        failure = error
    if what := agree.failures(failure):
        raise SharedFailure(f"the step's responses could not be graded: {what}") from failure
    for sample, result in zip(ungraded, scores, strict=True):
        sample.reward = result.value
        sample.status = result.status
        sample.detail = result.detail
    for sample in samples:
        if sample.demonstration and not sample.scored:
            sample.reward = examples[sample.group].demonstration_reward
            assert not sample.masked, "want graded demonstrations"


def _check_size(rewards: Sequence[float]) -> None:
    """ValueError for a reward whose mean or advantage would overflow; NaN is one that was left out."""
    if too_large := [reward for reward in rewards if abs(reward) > LARGEST]:
        raise ValueError(f"want rewards from {-LARGEST:.0e} to {LARGEST:.0e}; got {too_large[0]:g}")


def shape(samples: Sequence[Sample], shaping: Shaping, max_response_length: int) -> None:
    """Shape the rewards; a demonstration of any length gets no penalty for it."""
    for sample in samples:
        length = 0 if sample.demonstration else len(sample.response)
        sample.grade = sample.reward
        sample.reward = shaping.reward(sample.reward, length, max_response_length)
