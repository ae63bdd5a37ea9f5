"""The values of response tokens: what each is in a sample, on its way to another rank, and in a micro-batch.

A value for each token that a feature adds is a row of COLUMNS and a field of `Sample`; where the loss reads it, of
`MicroBatch`, too. Sets, experts and a teacher's tokens, of which a token has several, have functions of their own.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlplus.common.kept_sets import KeptSets

if TYPE_CHECKING:
    from rlplus.train.data.packing import Sample

Value = TypeVar("Value", bool, float)


class Column(NamedTuple):
    """A kind of value of each token.

    - `code`: the `array` that another rank is sent
    - `dtype`: in a micro-batch, which has NaN where a sample has None; without one it has no such column
    - `whole`: a micro-batch has the column only if all samples have values
    """

    code: str
    dtype: torch.dtype | None = None
    whole: bool = False


COLUMNS = {
    "external": Column("b", torch.bool),
    "trained": Column("b"),  # in the weights
    "advantage": Column("d", torch.float32),
    "engine_logprob": Column("d", torch.float32),
    "behavior_logprob": Column("d", torch.float32),
    "token_reward": Column("d"),  # in advantages or returns
    "value": Column("f", torch.float32, whole=True),
    "returns": Column("f", torch.float32, whole=True),
}
TOKENS = ("prompt", "response", "teacher_prompt")


def per_token(value: Value | Sequence[Value], tokens: int) -> Iterable[Value]:
    """One value per token: the given ones, or the same one repeated."""
    return repeat(value, tokens) if isinstance(value, float | int) else value


def check_columns(where: str, sample: "Sample") -> None:
    """ValueError unless the sample has as many values as tokens of its response, or one for all."""
    response = len(sample.response)
    for name in COLUMNS:
        values = getattr(sample, name)
        if not isinstance(values, float | int | None) and len(values) != response:
            raise ValueError(f"{where}: want {response} {name}; got {len(values)}")
    if sample.kept is not None and len(sample.kept) != response:
        raise ValueError(f"{where}: want {response} kept sets; got {len(sample.kept)}")
    if any(len(part) != response for part in sample.teacher_topk or ()):
        raise ValueError(f"{where}: want a teacher's tokens at {response} places; got others")


def compact(sample: "Sample") -> "Sample":
    """The same values as arrays, a third of the pickled size of lists and much faster to send."""
    codes = {name: column.code for name, column in COLUMNS.items()} | dict.fromkeys(TOKENS, "i")
    values: Mapping[str, Any] = {name: getattr(sample, name) for name in codes}
    arrays: dict[str, Any] = {n: array(codes[n], v) for n, v in values.items() if isinstance(v, Sequence)}
    return replace(sample, **arrays)


def joined(values: Sequence[Any], lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of all responses, one after the other (N,); None is NaN."""
    known = [nan if value is None else value for value in values]
    return torch.tensor([*chain(*map(per_token, known, lengths))], dtype=dtype)


def joined_columns(samples: Sequence["Sample"]) -> dict[str, Any]:
    """The fields of a micro-batch of these samples that have a value for each token, in order of tokens."""
    lengths = [len(sample.response) for sample in samples]
    found: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        values = [getattr(sample, name) for sample in samples]
        if column.dtype is not None and not (column.whole and None in values):
            found[name] = joined(values, lengths, column.dtype)
    if topk := [sample.teacher_topk for sample in samples if sample.teacher_topk is not None]:
        found["teacher_topk"] = tuple(torch.cat(parts) for parts in zip(*topk, strict=True))
    return found | _joined_sets(samples)


def _joined_sets(samples: Sequence["Sample"]) -> dict[str, Tensor]:
    """`kept_counts` and `kept_tokens`, if any sample has them; a sample without has the whole vocabulary."""
    if all(sample.kept is None for sample in samples):
        return {}
    all_sets = KeptSets()
    for sample in samples:
        if sample.kept is None:
            all_sets.skip(len(sample.response))
        else:
            all_sets.extend(sample.kept)
    return {
        f"kept_{name}": torch.from_numpy(np.array(values, dtype=np.int32)) for name, values in vars(all_sets).items()
    }
