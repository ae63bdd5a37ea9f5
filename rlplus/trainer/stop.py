"""SIGINT and SIGTERM: the first one ends the run with a checkpoint, the second one at once."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Answer = TypeVar("Answer")


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; `signal` is its number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.signal = number


class StepGivenUp(BaseException):
    """A signal, `number`, came before the step changed the policy: the step can be done again from its beginning.

    No Exception: no engine shall take it for a failure of its own.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class StopSignal:
    """Remembers the first signal; `say` tells the user so. `install` it in the main thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.number = 0
        self._say = say
        self._interrupts = False

    def install(self, stack: ExitStack) -> None:
        """Until the stack is closed."""
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, self._handle))

    def _handle(self, number: int, _: Any) -> None:
        if self.number:
            raise Interrupted(number, f"stopped at once by signal {number}, without a checkpoint")
        self.number = number
        self._say("stopping with a checkpoint; once more to stop at once, without")
        if self._interrupts:
            raise StepGivenUp(number)

    def interruptible(self, call: Callable[[], Answer]) -> Callable[[], Answer]:
        """`call`, for the main thread, out of which a signal raises StepGivenUp: not for what other ranks wait for."""

        def interrupted() -> Answer:
            self._interrupts = True
            try:
                if self.number:
                    raise StepGivenUp(self.number)
                return call()
            finally:
                self._interrupts = False

        return interrupted

    def check(self) -> None:
        """StepGivenUp on all ranks if any of them, which all call this, has got a signal."""
        number = torch.tensor(self.number)
        if torch.cuda.is_available():
            number = number.cuda()
        dist.all_reduce(number, dist.ReduceOp.MAX)
        if number:
            raise StepGivenUp(int(number))
