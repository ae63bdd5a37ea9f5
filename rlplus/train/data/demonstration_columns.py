"""Columns with something for each token of a demonstration: its author's logprobs, a teacher's likeliest tokens."""

from array import array
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.objective.divergence import EXCESS
from rlplus.train.config.data_section import DataConfig
from rlplus.train.data.row_files import Row, required_column

LARGEST = 2**31  # tokens are int32

Topk = tuple[Tensor, Tensor]  # tokens (T, k) int32 at each place of a demonstration, and their logprobs, float32


def holds_several(demonstration: Any) -> bool:
    """Whether the column has several; a list of one dict is a chat message."""
    return isinstance(demonstration, list) and not (len(demonstration) == 1 and isinstance(demonstration[0], dict))


def of_each(column: str | None, where: str, row: Row, value: Any, count: int) -> list[Any]:
    """The column's value for each of `count` demonstrations, given the `value` of the demonstration column."""
    if column is None or value is None:
        return [None] * count
    found = required_column(where, row, column)
    if not holds_several(value) or not value:
        return [found]
    if found is None:
        return [None] * count
    if not isinstance(found, list) or len(found) != count:
        came = f"{len(found)}" if isinstance(found, list) else str(found)[:80]
        raise ValueError(f"{where}: want {column!r} a list of {count}, one per demonstration; got {came}")
    return found


def logprobs(
    config: DataConfig, where: str, values: Any, demonstration: Sequence[int] | None
) -> Sequence[float] | None:
    """As many as the demonstration has tokens; None without a demonstration or a column."""
    if config.behavior_logprob is None or demonstration is None:
        return None
    tokens = len(demonstration)
    wanted = (
        f"{where}: want {config.behavior_logprob!r} a list of {tokens} logprobs, one per token of the demonstration"
    )
    if not isinstance(values, list):
        raise ValueError(f"{wanted}; got {str(values)[:80]}")
    if len(values) != tokens:
        raise ValueError(f"{wanted} (the end token is one; response_prefix is none); got {len(values)}")
    for place, value in enumerate(values):
        if not isinstance(value, int | float) or isinstance(value, bool) or not -inf < value <= 0:
            raise ValueError(f"{wanted}, finite and at most 0; got {value!r} at place {place}")
    return array("f", values)


def topk_pair(column: str | None, where: str, value: Any) -> Topk | None:
    """Tokens and logprobs (T, k) of a demonstration's places; None for a null or without a column."""
    if column is None or value is None:
        return None
    wanted = f"{where}: want {column!r} as {{tokens, logprobs}}, each a list of k numbers for each token"
    try:
        tokens = torch.tensor(value["tokens"], dtype=torch.float64)
        known = torch.tensor(value["logprobs"], dtype=torch.float64)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{wanted}; got {str(value)[:80]} ({error})") from error
    if tokens.shape != known.shape or tokens.ndim != 2 or not tokens.numel():
        raise ValueError(f"{wanted}; got {tuple(tokens.shape)} and {tuple(known.shape)}")
    once = (tokens.sort().values.diff() != 0).all(1)
    whole = ((tokens >= 0) & (tokens < LARGEST) & (tokens == tokens.floor())).all(1)
    possible = (known <= 0).all(1) & (known > -inf).all(1) & (known.exp().sum(1) <= 1 + EXCESS)
    for right, what in (
        (whole & once, "different tokens"),
        (possible, "finite logprobs of probabilities that add up to at most 1"),
    ):
        if not right.all():
            place = int(right.logical_not().nonzero()[0])
            came = list(zip(tokens[place].tolist(), known[place].tolist(), strict=True))
            raise ValueError(f"{wanted}, {what}; got {str(came)[:80]} at place {place}")
    return tokens.to(torch.int32), known.float()


def fitting(
    column: str | None, where: str, pair: Topk | None, demonstration: Sequence[int] | None, vocabulary: int, k: int
) -> Topk | None:
    """`pair`, which has the demonstration's places and `k` tokens below `vocabulary` at each; k = 0: any number."""
    if column is None or demonstration is None:
        return None
    places = len(demonstration)
    wanted = f"{where}: want {column!r} with {k or 'k'} tokens at each of {places} places"
    if pair is None:
        raise ValueError(f"{wanted}; got None")
    if pair[0].shape != (places, k or pair[0].shape[1]):
        got = f"{pair[0].shape[1]} at {len(pair[0])}"
        raise ValueError(f"{wanted} (the end token has one; response_prefix has none); got {got}")
    if (largest := int(pair[0].max())) >= vocabulary:
        raise ValueError(f"{wanted}, of the {vocabulary} of the run's tokenizer; got token {largest}")
    return pair
