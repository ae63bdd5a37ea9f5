"""The plain recipe: one draw of prompts, advantages of groups, mini-batches of whole groups.

A system that does more in a step is a subclass that overrides the methods where it differs. Every rank calls each
method; what the ranks must do alike, the methods say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rlplus.config import Config
from rlplus.data import Example, Sample
from rlplus.learner import Learner
from rlplus.objective import Algorithm, group_advantages
from rlplus.ops import PolicyLoss


class Ask(NamedTuple):
    """Members of an example's group: `rollouts` responses to sample, and its demonstration where `demonstrated`."""

    rollouts: int
    demonstrated: bool


@dataclass
class Batch:
    """This rank's share of a step: examples by `Sample.group`, scored samples, the seconds that the engine took."""

    examples: list[Example]
    samples: list[Sample]
    seconds: float


@dataclass(frozen=True)
class Update:
    """One optimiser step: the loss of `algorithm` on this rank's `samples`."""

    samples: list[Sample]
    algorithm: Algorithm


class Recipe:
    """What an algorithm does in a step. The methods stand in the order in which a step calls them.

    learners: the models that it trains beside the policy, by the names that its options give them; they are saved,
    restored and checked with the run.
    """

    learners: Mapping[str, Learner] = {}

    def __init__(self, config: Config) -> None:
        self.config = config
        self.algorithm: Algorithm = config.algorithm.resolve()

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        """Make `learners`, from the folder and configuration that the policy was made from. Collective."""

    def ask(self, examples: Sequence[Example]) -> list[Ask]:
        """The group of each example. A demonstration takes the place of a rollout, which is not sampled."""
        asks = []
        for example in examples:
            demonstrated = self.algorithm.demonstrates and example.demonstration is not None
            size = self.config.rollout.group_size if self.algorithm.generates else 0
            asks.append(Ask(max(0, size - demonstrated), demonstrated))
        return asks

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """The step's batch; `draw` takes the next prompts, and every rank calls it equally often."""
        return draw()

    def credit(self, batch: Batch) -> None:
        """Set every sample's advantage."""
        set_advantages(batch.samples, self.algorithm)

    def updates(self, batch: Batch) -> list[Update]:
        """Mini-batches of whole groups, in order; every rank returns as many."""
        train, world = self.config.train, dist.get_world_size()
        groups = (train.prompts_per_update or train.prompts_per_step) // world
        parts: list[list[Sample]] = [[] for _ in range(train.prompts_per_step // world // groups)]
        for sample in batch.samples:
            parts[sample.group // groups].append(sample)
        return [Update(part, self.algorithm) for part in parts]

    def saw(self, update: Update, outputs: Sequence[PolicyLoss], grad_norm: float | None) -> None:
        """Learn from an update that was made: its micro-batches' losses on this rank, the gradient's global norm."""

    def fit(self, batch: Batch, count: Callable[[bool], None]) -> None:
        """Train `learners`, after the policy's updates.

        count: to be called after each optimizer step with whether it was applied; it may raise.
        """

    def metrics(self) -> dict[str, tuple[float, float]]:
        """What the step's log says of it, by name: this rank's sum and count, of which the mean over ranks is taken."""
        return {}

    def state(self) -> Any:
        """What this rank remembers from step to step, for a checkpoint; later steps must not change the value."""
        return None

    def restore(self, state: Any) -> None:
        """Go on where `state` was taken."""


def set_advantages(samples: Sequence[Sample], algorithm: Algorithm) -> None:
    """Group-relative advantages; demonstrations that stand apart do not enter the statistics."""
    demonstrations = torch.tensor([s.demonstration for s in samples], dtype=torch.bool)
    advantages = group_advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        torch.tensor([s.group for s in samples], dtype=torch.int64),
        normalize_std=algorithm.normalize_std,
        include=~demonstrations if algorithm.demonstrations_apart else None,
    )
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage
