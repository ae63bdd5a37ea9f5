"""A process reward model: a language model whose logprobs minus the reference's are token rewards."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from rlplus.loss import linear_logprob
from rlplus.train.algorithm import outcome_loss
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch
from rlplus.train.learner.learner import Optimization
from rlplus.train.learner.policy import Policy


class OutcomeLoss(NamedTuple):
    """Loss () of a micro-batch."""

    loss: Tensor


class ProcessModel(Policy):
    """Starts from the policy's initial weights, and keeps a frozen copy of them as its reference. It never samples."""

    def __init__(self, config: Config, model_path: str, model_config: PretrainedConfig, own: Optimization) -> None:
        super().__init__(config, model_path, model_config, own, reference=True, temperature=1.0)

    def score(self, batch: MicroBatch) -> Tensor:
        """log pi_phi - log pi_ref (N,) of the batch's targets."""
        return self.logprob(batch) - self.logprob(batch, reference=True)

    def learn(self, batches: Sequence[MicroBatch], beta: float) -> list[OutcomeLoss]:
        """`backward` of the outcome loss; the outcomes are the batches' `returns`."""
        return self.backward(batches, partial(self._outcome_op, beta, dist.get_world_size()))

    def _outcome_op(self, beta: float, ranks: int, batch: MicroBatch) -> Callable[..., OutcomeLoss]:
        reference = self.logprob(batch, reference=True)
        outcome = batch.returns
        assert outcome is not None, "want samples with returns"
        weight = batch.token_weight * ranks  # DeepSpeed averages gradients over ranks, the weights are global already

        def op(hidden: Tensor, head_weight: Tensor, **head: Any) -> OutcomeLoss:
            logprob, _ = linear_logprob(hidden, head_weight, **head, backward="exact", **self.head_options(batch))
            return OutcomeLoss(outcome_loss(logprob - reference, outcome, weight, batch.sequence, beta))

        return op
