"""The plain recipe: one draw of prompts, advantages of groups, mini-batches of whole groups.

An algorithm that does more in a step is a subclass that overrides the methods where it differs. Every rank calls each
method; the methods' docstrings say what the ranks must do alike.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rlplus.common import agree
from rlplus.loss import PolicyLoss, batch_advantages, group_advantages
from rlplus.train.algorithm import Algorithm, RecipeOptions
from rlplus.train.config import Config
from rlplus.train.data import Example, MicroBatch, Sample
from rlplus.train.learner import Learner, Policy


class Ask(NamedTuple):
    """Members of an example's group: `rollouts` responses to sample, and its demonstration if `demonstrated`.

    prefixes: the initial tokens of each of the first rollouts; the others have none.
    replayed: one more member, sampled in an earlier step, with its reward.
    """

    rollouts: int
    demonstrated: bool
    prefixes: Sequence[Sequence[int]] = ()
    replayed: Sample | None = None


@dataclass
class Batch:
    """This rank's share of a step: examples by `Sample.group`, scored samples, the engine's seconds.

    indices: as `Recipe.prompts` returned them, of the examples of one draw.
    """

    examples: list[Example]
    samples: list[Sample]
    seconds: float
    indices: Sequence[int] = ()


@dataclass(frozen=True)
class Update:
    """One optimizer step: the loss of `algorithm` on this rank's `samples`."""

    samples: list[Sample]
    algorithm: Algorithm


class Recipe:
    """The algorithm's part of a step. The methods are in the order in which a step calls them.

    learners: the models trained alongside the policy, by the names that the options give them; they are saved, restored
    and checked with the run.
    policy: the model that the run trains; set before `build`. ends: the tokens that end its responses.
    fits_first: whether `fit` comes before `credit` instead of after the policy's updates.
    Options: the class of `options`, for a recipe that a configuration names as file.py:Class.

    A recipe of your own overrides the methods where it differs:

        # signs.py, for `algorithm: {preset: grpo, recipe: {name: "signs.py:Signs"}}`
        from rlplus.train.recipe import Recipe

        class Signs(Recipe):
            def credit(self, batch):
                for sample in batch.samples:
                    sample.advantage = 1.0 if sample.reward > 0 else -1.0
    """

    Options: ClassVar[type[RecipeOptions]] = RecipeOptions
    learners: Mapping[str, Learner] = {}
    policy: Policy
    ends: Sequence[int] = ()
    fits_first = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.algorithm: Algorithm = config.algorithm.resolve()
        self.options = self.algorithm.recipe

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        """Create `learners` from the folder and configuration of the policy. Collective."""

    def prompts(self, drawn: Sequence[int]) -> list[int]:
        """This rank's share of the drawn prompts (indices into the run's prompts)."""
        return list(drawn[dist.get_rank() :: dist.get_world_size()])

    def ask(self, examples: Sequence[Example]) -> list[Ask]:
        """The group of each example. A demonstration replaces a rollout, which is not sampled."""
        asks = []
        for example in examples:
            demonstrated = self.algorithm.demonstrates_in_place and example.demonstration is not None
            size = self.config.rollout.group_size if self.algorithm.generates else 0
            asks.append(Ask(max(0, size - demonstrated), demonstrated))
        return asks

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """The step's batch. `draw` uses the next prompts (several times with `Refill`); all ranks call it alike."""
        return draw()

    def again(self, batch: Batch, tries: int) -> Mapping[int, Ask]:
        """Groups of a draw that are to be sampled again, with the same weights, by their numbers in the batch.

        Called for every draw when its samples are scored, those included that the grader failed on (`Sample.masked`),
        and once more after each of `tries` repetitions, until no rank returns a group. What is sampled last is the
        group; the members before it are lost. Not with train.overlap, where the next steps' draws wait in the engine.
        """
        return {}

    def credit(self, batch: Batch) -> None:
        """Set every sample's advantage, from its reward, which is already shaped, and its token rewards."""
        set_advantages(batch.samples, self.algorithm)

    def updates(self, batch: Batch) -> list[Update]:
        """Mini-batches of whole groups, in order; every rank returns the same number."""
        train = self.config.train
        world = dist.get_world_size()
        groups = (train.prompts_per_update or train.prompts_per_step) // world
        parts: list[list[Sample]] = [[] for _ in range(train.prompts_per_step // world // groups)]
        for sample in batch.samples:
            parts[sample.group // groups].append(sample)
        return [Update(part, self.algorithm) for part in parts]

    def accumulate(
        self, update: Update, batches: Sequence[MicroBatch], before_each: Callable[[], None] | None = None
    ) -> list[PolicyLoss]:
        """Accumulate the gradient of an update in the policy; returns its micro-batches' losses on this rank.

        before_each: called before each micro-batch; may raise.
        """
        return self.policy.backward(batches, self.policy.loss_of(update.algorithm.objective), before_each)

    def saw(self, update: Update, outputs: Sequence[PolicyLoss], grad_norm: float | None) -> None:
        """Observe an update: its micro-batches' losses on this rank, and the gradient's global norm."""

    def fit(self, batch: Batch, count: Callable[[bool], None]) -> None:
        """Train `learners`.

        count: call it after each optimizer step, with whether the step was applied; it may raise.
        """

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Metrics of the step by name: this rank's sum and count, whose mean over all ranks is logged."""
        return {}

    def state(self) -> Any:
        """This rank's state between steps, for a checkpoint; until a step's first update it must stay as it is."""
        return None

    def restore(self, state: Any) -> None:
        """Restore a value of `state`."""

    def redistributed(self, states: Sequence[Any]) -> Any:
        """This rank's state in a run that goes on with another number of ranks, whose states these are; loses nothing.

        A recipe that keeps a state says how they share it. ValueError otherwise.
        """
        if any(state is not None for state in states):
            raise ValueError(
                f"the recipe {type(self).__name__} does not say how other ranks share the states of {len(states)}: "
                f"want {len(states)} ranks, or a method redistributed(states); got {dist.get_world_size()} ranks"
            )
        return None


def set_advantages(samples: Sequence[Sample], algorithm: Algorithm) -> None:
    """Set advantages by the algorithm's estimator; demonstrations "apart" do not enter the statistics.

    Collective, except for the estimator "group", which needs no other rank's groups.
    """
    rows = [(s.reward + sum(s.token_reward or ()), s.group, s.demonstration, sum(s.loss_tokens)) for s in samples]
    ranks = [rows] if algorithm.advantage == "group" else agree.gathered(rows)
    everybody = [(reward, (rank, group), *rest) for rank, own in enumerate(ranks) for reward, group, *rest in own]
    groups = {name: i for i, name in enumerate(dict.fromkeys(group for _, group, *_ in everybody))}
    rewards = torch.tensor([reward for reward, *_ in everybody], dtype=torch.float64)
    group_ids = torch.tensor([groups[group] for _, group, *_ in everybody], dtype=torch.int64)
    demonstrations = torch.tensor([demonstration for _, _, demonstration, _ in everybody], dtype=torch.bool)
    include = ~demonstrations if algorithm.demonstrations_apart else None
    if algorithm.advantage == "group":
        advantages = group_advantages(rewards, group_ids, normalize_std=algorithm.normalize_std, include=include)
    else:
        tokens = torch.tensor([tokens for *_, tokens in everybody], dtype=torch.int64)
        k = algorithm.advantage_k
        advantages = batch_advantages(rewards, group_ids, algorithm.advantage, include=include, tokens=tokens, k=k)
        before = sum(len(own) for own in ranks[: dist.get_rank()])
        advantages = advantages[before : before + len(samples)]
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage


def demonstration(example: Example, group: int) -> Sample:
    """The example's demonstration as a member of that group, with the reward that the grader gave it."""
    assert example.demonstration is not None, "want a demonstration to show"
    reward = example.demonstration_reward
    behavior = example.behavior_logprob
    sample = Sample(example.prompt, example.demonstration, group, True, False, None, reward, behavior_logprob=behavior)
    sample.teacher_topk = example.teacher_topk
    return sample


def unsolved(batch: Batch, at_most: int) -> list[int]:
    """Groups with a demonstration and graded rollouts, at most `at_most` of which have a reward above 0."""
    solved = Counter[int]()
    for sample in batch.samples:
        if not sample.demonstration:
            solved[sample.group] += sample.reward > 0
    few = (group for group, count in sorted(solved.items()) if count <= at_most)
    return [group for group in few if batch.examples[group].demonstration is not None]
