"""How far a run is, what is due, and what ends it: its last step, a GPU's memory, or a signal.

SIGINT, SIGTERM, SIGUSR1 and SIGHUP: the first one ends a run with a checkpoint, a later one at once. Clusters announce
preemption with any of them.
"""

import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from rlplus.common import agree
from rlplus.train.config import Config
from rlplus.train.rollout import RunFailed

IDLE_STEPS = 4  # consecutive steps without an update: fewer may be chance in small steps, more would tell the user late
# A terminal and a launcher, or a cluster and a launcher, signal the same ranks: two within this time count as one.
ONE_SIGNAL_S = 5.0

Answer = TypeVar("Answer")


class Progress:
    """A run's counts.

    - `step`: steps done
    - `generated`: tokens
    - `nonfinite`: by model, consecutive updates skipped for a non-finite gradient
    - `idle`: consecutive steps without an update, since this process started
    - `interrupted`: the signal that ended the run, 0 without one
    - `external_share`: of the last gradient, see `rlplus.train.algorithm.ExternalSchedule`
    - `best`: the step and mean reward of the best validation, the first among equals; None before any
    - `since_best`: validations since then in which something could be graded

    config: the run's, with the steps of its epochs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.step = self.generated = self.idle = self.interrupted = self.since_best = 0
        self.nonfinite: dict[str, int] = {}
        self.external_share = 1.0
        self.best: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The entries of a checkpoint of this step, besides the step."""
        return {
            "generated": self.generated,
            "nonfinite": self.nonfinite,
            "external_share": self.external_share,
            "best": self.best,
            "since_best": self.since_best,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.generated = state["generated"]
        self.nonfinite = dict(state["nonfinite"])
        self.external_share = state["external_share"]
        self.best = state["best"]
        self.since_best = state.get("since_best", 0)  # version 0.3.0 did not count them

    @property
    def share_done(self) -> float:
        return self.share(self.step, self.generated)

    def share(self, step: int, generated: int) -> float:
        """The share of the run that is done after so many steps and generated tokens."""
        train = self.config.train
        assert train.steps is not None, "want a configuration with_steps"
        tokens = generated / train.generated_tokens if train.generated_tokens else 0.0
        return min(1.0, max(step / train.steps, tokens))

    @property
    def by_tokens(self) -> bool:
        """Whether `share_done` counts generated tokens: at this pace they end the run, before its last step."""
        train = self.config.train
        assert train.steps is not None, "want a configuration with_steps"
        return train.generated_tokens is not None and self.generated * train.steps > self.step * train.generated_tokens

    @property
    def epoch(self) -> float | None:
        """The number of passes over the prompts, in a run that counts epochs."""
        epochs = self.config.train.epochs
        return None if epochs is None else epochs * self.share_done

    @property
    def finished(self) -> bool:
        return self.interrupted > 0 or self.share_done >= 1 or bool(self.early_end)

    @property
    def early_end(self) -> str:
        """The reason for which the run ends before its last step; empty if it does not."""
        patience = self.config.validation.patience
        if patience is None or self.since_best < patience or self.share_done >= 1:
            return ""
        assert self.best is not None, "want a best validation where others are counted since"
        return (
            f"ended early after step {self.step} of {self.config.train.steps}: {self.since_best} validations in a row "
            f"were not better than step {self.best['step']}'s, mean reward {self.best['reward']:.4g} "
            "(validation.patience)"
        )

    @property
    def evaluation_due(self) -> bool:
        """Whether to evaluate at the end of the current step."""
        return self._due_after(self.config.evaluation.every)

    @property
    def validation_due(self) -> bool:
        """Whether to validate at the end of the current step."""
        return self._due_after(self.config.validation.every)

    def _due_after(self, every: int) -> bool:
        return every > 0 and (self.step + 1) % every == 0

    @property
    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        best = self.best is not None and self.best["step"] == self.step
        return self.finished or best or (every > 0 and self.step % every == 0)

    def note_validation(self, metrics: dict[str, float]) -> str | None:
        """Remember this step where its validation is the best one so far; the message about it, or about the end."""
        reward = metrics.get("validation/reward")
        if reward is None:
            return None
        if self.best is not None and reward <= self.best["reward"]:
            self.since_best += 1
            return self.early_end or None
        self.best = {"step": self.step, "reward": reward}
        self.since_best = 0
        return f"step {self.step}: the best validation so far, mean reward {reward:.4g}; its checkpoint is kept"

    def note_idleness(self, metrics: dict[str, float]) -> str | None:
        """A message about consecutive steps without an update: after IDLE_STEPS, then at each doubling."""
        self.idle = 0 if metrics["actor/updated"] else self.idle + 1
        if self.idle < IDLE_STEPS or self.idle & (self.idle - 1):
            return None
        clipped = metrics.get("response_length/clipped", 0.0)
        masked = metrics.get("reward/masked", 0.0)
        reason = self.config.algorithm.resolve().recipe.no_update
        rewards = f"mean reward {metrics['reward/mean']:.3g}" if "reward/mean" in metrics else "no reward"
        return (
            f"step {self.step}: no update in {self.idle} steps: {reason} ({rewards} in "
            f"this step; {masked:.0%} of the responses not graded, {clipped:.0%} cut off), so no sample has a "
            "gradient. Check the reward on a response of the model, the prompts' format, "
            "rollout.max_response_length, and whether the problems are much too hard or too easy"
        )


class OutOfMemory(RunFailed):
    """This rank's GPU ran out of memory. phase: the step's, as in time/<phase>, or "start"."""

    def __init__(self, message: str, phase: str) -> None:
        super().__init__(message)
        self.phase = phase


@contextmanager
def naming_phase(phase: str) -> Iterator[None]:
    """Raise OutOfMemory instead of torch's error; with nested phases it names the innermost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # its frames hold the activations, and a checkpoint comes next
        text = str(error).partition("\n")[0]  # the rest is a C++ stack
        raise OutOfMemory(f"out of memory in {phase}: {text}", phase) from error


def phase_out_of_memory(failure: BaseException | None) -> str | None:
    """The phase in which this rank ran out of memory, if that caused the failure."""
    while failure is not None:
        if isinstance(failure, OutOfMemory):
            return failure.phase
        if isinstance(failure, torch.OutOfMemoryError):
            return "generate"  # raised in the engine, it became an EngineFailed on all ranks
        failure = failure.__cause__
    return None


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; `signal` is its number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.signal = number


class StepGivenUp(BaseException):
    """A signal, `number`, came before the step changed a model: the step can be repeated from its start.

    A BaseException, so that an engine's `except Exception` cannot swallow it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class StopSignal:
    """Stores the first signal. `install` it in the main thread.

    checkpoint: whether there is one at the end, unless a second signal comes.
    """

    def __init__(self, *, checkpoint: bool = True) -> None:
        self.number = 0
        self._with = " with a checkpoint" if checkpoint else ""
        self._without = ", without" if checkpoint else ""
        self._since = 0.0
        self._interrupts = False

    def install(self, stack: ExitStack, say: Callable[[str], None]) -> None:
        """Handle the signals until the stack is closed, and tell the user of the first through `say`.

        SIGUSR1 and SIGHUP stay ignored if they are, as under nohup.
        """
        self._say = say
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) is signal.SIG_IGN:
                continue
            stack.callback(signal.signal, number, signal.signal(number, self._handle))

    def _handle(self, number: int, _: Any) -> None:
        if self.number:
            if time.monotonic() - self._since < ONE_SIGNAL_S:
                return
            raise Interrupted(number, f"stopped at once by signal {number}{self._without and ', without a checkpoint'}")
        self.number = number
        self._since = time.monotonic()
        self._say(f"stopping{self._with}; once more after {ONE_SIGNAL_S:g} s to stop at once{self._without}")
        if self._interrupts:
            raise StepGivenUp(number)

    def interruptible(self, call: Callable[[], Answer]) -> Callable[[], Answer]:
        """`call`, which a signal interrupts with StepGivenUp; for the main thread, where no other rank waits."""

        def interrupted() -> Answer:
            with self.interrupting():
                return call()

        return interrupted

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A block that a signal interrupts with StepGivenUp."""
        self._interrupts = True
        try:
            if self.number:
                raise StepGivenUp(self.number)
            yield
        finally:
            self._interrupts = False

    def check(self) -> None:
        """StepGivenUp on all ranks if any of them has received a signal. Collective."""
        if number := int(agree.largest(self.number)):
            raise StepGivenUp(number)


@contextmanager
def ended_by_signals(say: Callable[[str], None], left: Callable[[], str]) -> Iterator[None]:
    """Let a signal end the block with Interrupted; the message ends with `left`, what is kept and how to go on.

    Without a checkpoint: for work that keeps what it has done.
    """
    with ExitStack() as stack:
        stop = StopSignal(checkpoint=False)
        stop.install(stack, say)
        try:
            with stop.interrupting():
                yield
        except StepGivenUp as end:
            raise Interrupted(end.number, f"stopped by signal {end.number}: {left()}") from None
