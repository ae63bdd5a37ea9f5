"""Says where a run is, from its start on: lines for the terminal, and progress.json for `rlplus watch`."""

import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from rlplus.common import activity
from rlplus.common.errors import without_passwords
from rlplus.common.terminal import Terminal, duration
from rlplus.train.config import PROGRESS
from rlplus.train.trainer.progress import Interrupted, Progress

BEAT_S = 2.0  # interval of looks at what the run does, and so of the file's versions
SETTLED_S = 3.0  # age at which a phase gets a line
AGAIN_S = 30.0  # time between its lines
BETWEEN_STEPS_S = 1.0  # interval of the steps' lines, at least: a toy does many steps in a second
RECENT = 50  # steps that the time left is computed from
SAYS_MUCH = 1 / 8  # share of a phase's work after which it tells the time of the rest

logger = logging.getLogger(__name__)


class Pace:
    """The time left, from the shares of the run that the last steps were, and their seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def add(self, gained: float, seconds: float) -> None:
        self._steps.append((gained, seconds))

    def left(self, share_done: float, since: float) -> float | None:
        """Seconds from a time `since` seconds after the end of the last step; None before the first one ends.

        A step that takes longer than the others leaves the time of those after it.
        """
        gained = sum(share for share, _ in self._steps)
        if not gained > 0:
            return None
        seconds = sum(each for _, each in self._steps)
        whole = (1 - share_done) / gained * seconds
        return max(whole - since, whole - seconds / len(self._steps), 0.0)


class Reporter:
    """Prints a line for every step and for every long phase, and keeps progress.json true. For `with`, on every rank.

    enabled: on rank 0; the others are silent. A thread looks at `activity`, which says what the engine, the grader and
    the learner do, so that a line comes also while one of them computes. Counts are rank 0's.
    """

    def __init__(
        self,
        folder: Path,
        title: str,
        ranks: int = 1,
        *,
        enabled: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.enabled = enabled
        self._path = folder / PROGRESS
        self._title = title
        self._ranks = ranks
        self._clock = clock
        self._console = Terminal(stderr=True)
        self._console.quiet = not enabled
        self._over = threading.Event()
        self._progress: Progress | None = None
        self._pace = Pace()
        self._begun = time.time()
        self._before = 0.0  # the share of the run that was done at the end of the last step
        self._resumed_at = 0
        self._step_since = self._step_line = self._line = -AGAIN_S
        self._lined: tuple[str, float] | None = None  # the phase that had the last line
        self._failed = False

    def __enter__(self) -> Self:
        if self.enabled:
            self._write("running")
            self._thread = threading.Thread(target=self._watch, name="reporter", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._over.set()
        self._thread.join()
        if error is None:
            progress = self._progress
            finished = progress is not None and progress.finished and not progress.interrupted
            self._write("finished" if finished else "stopped", progress.early_end if progress is not None else "")
        else:
            stopped = isinstance(error, Interrupted)
            self._write("stopped" if stopped else "failed", without_passwords(str(error)) or type(error).__name__)

    def follow(self, progress: Progress, earlier: Sequence[Mapping[str, float]]) -> None:
        """The counts of the run from here on. earlier: the metrics of the steps before, for a run that is resumed."""
        self._resumed_at = progress.step
        self._before = progress.share_done
        earlier = [step for step in earlier if {"generated_tokens", "time/step"} <= step.keys()]
        shares = [progress.share(int(step["step"]), int(step["generated_tokens"])) for step in earlier]
        for (before, share), step in zip(pairwise(shares), earlier[1:], strict=True):
            self._pace.add(share - before, step["time/step"])
        self._step_since = self._clock()
        self._progress = progress

    def say(self, message: str) -> None:
        self._console.print(message)

    def step(self, metrics: Mapping[str, float]) -> None:
        """The end of a step, whose metrics these are."""
        assert self._progress is not None, "want `follow` before the first step"
        now = self._clock()
        share = self._progress.share_done
        self._pace.add(share - self._before, metrics["time/step"])
        self._before = share
        self._step_since = now
        if now - self._step_line < BETWEEN_STEPS_S and share < 1:
            return
        self._step_line = self._line = now
        parts = [self._place(f"step {self._progress.step}"), *_shown(metrics), _left(self._pace.left(share, 0.0))]
        self.say("  ".join(filter(None, parts)))

    def look(self) -> None:
        """Print a line if there is something to say, and write the file."""
        now = self._clock()
        phase = activity.current.phase, activity.current.since
        known = phase == self._lined
        if now - self._line >= (AGAIN_S if known else SETTLED_S) and now - phase[1] >= SETTLED_S:
            self._lined = phase
            self._line = now
            self.say(self._phase_line())
        self._write("running")

    def _watch(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(OSError):  # a log on a full disk, say: the run goes on
                self.look()

    def state(self) -> dict[str, Any]:
        """The contents of progress.json. All times are in seconds; done and total are null in a phase of no pieces."""
        now = self._clock()
        current = activity.current
        progress = self._progress
        work, unit = activity.work()
        rate = None
        if work is activity.rollouts and work.tokens and now > work.since:
            rate = work.tokens / (now - work.since)
        share = 0.0 if progress is None else progress.share_done
        return {
            "begun": self._begun,
            "process": os.getpid(),
            "host": platform.node(),
            "ranks": self._ranks,
            "title": self._title,
            "resumed_at": self._resumed_at,
            "step": None if progress is None else progress.step,
            "steps": None if progress is None else progress.config.train.steps,
            "limit": self._limit(),
            "share_done": share,
            "step_seconds": None if progress is None else now - self._step_since,
            "seconds_left": None if progress is None else self._pace.left(share, now - self._step_since),
            "phase": activity.label(),
            "phase_seconds": now - current.since,
            "quiet_seconds": now - current.moved,
            "done": work and work.done,
            "total": work and work.total,
            "unit": unit,
            "tokens_per_second": rate,
        }

    def _phase_line(self) -> str:
        state = self.state()
        begins = state["step"] is None
        what = [state["phase"]]
        phase_left = None
        if state["total"]:
            where = f", rank 0 of {self._ranks}" if self._ranks > 1 else ""
            what[0] += f" {state['done']:,} of {state['total']:,} {state['unit']}{where}"
            if state["done"] >= SAYS_MUCH * state["total"]:
                phase_left = (state["total"] / state["done"] - 1) * state["phase_seconds"]
        elif state["done"]:  # rows that are read: their number is not known before
            what[0] += f" {state['done']:,} {state['unit']}"
        if state["tokens_per_second"]:
            what.append(f"{state['tokens_per_second']:,.0f} tok/s")
        what.append(f"{state['phase_seconds']:,.0f} s")
        left = _left(state["seconds_left"])
        if not left and phase_left is not None:
            left = f"about {duration(phase_left)} left in this phase"
        place = f"{self._title} start" if begins else self._place(f"step {self._step_at_work()}")
        return "  ".join(filter(None, (place, ", ".join(what), left)))

    def _step_at_work(self) -> int:
        """The number of the step that the phase belongs to: behind the last step, its own."""
        assert self._progress is not None
        over = self._progress.share_done >= 1 or bool(self._progress.early_end)
        return self._progress.step + (0 if over else 1)

    def _place(self, step: str) -> str:
        assert self._progress is not None
        percent = int(100 * self._progress.share_done + 1e-9)  # rounded down: 100% is the end
        limit = self._limit()
        most = self._progress.config.train.steps
        return f"{self._title} {percent:3}% {f'of {limit}, {step} of at most' if limit else f'{step} of'} {most}"

    def _limit(self) -> str:
        """The end of the run where the percentage does not count steps."""
        if self._progress is None or not self._progress.by_tokens:
            return ""
        return f"{self._progress.config.train.generated_tokens:,} tokens"

    def _write(self, state: str, message: str = "") -> None:
        """Replace the file. It is not flushed to the disk: after a crash of the machine it may be older or damaged."""
        new = self._path.with_name(f"{PROGRESS}.new")
        text = {"state": state, "message": message, "written": time.time()} | self.state()
        try:
            new.write_text(json.dumps(text) + "\n", encoding="utf-8")
            new.replace(self._path)
        except OSError as error:  # a full disk, say; nothing of the run depends on the file
            with suppress(OSError):
                new.unlink(missing_ok=True)
            if not self._failed:
                logger.warning("`rlplus watch` will not see this run: %s could not be written: %s", self._path, error)
            self._failed = True


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{duration(seconds)} left"


def _shown(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    for name, label, form, unit in (
        ("epoch", "epoch ", ".2f", ""),
        ("reward/internal", "reward ", ".3f", ""),
        ("response_length/mean", "length ", ",.0f", ""),
        ("actor/entropy", "entropy ", ".3f", ""),
        ("validation/reward", "validation ", ".3f", ""),
        ("tokens_per_second", "", ",.0f", " tok/s"),
        ("time/step", "", ",.0f", " s"),
    ):
        if name in metrics:
            parts.append(f"{label}{metrics[name]:{form}}{unit}")
    return parts
