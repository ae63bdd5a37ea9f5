"""Rollouts side by side: rounds do not depend on time, and failures and hangs end them all."""

import asyncio
import random
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from rlplus.common.errors import RunFailed
from rlplus.train.rollout.environments.together import Together


def rounds_of(delays: random.Random) -> tuple[list[dict[int, str]], list[str]]:
    """The rounds and results of 8 rollouts of 1 to 4 turns whose environments take random times."""
    rounds: list[dict[int, str]] = []

    async def rollout(index: int, ask: Any) -> str:
        said = ""
        for turn in range(1 + index % 4):
            await asyncio.sleep(delays.random() / 100)
            said += await ask(f"{index}.{turn}")
        return said

    def answer(asked: dict[int, str]) -> Mapping[int, str]:
        rounds.append(asked)
        return {index: f"[{text}]" for index, text in asked.items()}

    return rounds, Together(30.0).run([partial(rollout, i) for i in range(8)], answer)


def test_rounds_are_the_same_however_long_environments_take() -> None:
    rounds, results = rounds_of(random.Random(0))
    assert [list(asked) for asked in rounds] == [[*range(8)], [1, 2, 3, 5, 6, 7], [2, 3, 6, 7], [3, 7]]
    assert [list(asked.items()) for asked in rounds] == [
        list(asked.items()) for asked in rounds_of(random.Random(1))[0]
    ]
    assert results == ["".join(f"[{i}.{turn}]" for turn in range(1 + i % 4)) for i in range(8)]


def test_policy_and_environments_have_threads_of_their_own() -> None:
    """An engine waits in the thread that called, while connections of environments are kept alive in the other."""
    here, threads = threading.current_thread(), []
    beats = asyncio.Event()

    async def rollout(ask: Any) -> None:
        threads.append(threading.current_thread())
        asyncio.get_running_loop().call_later(0.01, beats.set)
        await ask(asyncio.get_running_loop())

    def answer(asked: dict[int, asyncio.AbstractEventLoop]) -> Mapping[int, None]:
        assert threading.current_thread() is here
        asyncio.run_coroutine_threadsafe(beats.wait(), asked[0]).result(30)
        return {0: None}

    together = Together(30.0)
    together.run([rollout], answer)
    together.run([rollout], answer)
    assert threads[0] is threads[1] is not here


def test_a_failure_ends_all_rollouts() -> None:
    ended = threading.Event()

    async def waits(ask: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails(ask: Any) -> None:
        raise KeyError("no such room")

    with pytest.raises(KeyError, match="no such room"):
        Together(30.0).run([waits, fails], lambda asked: {})
    assert ended.wait(30)


def test_the_engines_failure_ends_all_rollouts() -> None:
    ended = threading.Event()

    async def rollout(ask: Any) -> None:
        try:
            await ask("x")
        finally:
            ended.set()

    def answer(asked: dict[int, str]) -> Mapping[int, str]:
        raise OSError("engine")

    with pytest.raises(OSError, match="engine"):
        Together(30.0).run([rollout], answer)
    assert ended.wait(30)


@pytest.mark.parametrize("blocks", [False, True])
def test_an_environment_that_hangs_is_a_failure(blocks: bool) -> None:
    go = threading.Event()

    async def rollout(ask: Any) -> None:
        if blocks:
            go.wait()
        await asyncio.Event().wait()

    with pytest.raises(RunFailed, match=r"took longer than 0.05 s \(timeout_s\)"):
        Together(0.05).run([rollout], lambda asked: {})
    go.set()


def test_an_environments_own_timeout_keeps_its_words() -> None:
    async def rollout(ask: Any) -> None:
        raise TimeoutError("the game server")

    with pytest.raises(TimeoutError, match="the game server"):
        Together(30.0).run([rollout], lambda asked: {})


def test_two_requests_at_a_time_are_refused() -> None:
    async def rollout(ask: Any) -> None:
        await asyncio.gather(ask("a"), ask("b"))

    with pytest.raises(RunFailed, match="one request to the policy at a time"):
        Together(30.0).run([rollout], lambda asked: {0: "x"})
