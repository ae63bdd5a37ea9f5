"""Columns with something for each token of a demonstration: its author's logprobs, a teacher's likeliest tokens."""

from array import array
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from rlplus.config.data_section import DataConfig
from rlplus.data.row_files import MissingColumn, Row, get_column, row_names

EXCESS = 1e-3  # largest excess of a sum of probabilities over 1: logprobs are rounded


def holds_several(demonstration: Any) -> bool:
    """Whether the column has several; a list of one dict is a chat message."""
    return isinstance(demonstration, list) and not (len(demonstration) == 1 and isinstance(demonstration[0], dict))


def of_each(column: str | None, where: str, row: Row, value: Any, count: int) -> list[Any]:
    """The column's value for each of `count` demonstrations, given the `value` of the demonstration column."""
    if column is None or value is None:
        return [None] * count
    try:
        found = get_column(row, column)
    except KeyError:
        raise MissingColumn(where, column, row_names(row)) from None
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


def topk_pair(
    config: DataConfig, where: str, value: Any, demonstration: Sequence[int] | None, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Tokens (T, k) int32 and logprobs float32 of the demonstration's T places; None without one or a column.

    sizes: of the vocabulary, and k, which is 0 if it may be any.
    """
    if config.teacher_topk is None or demonstration is None:
        return None
    (vocabulary, k), places = sizes, len(demonstration)
    column, each = config.teacher_topk, f"each {places} lists of {k or 'k'} numbers"
    wanted = f"{where}: want {column!r} as {{tokens, logprobs}}, {each}"
    try:
        tokens = torch.tensor(value["tokens"], dtype=torch.float64)
        known = torch.tensor(value["logprobs"], dtype=torch.float64)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{wanted}; got {str(value)[:80]} ({error})") from error
    if tokens.shape != known.shape or tokens.shape != (places, k or tokens.shape[-1] or 1):
        got = f"{tuple(tokens.shape)} and {tuple(known.shape)}"
        raise ValueError(f"{wanted}, one list per token (the end token is one; response_prefix is none); got {got}")
    once = (tokens.sort().values.diff() != 0).all(1)
    inside = ((tokens >= 0) & (tokens < vocabulary) & (tokens == tokens.floor())).all(1)
    possible = (known <= 0).all(1) & (known > -inf).all(1) & (known.exp().sum(1) <= 1 + EXCESS)
    for right, what in (
        (inside & once, f"different tokens below {vocabulary}"),
        (possible, "finite logprobs of probabilities that add up to at most 1"),
    ):
        if not right.all():
            place = int(right.logical_not().nonzero()[0])
            came = list(zip(tokens[place].tolist(), known[place].tolist(), strict=True))
            raise ValueError(f"{wanted}, {what}; got {str(came)[:80]} at place {place}")
    return tokens.to(torch.int32), known.float()
