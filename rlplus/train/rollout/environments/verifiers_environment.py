"""Environments of the package `verifiers`: its prompts, turns, tools and rewards, and the sampler as its client."""

import functools
import inspect
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlplus.common.errors import RunFailed, install_command, one_line
from rlplus.common.lazy import importing_from
from rlplus.train.config import ROW, EnvironmentConfig
from rlplus.train.rollout.custom_engine import Response, Sampler
from rlplus.train.rollout.environments.together import Ask, Together
from rlplus.train.rollout.environments.turns import Message, Turn, Turns, call_message

FIRST = (0, 1, 14)
BEYOND = (0, 4)
"""Versions with the interface that is used: `Client.get_response`, and environments with `run_rollout`."""

try:
    found = version("verifiers")
except PackageNotFoundError as error:
    raise ValueError(f"rollout.environment: verifiers is not installed: {install_command('environments')}") from error
if not FIRST <= tuple(int(part) for part in found.split(".")[:3] if part.isdecimal()) < BEYOND:
    raise ValueError(
        f"rollout.environment: want verifiers from {'.'.join(map(str, FIRST))} to below "
        f"{'.'.join(map(str, BEYOND))}, where environments have load_environment; got {found}"
    )

import datasets  # noqa: E402
import verifiers  # noqa: E402
from verifiers.clients import Client  # noqa: E402
from verifiers.types import Response as VerifiersResponse  # noqa: E402

datasets.disable_progress_bars()  # they would break the lines of a run


@dataclass(frozen=True)
class Request:
    """A rollout's question to the policy."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class VerifiersEnvironment:
    """An environment by its name; see `rlplus.train.rollout.environments.Environment`."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.name = config.name
        self.max_turn_tokens = config.max_turn_tokens
        with _own_signals(), importing_from(os.getcwd()):
            try:
                self.environment = verifiers.load_environment(config.name, **config.arguments)
            except Exception as error:  # its own code
                raise ValueError(f"rollout.environment {config.name}: {one_line(error)}") from error
        if self.environment.requires_group_rollouts:
            raise ValueError(f"rollout.environment {config.name}: rewards of a group as a whole are not supported")
        self._failures: list[tuple[str, Exception]] = []
        for environment in _parts(self.environment):
            _watch_rewards(environment.rubric, self._failures)
        self._together = Together(config.timeout_s)

    def problems(self, *, held_out: bool, count: int | None) -> Iterator[dict[str, Any]]:
        """The rows of `get_dataset`, or with held_out of `get_eval_dataset`, which falls back to the former."""
        number = -1 if count is None else count
        rows = self.environment.get_eval_dataset(number) if held_out else self.environment.get_dataset(number)
        if held_out and self.environment.eval_dataset is None:
            raise ValueError(f"the environment {self.name} has no problems of its own for evaluations")
        tools = [self._tools(row) for row in rows]
        for index, row in enumerate(rows):
            try:
                json.dumps(row)
            except TypeError as error:
                raise ValueError(f"{self.name}, problem {index}: want what JSON can hold; got {error}") from error
            problem = {
                "prompt": [_message(m) for m in row["prompt"]],
                "answer": str(row.get("answer") or "-"),
                ROW: row,
            }
            if any(tools):  # a column has a value in every row
                problem["tools"] = tools[index]
            yield problem

    def _tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        info = row.get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        environment = self.environment
        route = info.get("env_id") or row.get("task")
        for name in route if isinstance(route, list) else [route]:  # groups pass a row on, by its route
            environment = getattr(environment, "env_map", {}).get(str(name), environment)
        return [_tool(tool) for tool in info.get("tool_defs", environment.tool_defs) or ()]

    def __call__(self, sampler: Sampler, responses: list[Response]) -> None:
        turns = [Turns(response, sampler.tokenizer) for response in responses]
        self._failures.clear()

        def answer(asked: dict[int, Request]) -> dict[int, Turn | None]:
            going = [i for i, request in asked.items() if turns[i].open(request.messages, request.tools)]
            if going:
                sampler([responses[i] for i in going], max_tokens=self.max_turn_tokens)
            return {i: turns[i].close(tools=bool(asked[i].tools)) if i in going else None for i in asked}

        outputs = self._together.run([partial(self._rollout, response) for response in responses], answer)
        for response, output in zip(responses, outputs, strict=True):
            response.reward = self._reward(output)
            response.metrics = {name: float(value) for name, value in output["metrics"].items()}

    async def _rollout(self, response: Response, ask: Ask[Request, Turn | None]) -> Mapping[str, Any]:
        client = SamplerClient(ask)
        output: Mapping[str, Any] = await self.environment.run_rollout(
            response.task.columns[ROW], client, model="policy", sampling_args={}
        )
        if client.failure is not None:
            raise client.failure
        return output

    def _reward(self, output: Mapping[str, Any]) -> float:
        """The rubric's. RunFailed if a reward function or the environment failed: 0 would be a wrong answer's."""
        if self._failures:
            function, error = self._failures[0]
            raise RunFailed(f"the reward function {function} raised {type(error).__name__}: {error}") from error
        if output.get("error"):
            raise RunFailed(f"the environment failed: {output['error']}")
        if output.get("stop_condition") == "timeout_reached":
            raise RunFailed("a rollout took longer than the environment's own timeout_seconds")
        if not isinstance(output["reward"], int | float) or not math.isfinite(output["reward"]):
            raise RunFailed(f"want a finite reward; got {output['reward']}")
        return float(output["reward"])


class SamplerClient(Client):  # type: ignore[misc, unused-ignore]
    """A client whose model is the policy, for one rollout."""

    def __init__(self, ask: Ask[Request, Turn | None]) -> None:
        super().__init__(ask)
        self.ask = ask
        self.turns = 0
        self.failure: Exception | None = None

    async def get_response(
        self,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> VerifiersResponse:
        """The policy's turn. OverlongPromptError, which ends a rollout, where the response has no room."""
        try:
            if sampling_args:
                raise RunFailed(f"responses are sampled as the section rollout says; got sampling_args {sampling_args}")
            request = Request([_message(message) for message in prompt], [_tool(tool) for tool in tools or ()])
        except Exception as error:
            self.failure = error  # also if the environment catches it
            raise
        turn = await self.ask(request)
        if turn is None:
            raise verifiers.OverlongPromptError("the response has no room for another turn")
        self.turns += 1
        return self._response(model, turn)

    def _response(self, model: str, turn: Turn) -> VerifiersResponse:
        calls = [
            {"id": f"call_{self.turns}_{i}", "name": call.name, "arguments": json.dumps(call.arguments)}
            for i, call in enumerate(turn.calls)
        ]
        message = {
            "content": turn.content,
            "tool_calls": calls or None,
            "finish_reason": "length" if turn.truncated else "tool_calls" if calls else "stop",
            "is_truncated": turn.truncated,
        }
        usage = {
            "prompt_tokens": 0,
            "reasoning_tokens": 0,
            "completion_tokens": turn.tokens,
            "total_tokens": turn.tokens,
        }
        return VerifiersResponse.model_validate(
            {"id": f"turn-{self.turns}", "created": 0, "model": model, "usage": usage, "message": message}
        )

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("the client is the run's sampler")

    to_native_tool = to_native_prompt = get_native_response = setup_client
    raise_from_native_response = from_native_response = setup_client

    async def close(self) -> None:
        """Nothing is open."""


def _message(message: Any) -> Message:
    """A message of verifiers, an object or a mapping, as chat templates take it. RunFailed if it is not text."""
    given = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    content = given.get("content") or ""
    if isinstance(content, list):
        if other := [part for part in content if part.get("type") != "text"]:
            raise RunFailed(f"want messages of text; got a part of type {other[0].get('type')!r}")
        content = "".join(part["text"] for part in content)
    if calls := given.get("tool_calls"):
        return call_message(content, [(call["name"], call["arguments"]) for call in calls])
    message = {"role": given["role"], "content": content}
    return message if given.get("tool_call_id") is None else message | {"tool_call_id": given["tool_call_id"]}


def _tool(tool: Any) -> dict[str, Any]:
    """A tool's definition in OpenAI's format, which chat templates take."""
    given = tool if isinstance(tool, Mapping) else tool.model_dump()
    function = {key: given[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _parts(environment: Any) -> Iterator[Any]:
    """The environment, and the members of a group."""
    yield environment
    for part in getattr(environment, "envs", ()):
        yield from _parts(part)


def _watch_rewards(rubric: Any, failures: list[tuple[str, Exception]]) -> None:
    """Make the rubric's functions note what they raise: verifiers logs it and takes the reward for 0."""
    rubric.funcs = [_noting(function, failures) for function in rubric.funcs]
    for part in getattr(rubric, "rubrics", ()):
        _watch_rewards(part, failures)


def _noting(function: Callable[..., Any], failures: list[tuple[str, Exception]]) -> Callable[..., Any]:
    @functools.wraps(function)  # verifiers reads its name and its signature
    async def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            return float(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            failures.append((getattr(function, "__name__", repr(function)), error))
            raise

    return noting


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of SIGINT and SIGTERM, which an environment replaces when it is made: a run has its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
