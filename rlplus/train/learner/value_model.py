"""A value model: the language model's body with a head of width 1."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlplus.train.algorithm import value_loss
from rlplus.train.data import MicroBatch
from rlplus.train.learner.learner import Learner
from rlplus.train.learner.value_head import add_value_head


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
        return self.backward(batches, partial(_loss_op, clip, dist.get_world_size()))


def _values(hidden: Tensor, weight: Tensor, **_: Any) -> Tensor:
    """Values in fp32: in bf16 one near 1 would have 8 bits. The model's logit scale and softcap do not apply."""
    return nn.functional.linear(hidden.float(), weight.float()).squeeze(-1)


def _loss_op(clip: float, ranks: int, batch: MicroBatch) -> Callable[..., ValueLoss]:
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
