"""Environments of `verifiers` for the tests, by kind: `load_environment(kind=...)`."""

import asyncio
import random
from typing import Any

import verifiers
from datasets import Dataset

ROWS = [{"question": f"say {i}", "answer": str(i), "info": {"level": i}} for i in range(4)]
TESTS = [{"question": "say 9", "answer": "9", "info": {"level": 0}}]


def digits(completion: Any, answer: str, info: dict[str, int]) -> float:
    """A sum over the dialogue that any change of it changes."""
    said = "".join(str(m["content"]) for m in completion)
    return sum(ord(sign) * (1 + i % 7) for i, sign in enumerate(said)) / 1e4 + int(answer) + 10 * info["level"]


def length(completion: Any) -> float:
    return float(len(completion))


class Echo(verifiers.MultiTurnEnv):
    """Answers after a random time; `rng` decides how long."""

    rng = random.Random(0)

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        await asyncio.sleep(self.rng.random() / 100)
        return [{"role": "user", "content": f"{len(state['trajectory'])}:{messages[-1]['content']}"[:12]}]


class Broken(Echo):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise KeyError("no such room")


class Failing(Echo):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise verifiers.InfraError("the sandbox is gone")


class Hanging(Echo):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        await asyncio.Event().wait()


class Own(Echo):
    """Samples as it likes, and is quiet about a refusal."""

    async def get_model_response(self, state: Any, prompt: Any, **_: Any) -> Any:
        try:
            return await super().get_model_response(state, prompt, sampling_args={"temperature": 0.1})
        except RuntimeError:
            return await super().get_model_response(state, prompt)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def broken_reward(completion: Any) -> float:
    raise ZeroDivisionError("no turns")


async def late_reward(completion: Any) -> float:
    await asyncio.sleep(0)
    return float("nan")


def group_reward(completions: Any) -> list[float]:
    return [0.0] * len(completions)


KINDS: dict[str, Any] = {
    "single": lambda **made: verifiers.SingleTurnEnv(**made),
    "echo": lambda **made: Echo(max_turns=3, **made),
    "broken": lambda **made: Broken(max_turns=3, **made),
    "failing": lambda **made: Failing(max_turns=3, **made),
    "hanging": lambda **made: Hanging(max_turns=3, **made),
    "late": lambda **made: Hanging(max_turns=3, timeout_seconds=0.2, **made),
    "own": lambda **made: Own(max_turns=3, **made),
    "tools": lambda **made: verifiers.ToolEnv(tools=[add], max_turns=3, **made),
    "strict": lambda **made: verifiers.ToolEnv(tools=[add], max_turns=3, stop_errors=[Exception], **made),
    "group": lambda **made: verifiers.EnvGroup([Echo(max_turns=2, **made), verifiers.SingleTurnEnv(**made)]),
    "toolbox": lambda **made: verifiers.EnvGroup(
        [verifiers.EnvGroup([verifiers.SingleTurnEnv(**made), verifiers.ToolEnv(tools=[add], max_turns=3, **made)])]
    ),
    "tested": lambda **made: verifiers.SingleTurnEnv(eval_dataset=Dataset.from_list(TESTS), **made),
}


def load_environment(kind: str, rewards: tuple[str, ...] = ("digits", "length"), system: str | None = None) -> Any:
    rubric = verifiers.Rubric([globals()[name] for name in rewards], weights=[1.0, 0.5][: len(rewards)])
    return KINDS[kind](dataset=Dataset.from_list(ROWS), rubric=rubric, system_prompt=system)
