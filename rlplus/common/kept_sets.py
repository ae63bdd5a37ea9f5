"""The tokens that a sampler kept for each token of a response: the support of the distribution it was drawn from."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np

_ids = partial(array, "i")


@dataclass
class KeptSets:
    """A set per token of a response, in 4 bytes per token id.

    counts: the size of each set; 0 = the whole vocabulary, as for a token that was not sampled. tokens: the sets' token
    ids, one set after the other.
    """

    counts: "array[int]" = field(default_factory=_ids)
    tokens: "array[int]" = field(default_factory=_ids)

    @classmethod
    def of(cls, sets: Iterable[Sequence[int]]) -> Self:
        """From one sequence of token ids per token of the response."""
        kept = cls()
        for each in sets:
            kept.counts.append(len(each))
            kept.tokens.extend(each)
        return kept

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, ids: bytes) -> None:
        """Append a set, given as int32."""
        self.counts.append(len(ids) // self.tokens.itemsize)
        self.tokens.frombytes(ids)

    def skip(self, count: int) -> None:
        """Append so many tokens without a set."""
        self.counts.extend([0] * count)

    def extend(self, other: Self) -> None:
        self.counts.extend(other.counts)
        self.tokens.extend(other.tokens)

    def fault(self, response: Sequence[int], sampled: Sequence[bool] | None = None) -> str | None:
        """The first thing wrong with these sets for a response; None if nothing is.

        sampled: whether each token was; None = all were. Each sampled token is in its set.
        """
        counts = np.asarray(self.counts, dtype=np.int64)
        if len(counts) != len(response) or (counts < 0).any() or counts.sum() != len(self.tokens):
            return f"{len(counts)} sets of {counts.sum()} tokens together in a list of {len(self.tokens)}"
        own = np.asarray(self.tokens) == np.repeat(np.asarray(response), counts)
        missing = np.bincount(np.repeat(np.arange(len(counts)), counts)[own], minlength=len(counts)) != 1
        if sampled is not None:
            missing &= np.asarray(sampled, dtype=bool) | (counts > 0)
        if not missing.any():
            return None
        first = int(missing.argmax())
        start = int(counts[:first].sum())
        kept = self.tokens[start : start + int(counts[first])].tolist()
        return f"{kept[:8]}{' ...' if len(kept) > 8 else ''} for token {response[first]}, number {first + 1}"
