"""The replay recipe: correct rollouts of earlier steps return as members of a group (ExGRPO, arXiv 2510.02245)."""

from array import array
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Any, NamedTuple

import torch.distributed as dist

from rlplus.common import agree
from rlplus.common.chosen_experts import Experts
from rlplus.common.kept_sets import KeptSets
from rlplus.train.algorithm import Replay
from rlplus.train.config import Config
from rlplus.train.data import Example, Sample
from rlplus.train.recipe.plain import Ask, Batch, Recipe


class Remembered(NamedTuple):
    """A correct rollout: token ids, the engine's logprobs of them when they were sampled, and the grader's reward.

    kept: the tokens that each was sampled from, over which author and policy are renormalised; None = all.
    experts: those that the engine's routers chose, with rollout.routing_replay.
    """

    response: Sequence[int]
    logprob: Sequence[float]
    reward: float
    kept: KeptSets | None = None
    experts: Experts | None = None

    @property
    def entropy(self) -> float:
        """The mean of -log p over the tokens, whose expectation is the mean entropy of the policy that sampled them."""
        return -sum(self.logprob) / len(self.logprob)


Kept = Remembered  # its name in checkpoints of 0.3.0, which pickle it


class ReplayRecipe(Recipe):
    """Some of a step's prompts are earlier ones that were solved in part, each with a rollout that solved it then.

    Such a prompt gets one rollout less. The remembered one joins the group as external tokens. Its author is the
    earlier policy; those logprobs are its behavior_logprob. How often a prompt was solved when it was last trained on,
    replayed member included, decides how likely it returns: by a normal distribution around half of the group, with a
    standard deviation of one rollout. A prompt that all members solved waits no longer.

    Differences: the remembered rollout is the one with the lowest entropy, which is estimated from the logprobs that it
    was sampled with; the original keeps all correct ones and computes their entropies under the current policy. Its
    logprobs are the engine's; there the trainer's. Before `start` the original clips ratios at .2. It takes prompts
    that all rollouts solved out of the data; here the sampler goes on drawing them.

    How often each prompt was solved all ranks know; a prompt's rollout stays with one of them.
    """

    options: Replay

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = 0
        self.started = False
        self.solved: dict[int, int] = {}  # members that solved a prompt that waits, by its place among the run's
        self.remembered: dict[int, Remembered] = {}  # this rank's part
        self._places: list[int] = []  # the prompts drawn last, on this rank
        self._replayed: dict[int, Remembered] = {}
        self._share = (0, 0)

    def prompts(self, drawn: Sequence[int]) -> list[int]:
        """The first drawn prompts, shuffled with prompts that return in place of the last ones. Collective."""
        random = Random(f"{self.config.train.seed} {self.steps}")
        here = set(drawn)
        buckets = dict[int, list[int]]()
        chosen = list[int]()
        for place, solved in sorted(self.solved.items()):
            if place not in here:
                buckets.setdefault(solved, []).append(place)
        while buckets and len(chosen) < int(self.options.share * len(drawn)):
            chosen.append(_draw(buckets, self.config.rollout.group_size, random))
        places = [*drawn[: len(drawn) - len(chosen)], *chosen]
        random.shuffle(places)
        self._replayed = {}
        for part in agree.gathered({place: self.remembered[place] for place in chosen if place in self.remembered}):
            self._replayed |= part
        self._places = super().prompts(places)
        return self._places

    def ask(self, examples: Sequence[Example]) -> list[Ask]:
        asks = super().ask(examples)
        for i, (place, example) in enumerate(zip(self._places, examples, strict=True)):
            if (rollout := self._replayed.get(place)) is not None:
                sample = Sample(
                    example.prompt, rollout.response, 0, True, False, None, rollout.reward,
                    behavior_logprob=rollout.logprob, scored=True, kept=rollout.kept,
                    experts=rollout.experts,
                )  # fmt: skip
                asks[i] = Ask(asks[i].rollouts - 1, False, replayed=sample)
        return asks

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """Once a step was solved often enough, remember which prompts were solved in part, and how."""
        batch = super().collect(draw)
        self.steps += 1
        self._share = sum(sample.demonstration for sample in batch.samples), len(batch.indices)
        if not self.started:
            right = sum(sample.reward >= 1 for sample in batch.samples)
            total, members = agree.sums(right, len(batch.samples))
            self.started = total > self.options.start * members
            return batch
        groups: list[list[Sample]] = [[] for _ in batch.indices]
        for sample in batch.samples:
            groups[sample.group].append(sample)
        rank = dist.get_rank()
        world = dist.get_world_size()
        own = [(group * world + rank, batch.indices[group], *_judged(members)) for group, members in enumerate(groups)]
        everybody = [judged for part in agree.gathered(own) for judged in part]
        for _, place, right, wrong, best in sorted(everybody, key=lambda judged: judged[0]):  # the order of one rank
            if right and wrong:
                self.solved[place] = right
                if best is not None and place % world == rank:
                    least = min(best, self.remembered.get(place, best), key=lambda rollout: rollout.entropy)
                    self.remembered[place] = least
            elif right:
                self.solved.pop(place, None)
                self.remembered.pop(place, None)
        return batch

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {"replay/waiting": (len(self.solved), 1), "replay/share": self._share}

    def state(self) -> Any:
        return self.steps, self.started, dict(self.solved), dict(self.remembered)

    def restore(self, state: Any) -> None:
        self.steps, self.started, solved, remembered = state
        self.solved = dict(solved)
        self.remembered = dict(remembered)

    def redistributed(self, states: Sequence[Any]) -> Any:
        steps, started, solved, _ = states[0]  # which all ranks know
        everybody = {place: rollout for *_, remembered in states for place, rollout in remembered.items()}
        rank = dist.get_rank()
        world = dist.get_world_size()
        return steps, started, solved, {place: each for place, each in everybody.items() if place % world == rank}


def _draw(buckets: dict[int, list[int]], group_size: int, random: Random) -> int:
    """Remove a random prompt: choose a bucket (prompts solved equally often), then a prompt in it."""
    squares = {number: (number - group_size / 2) ** 2 for number in sorted(buckets)}
    nearest = min(squares.values())  # has the weight 1: in a large group all others may round to 0
    (number,) = random.choices([*squares], [exp((nearest - square) / 2) for square in squares.values()])
    place = buckets[number].pop(random.randrange(len(buckets[number])))
    if not buckets[number]:
        del buckets[number]
    return place


def _judged(group: Sequence[Sample]) -> tuple[int, int, Remembered | None]:
    """Number of right and of wrong members, and the right rollout of the lowest entropy, if it is to be remembered."""
    right = [sample for sample in group if sample.reward >= 1]
    wrong = len(group) - len(right)
    rollouts = [
        Remembered(
            array("i", sample.response), array("f", sample.engine_logprob), sample.reward, sample.kept, sample.experts
        )
        for sample in right
        if wrong and sample.engine_logprob is not None  # else it is a replayed one, which is remembered already
    ]
    return len(right), wrong, min(rollouts, key=lambda rollout: rollout.entropy, default=None)
