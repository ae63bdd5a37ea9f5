"""A causal LM called with packed sequences, without DeepSpeed: the trainer wraps it, the planner measures it."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlplus.data import MicroBatch
from rlplus.loss.causal_lm import body_of, logit_transform

if TYPE_CHECKING:
    from rlplus.learner.sequence import SequenceGroup


class PackedModel(nn.Module):
    """A causal LM called with packed sequences; only hidden states that predict a response token reach the head.

    The `forward` of the head is replaced, so that ZeRO-3's hooks on that module gather its weight around the fused op.
    `group`: the ranks that share each micro-batch with this one; it is then called with this rank's shard.
    gathers_head: False where the op has the head's rows itself (`ShardedHead`): ZeRO-3 gathers a weight that is as much
    as looked at.
    """

    def __init__(self, lm: PreTrainedModel, group: "SequenceGroup | None", *, gathers_head: bool = True) -> None:
        super().__init__()
        self.lm, self.group, self.gathers_head = lm, group, gathers_head
        self.transform = logit_transform(lm)
        lm.get_output_embeddings().forward = MethodType(_fused_head, lm.get_output_embeddings())

    def forward(self, batch: MicroBatch, op: Callable[..., Any]) -> Any:
        config = self.lm.config
        if self.group is None:
            inputs = batch.model_inputs(config._attn_implementation)
        else:
            inputs = self.group.inputs(batch, config, self.lm.dtype)
        body = body_of(self.lm)(**inputs)
        hidden = body.last_hidden_state.flatten(0, 1)[batch.rows]
        scale, softcap = self.transform
        op = partial(op, logit_scale=scale, logit_softcap=softcap)
        return self.lm.get_output_embeddings()(hidden, op) if self.gathers_head else op(hidden, None)


def _fused_head(head: nn.Linear, hidden: Tensor, op: Callable[..., Any]) -> Any:
    return op(hidden, head.weight, bias=head.bias)
