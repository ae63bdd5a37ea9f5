"""Environments of an OpenEnv server: a session per response, the policy's text as action, observations as text.

The server has the package openenv; here its messages are JSON over a WebSocket, as its generic client sends them.
"""

import json
import math
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from rlplus.common.errors import RunFailed, install_command
from rlplus.train.config import ROW, EnvironmentConfig
from rlplus.train.rollout.custom_engine import Response, Sampler
from rlplus.train.rollout.environments.together import Ask, Together
from rlplus.train.rollout.environments.turns import Message, Turn, Turns

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, WebSocketException
except ImportError as error:
    raise ValueError(f"rollout.environment: OpenEnv wants websockets: {install_command('environments')}") from error

LARGEST_MESSAGE = 100 * 2**20  # bytes, as in OpenEnv's client
LONGEST = 500  # characters of what came, in a message


class Observed(NamedTuple):
    """An answer of the server: the text of an observation, the reward, whether the episode has ended."""

    text: str
    reward: float | None
    done: bool


class OpenEnvEnvironment:
    """An environment by its server's address; see `rlplus.train.rollout.environments.Environment`."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self._address = "ws" + config.name.removeprefix("http").rstrip("/") + "/ws"
        self._together = Together(config.timeout_s)
        try:
            self._together.run([self._connects], lambda asked: {})
        except RunFailed as error:
            raise ValueError(f"rollout.environment {config.name}: {error}") from error

    async def _connects(self, _: Any) -> None:
        async with self._session():
            pass

    def problems(self, *, held_out: bool, count: int | None) -> Iterator[dict[str, Any]]:
        """The first observations with seeds 0, 1, ..., `count` of them; with held_out those behind 2^30."""
        if count is None:
            raise ValueError("an OpenEnv server has no list of problems: want -n, how many seeds to reset it with")
        for seed in range(2**30 if held_out else 0, (2**30 if held_out else 0) + count):
            try:
                (first,) = self._together.run([partial(self._first, seed)], lambda asked: {})
            except RunFailed as error:
                raise RunFailed(f"rollout.environment {self.config.name}: {error}") from error
            yield {"prompt": [{"role": "user", "content": first.text}], "answer": "-", ROW: {"seed": seed}}

    async def _first(self, seed: int, _: Any) -> Observed:
        async with self._session() as session:
            return await self._observed(session, "reset", {"seed": seed})

    def __call__(self, sampler: Sampler, responses: list[Response]) -> None:
        turns = [Turns(response, sampler.tokenizer) for response in responses]

        def answer(asked: dict[int, Sequence[Message]]) -> dict[int, Turn | None]:
            going = [i for i, messages in asked.items() if turns[i].open(messages, None)]
            if going:
                sampler([responses[i] for i in going], max_tokens=self.config.max_turn_tokens)
            return {i: turns[i].close(tools=False) if i in going else None for i in asked}

        rewards = self._together.run([partial(self._rollout, response) for response in responses], answer)
        for response, reward in zip(responses, rewards, strict=True):
            response.reward = reward

    async def _rollout(self, response: Response, ask: Ask[Sequence[Message], Turn | None]) -> float:
        """One episode; -> the sum of its rewards. RunFailed if it came to its end without one."""
        async with self._session() as session:
            observed = await self._observed(session, "reset", response.task.columns[ROW])
            messages: list[Message] = [{"role": "user", "content": observed.text}]
            rewards = []
            for _ in range(self.config.max_turns):
                turn = await ask(messages)
                if turn is None:  # no room
                    break
                observed = await self._observed(session, "step", {self.config.action: turn.content})
                rewards.append(observed.reward)
                if observed.done:
                    break
                messages = [
                    *messages,
                    {"role": "assistant", "content": turn.content},
                    {"role": "user", "content": observed.text},
                ]
        given = [reward for reward in rewards if reward is not None]
        if not given and not observed.done:
            return self.config.unfinished
        if not given or not math.isfinite(sum(given)):
            raise RunFailed(f"want at least one finite reward in an episode; got {rewards}")
        return sum(given)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ClientConnection]:
        """A connection, which has an environment of its own. RunFailed if the server is not reached or breaks off."""
        try:
            # timeout_s is the only limit: an environment may block its server's loop while it computes
            async with connect(
                self._address, max_size=LARGEST_MESSAGE, open_timeout=None, ping_timeout=None
            ) as session:
                yield session
                await session.send(json.dumps({"type": "close"}))
        except (TimeoutError, OSError, WebSocketException) as error:
            raise RunFailed(f"the server at {self._address} failed: {type(error).__name__}: {error}") from error

    async def _observed(self, session: ClientConnection, kind: str, data: dict[str | None, Any]) -> Observed:
        """The answer to a message. RunFailed if it is an error, or no observation with a text."""
        with suppress(ConnectionClosed):  # a server that is full says so first, then closes
            await session.send(json.dumps({"type": kind, "data": data}))
        answer = _message(await session.recv())
        if answer.get("type") == "error":
            told = answer["data"]
            full = told.get("code") == "CAPACITY_REACHED"
            hint = "; want it started with max_concurrent_envs of at least a step's responses" if full else ""
            raise RunFailed(f"the server refused {kind} {data}: {told.get('message')} ({told.get('code')}){hint}")
        observation = answer["data"].get("observation")
        field = self.config.observation
        text = observation.get(field) if isinstance(observation, dict) else None
        if not isinstance(text, str):
            raise RunFailed(
                f"want text in the field {field!r} (rollout.environment.observation) of an observation; got "
                f"{_short(observation)}"
            )
        reward = answer["data"].get("reward")
        done = answer["data"].get("done")
        number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if not (reward is None or (number and abs(reward) <= sys.float_info.max)):
            raise RunFailed(f"want a finite number or null as the reward of a {kind}; got {_short(reward)}")
        if not (done is None or isinstance(done, bool)):
            raise RunFailed(f"want true or false as done of a {kind}; got {_short(done)}")
        return Observed(text, None if reward is None else float(reward), bool(done))


def _message(text: str | bytes) -> dict[str, Any]:
    """A server's message, with data. RunFailed for anything else."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFailed(f"want JSON from the server; got {_short(text)}") from error
    if not (isinstance(answer, dict) and isinstance(answer.get("data"), dict)):
        raise RunFailed(f"want a message from the server whose data is an object; got {_short(answer)}")
    return answer


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
