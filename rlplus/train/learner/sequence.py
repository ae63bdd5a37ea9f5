"""Sequence parallelism (DeepSpeed-Ulysses).

Each of s neighbouring ranks has L / s columns of a micro-batch's rows. Around the attention,
and only there, all-to-all exchanges turn "all heads of some columns" into "some heads of all columns" and back.
"""

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from rlplus.common import agree
from rlplus.train.data import MicroBatch


class SequenceGroup:
    """The `size` neighbouring ranks that share each sequence with this one; all ranks construct it."""

    def __init__(self, size: int, model_config: PretrainedConfig, attention: str) -> None:
        world = dist.get_world_size()
        counts = {
            "ranks": world,
            "attention heads": model_config.num_attention_heads,
            "key and value heads": getattr(model_config, "num_key_value_heads", model_config.num_attention_heads),
        }
        for kind, count in counts.items():
            if count % size:
                raise ValueError(f"want train.sequence_parallel a divisor of the {count} {kind}; got {size}")
        if "sliding_attention" in getattr(model_config, "layer_types", ()):
            kind = model_config.model_type
            raise ValueError(f"train.sequence_parallel: want a model without sliding windows; got {kind} with some")
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        self.size = size
        self.group = groups[dist.get_rank() // size]
        _register(attention)

    def inputs(self, batch: MicroBatch, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
        """The model's arguments for a shard of a micro-batch: its columns, and what attention to all columns needs."""
        whole = batch.whole_position_ids
        assert whole is not None
        inputs = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": None,
            "use_cache": False,
            "sequence_group": self.group,
        }
        if config._attn_implementation == "flash_attention_2":
            (start, _), (longest, _) = prepare_fa_kwargs_from_position_ids(whole)
            return inputs | dict(cu_seq_lens_q=start, cu_seq_lens_k=start, max_length_q=longest, max_length_k=longest)
        shape_only = torch.empty((*whole.shape, 1), dtype=dtype, device=whole.device)
        # None for rows of a single sequence: the model then makes none either, and sdpa is causal by default.
        mask = create_causal_mask(config, shape_only, None, None, whole)
        return inputs | {"attention_mask": mask}


def _register(attention: str) -> None:
    """Make transformers' attention of that name exchange heads for columns if it gets a `sequence_group`.

    The name is kept, because transformers treats some names specially ("flash_attention_2"); without a
    `sequence_group`, as in a rollout engine of the same process, nothing changes.
    """
    core = AttentionInterface()[attention]
    if hasattr(core, "exchanges_heads"):
        return

    @torch.compiler.disable
    def exchanged(module: Any, *qkv: Tensor, sequence_group: Any, **kwargs: Any) -> tuple[Tensor, None]:
        query, key, value = (_swap(t, sequence_group) for t in qkv[:3])  # (R, heads, columns, D)
        out = core(module, query, key, value, *qkv[3:], **kwargs)[0]  # (R, columns, heads, D)
        return _swap(out, sequence_group), None

    @wraps(core)
    def attend(*args: Any, sequence_group: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        if sequence_group is None:
            result: tuple[Tensor, Any] = core(*args, **kwargs)
            return result
        return exchanged(*args, sequence_group=sequence_group, **kwargs)

    attend.exchanges_heads = True  # type: ignore[attr-defined]
    AttentionInterface.register(attention, attend)


def _swap(x: Tensor, group: Any) -> Tensor:
    """Split dimension 1 over the group's ranks, and join their parts of dimension 2."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), 1))
    return torch.cat(_AllToAll.apply(parts, group).unbind(), 2)


class _AllToAll(torch.autograd.Function):
    """(ranks, ...) -> (ranks, ...): part i goes to rank i. It is its own transpose, hence its own backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return agree.exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None
