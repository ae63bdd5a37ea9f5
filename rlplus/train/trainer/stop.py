"""SIGINT, SIGTERM, SIGUSR1 and SIGHUP: the first one ends a run with a checkpoint, a later one at once.

Clusters announce preemption with any of them.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from rlplus.common import agree

Answer = TypeVar("Answer")
# A terminal and a launcher, or a cluster and a launcher, signal the same ranks: two within this time count as one.
ONE_SIGNAL_S = 5.0


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
