"""The bytes that a forward and backward pass keeps, counted on tensors without memory.

The trainer's `PackedModel` runs on torch's meta device under a mode that adds up the live storages. So there is no
formula from which a model family could deviate: gradient checkpointing, tied embeddings, repeated keys and the tensors
saved by autograd come from the installed transformers. Two parts are stand-ins with the same inputs, outputs and
saved tensors: the attention kernel and the head's fused loss, whose scratch `memory` adds.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlplus.loss.head.causal_lm import body_of
from rlplus.train.data import MicroBatch
from rlplus.train.learner.packed_model import LONG_ROW, PackedModel
from rlplus.train.rollout import whole_model

COUNTED = "rlplus_counted"  # the name under which transformers finds the stand-in for the attention kernel


@dataclass(frozen=True)
class Activations:
    """Bytes beyond weights and kept gradients. head: when the head starts, its input included. backward: at most, from
    then on; the gradients of the head's input, of its weight and of one parameter at a time are among them."""

    head: int
    backward: int


class Meter(TorchDispatchMode):
    """Bytes of live storages made by the operations inside, minus `known` ones that were freed since.

    peak: the maximum at any moment.
    """

    def __init__(self, *, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: set[int] = set()
        for tensor in known:
            self._add(tensor.untyped_storage())
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._storages:
            self._storages.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.live -= size


def meta_model(config: PretrainedConfig, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model on the meta device: shapes, tied weights and parameter count are the real ones."""
    with whole_model(), torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
    return lm


def count_activations(
    lm: PreTrainedModel,
    *,
    rows: int,
    length: int,
    attention: str,
    checkpointing: bool,
    ranks: int = 1,
    head_in_shards: bool = False,
    compiled: bool = False,
) -> Activations:
    """One micro-batch of rows x length packed tokens, each of which is a response token, through a `meta_model`.

    attention: "sdpa", "eager" or "flash_attention_2". Those that need a mask for packed rows are charged with it: sdpa
    in short rows, between ranks, if compiled, and in models with sliding windows.
    ranks: so many share the rows (sequence_parallel): a rank has all heads of its columns, in the attention some heads
    of all columns, as many bytes; a mask is of all columns.
    head_in_shards: without the gradient of its weight.
    """
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        lm.gradient_checkpointing_disable()
    lm.train()
    model = PackedModel(lm, None)
    hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in model.parameters() if p.requires_grad]
    meter = Meter(known=[*model.parameters(), *model.buffers()])
    at_head = 0

    def head(hidden: Tensor, weight: Tensor, **_: object) -> Tensor:
        nonlocal at_head
        at_head = meter.live
        meter.peak = meter.live
        return _Head.apply(hidden, weight.detach() if head_in_shards else weight)

    batch = _batch(rows, -(-length // ranks))
    if attention == "sdpa" and length >= LONG_ROW and ranks == 1 and not compiled and _without_windows(lm, length):
        attention = "flash_attention_2"  # the same tensors
    with meter:
        mask = _mask(lm, rows, length, attention)  # alive from the first layer's forward to its backward
        with _counted_attention(lm, attention, mask):
            model(batch, head).backward()
        del mask
    for hook in hooks:
        hook.remove()
    return Activations(head=at_head, backward=meter.peak)


def _without_windows(lm: PreTrainedModel, length: int) -> bool:
    """Whether the model attends to each packed sequence of such rows on its own, without a mask."""
    config = lm.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    local = {*(getattr(config, "layer_types", None) or [])} - {"full_attention", "linear_attention"}
    masked = length >= (window or 0) if local else window is not None and length >= window
    return bool(lm._supports_attention_backend) and not masked


def count_inference(lm: PreTrainedModel, *, rows: int, length: int, attention: str) -> int:
    """Bytes that a pass over rows x length tokens takes at most, without gradients, beyond kept keys and values."""
    lm.eval()
    meter = Meter(known=[*lm.parameters(), *lm.buffers()])
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), meter:
        mask = _mask(lm, rows, length, attention)
        with _counted_attention(lm, attention, mask):
            body_of(lm)(input_ids=ids, position_ids=ids, use_cache=False)
    return meter.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None  # a gradient that is kept is counted elsewhere


def _batch(rows: int, length: int) -> MicroBatch:
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    tokens = torch.zeros(rows * length, dtype=torch.int64, device="meta")
    value = torch.zeros(rows * length, device="meta")
    return MicroBatch(ids, ids, tokens, tokens, value, value, value, value, value, tokens, rows * length)


def _mask(lm: PreTrainedModel, rows: int, length: int, attention: str) -> Tensor | None:
    """The mask that keeps packed sequences apart in transformers: bool for sdpa, numbers for eager, none for flash."""
    if attention == "flash_attention_2":
        return None
    return torch.empty(rows, 1, length, length, dtype=torch.bool if attention == "sdpa" else lm.dtype, device="meta")


class _Head(torch.autograd.Function):
    """A stand-in for the fused loss: computes the gradients of hidden (N, H) and weight (V, H) at once, keeps them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        kept = zip((hidden, weight), ctx.needs_input_grad, strict=True)
        ctx.save_for_backward(*(torch.empty_like(tensor) if need else None for tensor, need in kept))
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors


class _Attention(torch.autograd.Function):
    """A stand-in for flash and memory-efficient kernels: saves inputs, output and a logsumexp per row and head.

    query (B, heads, L, D), key and value (B, key heads, L, D), mask (B, 1, L, L) or None. Dao, FlashAttention-2, 2023.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return *(torch.empty_like(saved) for saved in ctx.saved_tensors[:3]), None


def _flash(mask: Tensor | None, module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _Attention.apply(query, key, value, None)


def _sdpa(mask: Tensor | None, module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with a mask: transformers repeats the keys, and torch turns the mask into the query's dtype."""
    assert mask is not None
    groups = getattr(module, "num_key_value_groups", 1)
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    return _Attention.apply(query, key, value, torch.empty_like(mask, dtype=query.dtype))


def _eager(mask: Tensor | None, module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    assert mask is not None
    groups = getattr(module, "num_key_value_groups", 1)
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * 1.0 + mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)


ATTENTIONS = {"flash_attention_2": _flash, "sdpa": _sdpa, "eager": _eager}


@contextmanager
def _counted_attention(lm: PreTrainedModel, attention: str, mask: Tensor | None) -> Iterator[None]:
    """Register the stand-in: transformers makes no mask, which fails on the meta device, for an unknown attention."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        output = ATTENTIONS[attention](mask, module, query, key, value)
        return output.transpose(1, 2).contiguous(), None

    before = lm.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(COUNTED, attend)
    lm.config._attn_implementation = COUNTED
    try:
        yield
    finally:
        lm.config._attn_implementation = before
