"""Rollouts that run side by side and ask the policy together, so that a call of the engine samples for all of them.

A round waits until every rollout that has not returned asks, however long each one's environment takes, and answers
them in the rollouts' order. So what is sampled does not depend on time.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as Timeout
from typing import Any, Generic, TypeVar

from rlplus.common.errors import RunFailed

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
Ask = Callable[[Asked], Awaitable[Answer]]
"""A rollout's way to the policy."""


class Round(Generic[Asked, Answer]):
    """The rollouts of a call, and the requests of those that have not returned. All methods run in the event loop."""

    def __init__(self, rollouts: Sequence[Callable[[Ask[Asked, Answer]], Awaitable[Any]]]) -> None:
        self._waiting: dict[int, tuple[Asked, asyncio.Future[Answer]]] = {}
        self._changed = asyncio.Event()
        self.tasks = [asyncio.ensure_future(self._run(i, rollout)) for i, rollout in enumerate(rollouts)]
        for task in self.tasks:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio logs a second one

    async def _run(self, index: int, rollout: Callable[[Ask[Asked, Answer]], Awaitable[Any]]) -> Any:
        async def ask(asked: Asked) -> Answer:
            if index in self._waiting:
                raise RunFailed("want one request to the policy at a time from a rollout; got a second one beside it")
            self._waiting[index] = asked, (future := asyncio.get_running_loop().create_future())
            self._changed.set()
            try:
                return await future
            finally:
                self._waiting.pop(index, None)

        try:
            return await rollout(ask)
        finally:
            self._changed.set()

    async def asked(self) -> dict[int, Asked]:
        """The requests of all rollouts that have not returned, in their order, or what one of them raised, raised."""
        while True:
            for task in self.tasks:
                if task.done():
                    task.result()
            if all(task.done() or index in self._waiting for index, task in enumerate(self.tasks)):
                return {index: self._waiting[index][0] for index in sorted(self._waiting)}
            self._changed.clear()
            await self._changed.wait()

    async def answer(self, answers: Mapping[int, Answer]) -> None:
        for index, answer in answers.items():
            if index in self._waiting:  # else the environment gave up meanwhile
                self._waiting.pop(index)[1].set_result(answer)


class Together:
    """An event loop in a thread of its own, which goes on for as long as the process: environments keep connections."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    def run(
        self,
        rollouts: Sequence[Callable[[Ask[Asked, Answer]], Awaitable[Result]]],
        answer: Callable[[dict[int, Asked]], Mapping[int, Answer]],
    ) -> list[Result]:
        """The rollouts' results. answer: called in this thread with what rollouts ask, by their number, for all of it.

        RunFailed if the rollouts take longer than timeout_s until all of them ask or have returned.
        """

        async def begin() -> Round[Asked, Answer]:
            return Round(rollouts)

        round_ = self._wait(begin())
        try:
            while asked := self._wait(round_.asked()):
                self._wait(round_.answer(answer(asked)))
            return [task.result() for task in round_.tasks]
        finally:
            for task in round_.tasks:
                self._loop.call_soon_threadsafe(task.cancel)

    def _wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(self.timeout_s)
        except Timeout:
            if future.done():  # the environment's own
                raise
            future.cancel()
            raise RunFailed(f"the environment took longer than {self.timeout_s:g} s (timeout_s) for a turn") from None
