"""The experts that a mixture's routers chose for the tokens of a sequence: whole numbers (tokens, layers, k).

They begin with the prompt's first token, in the order in which a router gives them. A sequence may have fewer rows than
tokens: nothing is known of the others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Experts = np.ndarray[Any, Any]


def small_type(experts: int) -> Any:
    """The dtype of numbers below `experts`, whose largest number is no expert's: that is `unknown`."""
    return np.uint8 if experts <= 255 else np.int16


def joined(before: Experts | None, new: Experts) -> Experts:
    """Rows of a sequence that went on: those that it had, and from `new`, which has all of its tokens, the others.

    The tokens so far keep the experts of the weights that sampled them.
    """
    return new if before is None else np.concatenate([before, new[len(before) :]])


def fault(experts: Experts | None, prompt: int, response: int, trained: Sequence[bool] | None = None) -> str | None:
    """The reason why these are not the experts of a sequence of that many tokens; None if they are.

    Each token that is trained on (None = all of the response) is predicted by one with a row; the last token has none.
    """
    if experts is None:
        return "none"
    if experts.ndim != 3 or experts.dtype not in (np.uint8, np.int16):
        return f"{experts.dtype} of shape {experts.shape}"
    last = response - 1 if trained is None else max((i for i, on in enumerate(trained) if on), default=-prompt)
    if not prompt + last <= len(experts) < prompt + response:
        return f"{len(experts)} rows"
    return None


def placed(sequences: Sequence[tuple[int, Experts]], tokens: int) -> Experts:
    """(tokens, layers, k) with each sequence's rows from its place on, and `unknown` elsewhere."""
    first = sequences[0][1]
    whole = np.full((tokens, *first.shape[1:]), np.iinfo(first.dtype).max, dtype=first.dtype)
    for place, experts in sequences:
        whole[place : place + len(experts)] = experts
    return whole
