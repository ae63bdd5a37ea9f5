"""transformers' `sdpa` over packed sequences, each on its own: no mask, and no work between sequences.

From restarting positions transformers makes a mask of (L, L) for each row, under which `sdpa` computes all L² products
and cannot take its flash kernels. Here each sequence is an attention of its own, causal and without a mask. Sequences
of about the same length are one call, padded at their ends, because a call for each took more time than its products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "sdpa"  # the name is kept: transformers treats some names specially
PADDED = 1.25, 64  # a group's longest sequence has at most so many times a shorter one's tokens, and so many more
LONG_ROW = 1024  # tokens of a row from which it is done; in shorter ones a mask costs less than many small calls


@dataclass
class Spans:
    """The lengths of the sequences in each row, padding at its end included; they add up to the row's length.

    A model's argument, which hands it on to its attention. taken: the number of layers that it has come to.
    """

    rows: tuple[tuple[int, ...], ...]
    taken: int = 0
    _places: tuple[list[Tensor], Tensor] | None = None

    @cached_property
    def _groups(self) -> list[list[tuple[int, int]]]:
        """Sequences of about the same length: first token, counted over all rows, and length, the longest first."""
        lengths = [length for row in self.rows for length in row]
        groups: list[list[tuple[int, int]]] = []
        for start, length in sorted(zip(accumulate(lengths, initial=0), lengths, strict=False), key=lambda s: -s[1]):
            if not groups or groups[-1][0][1] > PADDED[0] * length + PADDED[1]:
                groups.append([])
            groups[-1].append((start, length))
        return groups

    def places(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """The places of each group's tokens (sequences, longest), counted over all rows, where a shorter sequence
        repeats its last one; and for each row's token (tokens,) its place, counted over all groups."""
        if self._places is None:
            groups, back, count = [], torch.empty(sum(map(sum, self.rows)), dtype=torch.long), 0
            for group in self._groups:
                start, length = torch.tensor(group).T[:, :, None]
                groups.append(start + torch.minimum(torch.arange(group[0][1]), length - 1))
                for number, (first, own) in enumerate(group):
                    begin = count + number * group[0][1]
                    back[first : first + own] = torch.arange(begin, begin + own)
                count += groups[-1].numel()
            self._places = [places.to(device) for places in groups], back.to(device)
        return self._places


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
    """(R, heads, L, D) each -> (R, L, heads, D), by `core` for each group of sequences; with a mask, for each sequence.

    attention_mask, such as a sliding window's: (R or 1, heads or 1, L, L), of which each sequence gets its square.
    """
    if attention_mask is not None:
        return _one_by_one(core, spans, module, (query, key, value), attention_mask, *args, **options)
    groups, back = spans.places(query.device)
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    found = []
    for places in groups:  # a causal attention never comes to the padding, which is at the end
        parts = (x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2) for x in tokens)
        found.append(core(module, *parts, None, *args, **options)[0].flatten(0, 1))
    together = found[0] if len(found) == 1 else torch.cat(found)
    return together.index_select(0, back).unflatten(0, (len(query), -1))


def _one_by_one(
    core: Callable[..., tuple[Tensor, Any]],
    spans: Spans,
    module: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    masks, rows = mask.expand(len(inputs[0]), -1, -1, -1).unbind(), []
    # Not by slices: in the backward pass each of them would be padded with zeros to the size of the whole.
    for lengths, square, *qkv in zip(spans.rows, masks, *(x.unbind() for x in inputs), strict=True):
        apart, begin = [], 0
        for parts in zip(*(each.split(lengths, 1) for each in qkv), strict=True):
            own = slice(begin, begin := begin + parts[0].shape[1])
            each = (part[None] for part in parts)
            apart.append(core(module, *each, square[None, :, own, own], *args, **options)[0])
        rows.append(torch.cat(apart, 1))
    return torch.cat(rows)
