"""PPO with a critic: per-token advantages from a value model that is trained alongside the policy."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from rlplus.common import agree
from rlplus.train.algorithm import Critic, generalized_advantages
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.learner import Optimization, ValueModel, by_sample, mean_batches
from rlplus.train.recipe.fit import SMALLEST_VARIANCE, Metrics, fit, whitened
from rlplus.train.recipe.plain import Batch, Recipe


class CriticRecipe(Recipe):
    """Values come from the critic as the previous step left it; its updates follow the policy's."""

    options: Critic

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._metrics: Metrics = {}

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        own = Optimization(self.options.lr, self.options.warmup_steps)
        self.critic = ValueModel(self.config, model_path, model_config, own)
        self.learners = {"critic": self.critic}
        self.pad_id = pad_id

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """The step's batch. With `stopped_only` the reward of a truncated response becomes 0, before shaping."""
        batch = super().collect(draw)
        for sample in batch.samples:
            if self.options.stopped_only and sample.truncated:
                sample.reward = 0.0
        return batch

    def credit(self, batch: Batch) -> None:
        """Set values, returns and advantages. Collective."""
        options = self.options
        samples = batch.samples
        values = by_sample(samples, self.critic.value, self.config, self.pad_id, self.critic.device)
        given = [torch.tensor(s.token_reward or [0.0] * len(s.response), dtype=torch.float64) for s in samples]
        advantages = generalized_advantages(
            [sample.reward for sample in samples],
            values,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            token_rewards=given,
        )
        for sample, value, advantage in zip(samples, values, advantages, strict=True):
            sample.value = value.tolist()
            sample.returns = (value + advantage).tolist()
        for sample, advantage in zip(samples, whitened(advantages) if options.whiten else advantages, strict=True):
            sample.advantage = advantage.tolist()
        self._metrics = _value_metrics(values, advantages)

    def fit(self, batch: Batch, count: Callable[[bool], None]) -> None:
        """One pass over the batch in `critic_updates` mini-batches. Collective."""
        critic = self.critic
        mini_batches = (
            mean_batches(samples, self.config, self.pad_id, critic.device)
            for samples in self._mini_batches(batch.samples)
        )
        self._metrics |= fit(
            "critic", critic, mini_batches, partial(critic.accumulate, clip=self.options.value_clip), count
        )

    def metrics(self) -> Metrics:
        return self._metrics

    def _mini_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """This rank's part of each mini-batch; any number of ranks divide a draw's samples in the sampler's order.

        With `Refill`, which may move groups between ranks, the division is by the rank that has them.
        """
        world = dist.get_world_size()
        updates = self.options.critic_updates
        size = self.config.rollout.group_size
        parts: list[list[Sample]] = [[] for _ in range(updates)]
        members: Counter[int] = Counter()  # counted so far in each group
        for sample in samples:
            place = (sample.group * world + dist.get_rank()) * size + members[sample.group]
            members[sample.group] += 1
            parts[place * updates // (self.config.train.prompts_per_step * size)].append(sample)
        return parts


def _value_metrics(values: Sequence[Tensor], advantages: Sequence[Tensor]) -> Metrics:
    """Metrics: the mean value, and the share of the returns' variance that the values explain. Collective."""
    none = torch.empty(0, dtype=torch.float32)
    value = torch.cat([*values, none]).double()
    error = torch.cat([*advantages, none]).double()
    returns = value + error
    count, error_sum, returns_sum, error_squares, returns_squares = agree.sums(
        len(value), float(error.sum()), float(returns.sum()), float(error.square().sum()), float(returns.square().sum())
    )
    metrics: Metrics = {"critic/value": (float(value.sum()), float(len(value)))}
    if count:
        left = error_squares / count - (error_sum / count) ** 2
        whole = returns_squares / count - (returns_sum / count) ** 2
        if whole > SMALLEST_VARIANCE:
            metrics["critic/explained_variance"] = (1 - left / whole, 1)
    return metrics
