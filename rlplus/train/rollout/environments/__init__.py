"""Environments of other libraries as rollout functions: several turns, tool calls, rewards of their own.

An environment's requests to a model are answered by the sampler, and its messages become tokens of the response that
are not trained on. The libraries are imported where an environment of theirs is loaded.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from rlplus.train.config import EnvironmentConfig
from rlplus.train.rollout.custom_engine import Response, Sampler


class Environment(Protocol):
    """An environment of one of the libraries."""

    def __call__(self, sampler: Sampler, responses: list[Response]) -> None:
        """Make the responses and their rewards, as a rollout function. RunFailed where the environment fails."""
        ...

    def problems(self, *, held_out: bool, count: int | None) -> Iterator[dict[str, Any]]:
        """Rows of data: prompt (chat messages), answer, row (the problem as this environment wants it), tools.

        held_out: those for evaluations, where there are others. count: the number of rows; None = all.
        """
        ...


def load_environment(config: EnvironmentConfig) -> Environment:
    """The environment. ValueError if its library or it itself is not installed, or its arguments are wrong."""
    if config.library == "verifiers":
        from rlplus.train.rollout.environments.verifiers_environment import VerifiersEnvironment

        return VerifiersEnvironment(config)
    from rlplus.train.rollout.environments.openenv_environment import OpenEnvEnvironment

    return OpenEnvEnvironment(config)
