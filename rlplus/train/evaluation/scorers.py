"""The grader of each benchmark."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from rlplus.train.config import BENCHMARKS, Config, EvaluationConfig, RewardConfig
from rlplus.train.reward import Scorer


class Scorers:
    """The scorers of an evaluation's benchmarks, started at first use. A context manager."""

    def __init__(self, config: Config, section: EvaluationConfig, run: Scorer | None = None) -> None:
        """section: `evaluation` or `validation`. run: the scorer of the run's own reward, reused and left open."""
        self._reward = config.reward
        self._section = section
        self._stack = ExitStack()
        self._made = {} if run is None else {_key(config.reward, config.data.columns): run}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, benchmark: str) -> Scorer:
        assert self._section.data is not None
        reward = reward_of(self._reward, self._section, benchmark)
        columns = self._section.data.columns
        if (key := _key(reward, columns)) not in self._made:
            self._made[key] = self._stack.enter_context(Scorer(reward, columns))
        return self._made[key]


def _key(reward: RewardConfig, columns: Sequence[str]) -> tuple[str, ...]:
    return reward.model_dump_json(), *columns


def reward_of(reward: RewardConfig, section: EvaluationConfig, benchmark: str) -> RewardConfig:
    """The benchmark's own grader if the section names the benchmark, else the run's reward."""
    if benchmark not in section.benchmarks:
        return reward
    entry = BENCHMARKS[benchmark]
    kind = section.math_grader if entry.mathematical else entry.grader
    return reward.model_copy(update={"kind": kind, "function": None, "pattern": None})
