"""Models that recipes train beside the policy.

A value model: the language model's body with a head of width 1. A process reward model: a language model whose logprobs
minus the reference's are token rewards.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlplus.loss import linear_logprob
from rlplus.train.algorithm import outcome_loss, value_loss
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch
from rlplus.train.learner.learner import Learner, Optimization
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import add_value_head


class ValueLoss(NamedTuple):
    """Loss () of a micro-batch, and the values (N,) that it was computed from."""

    loss: Tensor
    value: Tensor


class ValueModel(Learner):
    """A critic: values the state before each response token, from the hidden state that predicts the token."""

    def load(self, model_path: str) -> PreTrainedModel:
        lm = super().load(model_path)
        add_value_head(lm, self.config.train.seed)
        return lm

    @torch.no_grad()
    def value(self, batch: MicroBatch) -> Tensor:
        """(N,) fp32, of the states before the batch's response tokens."""
        value: Tensor = self.engine(batch, _values)
        return value

    def accumulate(self, batches: Sequence[MicroBatch], clip: float) -> list[ValueLoss]:
        """`backward` of the value loss with targets `returns`, clipped around the batches' `value`."""
        return self.backward(batches, partial(_value_op, clip, dist.get_world_size()))


def _values(hidden: Tensor, weight: Tensor, **_: Any) -> Tensor:
    """Values in fp32: in bf16 one near 1 would have 8 bits. The model's logit scale and softcap do not apply."""
    return nn.functional.linear(hidden.float(), weight.float()).squeeze(-1)


def _value_op(clip: float, ranks: int, batch: MicroBatch) -> Callable[..., ValueLoss]:
    # DeepSpeed averages gradients over ranks, but the weights' denominators are global already.
    old_value = batch.value
    returns = batch.returns
    weight = batch.token_weight * ranks
    assert old_value is not None, "want samples that a critic has valued"
    assert returns is not None, "want samples with returns"

    def op(hidden: Tensor, head_weight: Tensor, **_: Any) -> ValueLoss:
        value = _values(hidden, head_weight)
        return ValueLoss(value_loss(value, old_value, returns, weight, clip), value.detach())

    return op


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
