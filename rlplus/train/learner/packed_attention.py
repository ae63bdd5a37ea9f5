"""transformers' `sdpa` over packed sequences, each on its own: no mask, and no work between sequences.

From restarting positions transformers makes a mask of (L, L) for each row, under which `sdpa` computes all L² products
and cannot take its flash kernels. Here each sequence is an attention of its own, causal and without a mask. Sequences
of about the same length are one call, padded at their ends, because a call for each took more time than its products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "sdpa"  # the name is kept: transformers treats some names specially
PADDED = 1.25  # times the products of a group's sequences that it has with its padding, at most; so for its tokens, too
LONG_ROW = 1024  # tokens of a row from which it is done; in shorter ones a mask costs no more


class _Places(NamedTuple):
    """Every group's tokens as places among the tokens of all rows, one group after the other: shapes are (sequences,
    longest), and a shorter sequence repeats its last token. back: the place among these of each row's token."""

    tokens: Tensor
    shapes: tuple[tuple[int, int], ...]
    back: Tensor


@dataclass
class Spans:
    """The lengths of the sequences in each row, padding at its end included; they add up to the row's length.

    A model's argument, which hands it on to its attention. taken: the number of layers that it has come to.
    """

    rows: tuple[tuple[int, ...], ...]
    taken: int = 0
    _places: _Places | None = None

    def places(self, device: torch.device) -> _Places:
        """The same for every layer."""
        if self._places is None:
            found = []
            shapes = []
            back = torch.empty(sum(map(sum, self.rows)), dtype=torch.long)
            count = 0
            for group in _groups([length for row in self.rows for length in row]):
                start, length = torch.tensor(group).T[:, :, None]
                column = torch.arange(group[0][1])
                each = start + torch.minimum(column, length - 1)
                real = column < length
                back[each[real]] = count + real.flatten().nonzero().flatten()
                found.append(each.flatten())
                shapes.append((len(group), len(column)))
                count += each.numel()
            self._places = _Places(torch.cat(found).to(device), tuple(shapes), back.to(device))
        return self._places


def _groups(lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Sequences of about the same length: first token, counted over all rows, and length, the longest first."""
    groups: list[list[tuple[int, int]]] = []
    products = 0
    for start, length in sorted(zip(accumulate(lengths, initial=0), lengths, strict=False), key=lambda s: -s[1]):
        if not groups or (len(groups[-1]) + 1) * groups[-1][0][1] ** 2 > PADDED * (products + length**2):
            groups.append([])
            products = 0
        groups[-1].append((start, length))
        products += length**2
    return groups


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
    causal = getattr(module, "is_causal", True) if options.get("is_causal") is None else options["is_causal"]
    if attention_mask is not None or not causal:
        return _one_by_one(core, spans, module, (query, key, value), attention_mask, *args, **options)
    tokens, shapes, back = spans.places(query.device)
    whole = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if len(back) != len(whole[0]):
        raise ValueError(f"want lengths of {len(whole[0])} tokens, the rows'; got {len(back)}")
    # One selection and `split`: in the backward pass a selection for each group would make zeros of the whole's size.
    groups = zip(*(x.index_select(0, tokens).split([n * longest for n, longest in shapes]) for x in whole), strict=True)
    found = []
    for shape, parts in zip(shapes, groups, strict=True):  # the padding is at the end, where no token attends to it
        own = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        found.append(core(module, *own, None, *args, **options)[0].flatten(0, 1))
    return torch.cat(found).index_select(0, back).unflatten(0, (len(query), -1))


def _one_by_one(
    core: Callable[..., tuple[Tensor, Any]],
    spans: Spans,
    module: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> Tensor:
    rows = []
    count = len(inputs[0])
    masks = [None] * count if mask is None else mask.expand(count, -1, -1, -1).unbind()
    # Not by slices: in the backward pass each of them would be padded with zeros to the size of the whole.
    for lengths, whole, *qkv in zip(spans.rows, masks, *(x.unbind() for x in inputs), strict=True):
        apart = []
        begin = 0
        for parts in zip(*(each.split(lengths, 1) for each in qkv), strict=True):
            own = slice(begin, begin := begin + parts[0].shape[1])
            each = (part[None] for part in parts)
            square = None if whole is None else whole[None, :, own, own]
            apart.append(core(module, *each, square, *args, **options)[0])
        rows.append(torch.cat(apart, 1))
    return torch.cat(rows)
