"""A causal LM called with packed sequences, without DeepSpeed: the trainer wraps it, the planner measures it."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlplus.loss.head.causal_lm import body_of, logit_transform
from rlplus.train.data import MicroBatch
from rlplus.train.learner.packed_attention import LONG_ROW, Spans, register, takes_spans
from rlplus.train.learner.routing_replay import RoutingReplay

if TYPE_CHECKING:
    from rlplus.train.learner.sequence import SequenceGroup


class PackedModel(nn.Module):
    """A causal LM called with packed sequences; only hidden states that predict a response token reach the head.

    The `forward` of the head is replaced, so that ZeRO-3's hooks on that module gather its weight around the fused op.
    `group`: the ranks that share each micro-batch with this one; it is then called with this rank's shard.
    gathers_head: False where the op has the head's rows itself (`ShardedHead`): ZeRO-3 gathers a weight as soon as code
    reads it. masks: whether sequences of a row are kept apart by a mask, or, where the model allows it, by an attention
    of their own; None = by the length of the rows. replay: whether a micro-batch's experts are replayed.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        group: "SequenceGroup | None",
        *,
        gathers_head: bool = True,
        masks: bool | None = None,
        replay: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.group = group
        self.gathers_head = gathers_head
        self.masks = masks
        self.replay = RoutingReplay(lm) if replay else None
        register()
        self.transform = logit_transform(lm)
        lm.get_output_embeddings().forward = MethodType(_fused_head, lm.get_output_embeddings())

    def forward(self, batch: MicroBatch, op: Callable[..., Any]) -> Any:
        config = self.lm.config
        spans = None
        if self.group is not None:
            inputs = self.group.inputs(batch, config, self.lm.dtype)
        else:
            inputs = batch.model_inputs(config._attn_implementation)
            spans = self._spans(batch)
        if spans is not None:
            # With a mask transformers looks for no restarts in the positions, and of one without holes it makes none of
            # its own, but for sliding windows.
            inputs |= {"attention_mask": torch.ones_like(batch.input_ids), "spans": spans}
        if self.replay is not None:
            self.replay.use(batch.experts)
        body = body_of(self.lm)(**inputs)
        if self.replay is not None and not torch.is_grad_enabled():
            self.replay.use(None)
        if spans is not None and not spans.taken:
            raise ValueError(
                f"want a model that hands on its arguments to transformers' sdpa, or model.attention eager; "
                f"{type(self.lm).__name__} does not, and packed sequences would see each other"
            )
        hidden = body.last_hidden_state.flatten(0, 1)[batch.rows]
        scale, softcap = self.transform
        op = partial(op, logit_scale=scale, logit_softcap=softcap)
        return self.lm.get_output_embeddings()(hidden, op) if self.gathers_head else op(hidden, None)

    def _spans(self, batch: MicroBatch) -> Spans | None:
        """The sequences of a micro-batch, if each is to have an attention of its own."""
        if not takes_spans(self.lm) or all(len(row) == 1 for row in batch.lengths):
            return None
        masks = batch.input_ids.shape[1] < LONG_ROW if self.masks is None else self.masks
        return None if masks else Spans(batch.lengths)


def _fused_head(head: nn.Linear, hidden: Tensor, op: Callable[..., Any]) -> Any:
    return op(hidden, head.weight, bias=head.bias)
