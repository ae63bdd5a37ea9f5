"""transformers' `sdpa` over packed sequences, one after the other: no mask, and no work between sequences.

From restarting positions transformers makes a mask of (L, L) for each row, under which `sdpa` computes all L² products
and cannot take its flash kernels. Here each sequence is an attention of its own, causal and without a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "sdpa"  # the name is kept: transformers treats some names specially
LONG_ROW = 1024  # tokens of a row from which it is done; in shorter ones a mask costs less than many small calls


@dataclass
class Spans:
    """The lengths of the sequences in each row, padding at its end included; they add up to the row's length.

    A model's argument, which hands it on to its attention. taken: the number of layers that it has come to.
    """

    rows: tuple[tuple[int, ...], ...]
    taken: int = 0


def takes_spans(lm: PreTrainedModel) -> bool:
    """Whether the model's attention is `sdpa`, and gets what arguments the model does not know."""
    return lm.config._attn_implementation == NAME and bool(lm._supports_attention_backend)


def register() -> None:
    """Make transformers' `sdpa` look for `Spans`; nothing changes for a model that is called without."""
    core = AttentionInterface()[NAME]
    if hasattr(core, "takes_spans"):
        return

    @wraps(core)
    def attend(*args: Any, spans: Spans | None = None, **options: Any) -> tuple[Tensor, Any]:
        if spans is None:
            whole: tuple[Tensor, Any] = core(*args, **options)
            return whole
        spans.taken += 1
        return attend_apart(core, spans, *args, **options), None

    attend.takes_spans = True  # type: ignore[attr-defined]
    AttentionInterface.register(NAME, attend)


def attend_apart(
    core: Callable[..., tuple[Tensor, Any]],
    spans: Spans,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """(R, heads, L, D) each -> (R, L, heads, D), by `core` for each sequence.

    attention_mask, such as a sliding window's: (R or 1, heads or 1, L, L), of which each sequence gets its square.
    """
    masks = [None] * len(query) if attention_mask is None else attention_mask.expand(len(query), -1, -1, -1).unbind()
    rows = []
    # Not by slices: in the backward pass each of them would be padded with zeros to the size of the whole.
    for lengths, mask, *qkv in zip(spans.rows, masks, query.unbind(), key.unbind(), value.unbind(), strict=True):
        apart, begin = [], 0
        for parts in zip(*(each.split(lengths, 1) for each in qkv), strict=True):
            own = slice(begin, begin := begin + parts[0].shape[1])
            square = None if mask is None else mask[None, :, own, own]
            apart.append(core(module, *(part[None] for part in parts), square, *args, **options)[0])
        rows.append(torch.cat(apart, 1))
    return torch.cat(rows)
