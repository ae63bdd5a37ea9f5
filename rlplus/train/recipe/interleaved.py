"""The interleaved recipe: supervised updates between updates on rollouts (ReLIFT, arXiv 2506.07527)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from rlplus.common import agree
from rlplus.train.algorithm import Interleaved
from rlplus.train.config import Config
from rlplus.train.data import Example
from rlplus.train.recipe.plain import Batch, Recipe, Update, demonstration, unsolved

# A demonstration's step and its place among the step's prompts; they sort by newest step, then in order of prompts.
Place = tuple[int, int]


class InterleavedRecipe(Recipe):
    """Buffers demonstrations of prompts that no rollout solved; at `batch` of them, the step has an additional update.

    That update uses the newest ones, with the algorithm's loss for demonstrations. The order is global; each rank
    buffers the demonstrations of its own prompts. With `batch` >= prompts_per_step fewer than `batch` are left after a
    step. Otherwise, while more than `batch` prompts per step stay unsolved, the oldest ones accumulate in memory and in
    every checkpoint.

    Both kinds of update share one AdamW, its moments included, and one grad_clip, since DeepSpeed owns one optimizer.
    The original has an AdamW for each (both with lr 1e-6; norms clipped to .7 and 1).
    """

    options: Interleaved

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.batch = self.options.batch
        self.steps = 0
        self.waiting: list[tuple[Place, Example]] = []
        self._in_line = 0  # number waiting on all ranks, after the step
        self._updated = False

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        batch = super().collect(draw)
        rank = dist.get_rank()
        world = dist.get_world_size()
        self.steps += 1
        for group in unsolved(batch, at_most=0):
            self.waiting.append(((-self.steps, group * world + rank), batch.examples[group]))
        return batch

    def updates(self, batch: Batch) -> list[Update]:
        """The updates on rollouts, and one on demonstrations if enough are buffered."""
        updates = super().updates(batch)
        line = sorted(place for places in agree.gathered([place for place, _ in self.waiting]) for place in places)
        self._updated = len(line) >= self.batch
        if self._updated:
            last = line[self.batch - 1]
            chosen = [example for place, example in self.waiting if place <= last]
            self.waiting = [(place, example) for place, example in self.waiting if place > last]
            samples = [demonstration(example, group) for group, example in enumerate(chosen)]
            for sample in samples:
                sample.advantage = sample.reward  # each is alone, without a group to compare with
            updates.append(Update(samples, self.algorithm))
        self._in_line = len(line) - self.batch * self._updated
        return updates

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {"sft/waiting": (self._in_line, 1), "sft/updates": (self._updated, 1)}

    def state(self) -> Any:
        return self.steps, list(self.waiting)

    def restore(self, state: Any) -> None:
        self.steps, waiting = state
        self.waiting = list(waiting)

    def redistributed(self, states: Sequence[Any]) -> Any:
        """Every demonstration waits where its prompt would have been drawn, in the order of the draws."""
        everybody = [each for _, waiting in states for each in waiting]
        everybody.sort(key=lambda each: (-each[0][0], each[0][1]))
        rank = dist.get_rank()
        world = dist.get_world_size()
        return states[0][0], [(place, example) for place, example in everybody if place[1] % world == rank]
