"""PRIME: advantages from outcomes and from process rewards, whose model is trained on the outcomes."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from transformers import PretrainedConfig

from rlplus.common import agree
from rlplus.common.errors import SharedFailure
from rlplus.train.algorithm import ProcessReward, process_advantages
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.learner import Optimization, ProcessModel, by_sample, mean_batches
from rlplus.train.recipe.fit import Metrics, fit, whitened
from rlplus.train.recipe.plain import Batch, Recipe

EPSILON = 1e-6  # added to the largest return of process rewards


class ProcessRewardRecipe(Recipe):
    """The reward model scores a step's samples, and is trained on their outcomes afterwards or, optionally, first."""

    options: ProcessReward

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fits_first = self.options.update == "before"
        self._metrics: Metrics = {}

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        o = self.options
        own = Optimization(o.lr, o.warmup_steps, o.weight_decay, o.grad_clip)
        self.process = ProcessModel(self.config, model_path, model_config, own)
        self.learners = {"process": self.process}
        self.pad_id = pad_id

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """Set each token's return to the outcome. SharedFailure for a reward outside [0, 1]."""
        batch = super().collect(draw)
        self._metrics = {}
        outside = max((max(-sample.reward, sample.reward - 1) for sample in batch.samples), default=0.0)
        if (by := agree.largest(outside)) > 0:
            raise SharedFailure(f"algorithm.recipe process-reward: want rewards in [0, 1]; got one {by:g} outside")
        for sample in batch.samples:
            sample.returns = [sample.reward] * len(sample.response)
        return batch

    def credit(self, batch: Batch) -> None:
        """Set the advantages, from scores of the reward model in its current state. Collective."""
        samples = batch.samples
        scores = by_sample(samples, self.process.score, self.config, self.pad_id, self.process.device)
        largest = agree.largest(max((_largest_return(score) for score in scores), default=0.0))
        groups: dict[int, list[int]] = {}
        for i, sample in enumerate(samples):
            groups.setdefault(sample.group, []).append(i)
        advantages = list(scores)
        for members in groups.values():
            rewards = [samples[i].reward for i in members]
            worth = process_advantages(rewards, [scores[i].double() / (largest + EPSILON) for i in members])
            for i, advantage in zip(members, worth, strict=True):
                advantages[i] = advantage
        for sample, advantage in zip(samples, whitened(advantages), strict=True):
            sample.advantage = advantage.tolist()
        self._metrics |= _score_metrics(samples, scores)

    def fit(self, batch: Batch, count: Callable[[bool], None]) -> None:
        """Train on each of the policy's mini-batches once. Collective."""
        process = self.process
        mini_batches = (
            mean_batches(update.samples, self.config, self.pad_id, process.device, of="sequences")
            for update in self.updates(batch)
        )
        self._metrics |= fit("process", process, mini_batches, partial(process.learn, beta=self.options.beta), count)

    def metrics(self) -> Metrics:
        return self._metrics


def _largest_return(score: Tensor) -> float:
    """The largest absolute value of a response's sums of scores from a token to the end."""
    return float(score.double().flip(0).cumsum(0).abs().max())


def _score_metrics(samples: Sequence[Sample], scores: Sequence[Tensor]) -> Metrics:
    """Metrics: the mean score of a token, and the share of responses whose sum has the sign of their outcome."""
    totals = [float(score.double().sum()) for score in scores]
    right = sum((total > 0) == (sample.reward > 0.5) for total, sample in zip(totals, samples, strict=True))
    return {
        "process/score": (sum(totals), sum(len(score) for score in scores)),
        "process/accuracy": (right, len(samples)),
    }
