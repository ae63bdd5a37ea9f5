"""The arguments of registered operations: the fields of `Head` and of similar classes.

A schema is derived from the classes' annotations: a new field is a new argument.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from rlplus.loss.head.head import Head
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import TokenConstants


class Options(NamedTuple):
    """Options of the policy loss."""

    scratch_bytes: float
    backend: str


FIELDS = {kind: tuple(kind.__annotations__) for kind in (Head, TokenConstants, Objective, Options)}
TYPES = {  # names in a schema
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    str: "str",
}


def schema(*kinds: type) -> str:
    """The schema of an op that takes these classes."""
    return ", ".join(
        f"{TYPES[type_]} {kind.__name__}_{name}" for kind in kinds for name, type_ in kind.__annotations__.items()
    )


def pack(*parts: Any) -> list[Any]:
    """Instances of classes in FIELDS -> the arguments of an op."""
    return [getattr(part, name) for part in parts for name in FIELDS[type(part)]]


_objective = lru_cache(maxsize=1024)(Objective)  # its fields are checked when it is made, which takes a while


def unpack(arguments: Sequence[Any], *kinds: Any) -> list[Any]:
    """The inverse of `pack`: the instances, then the remaining arguments."""
    rest = iter(arguments)
    makers = (_objective if kind is Objective else kind for kind in kinds)
    made = [make(*islice(rest, len(FIELDS[kind]))) for kind, make in zip(kinds, makers, strict=True)]
    return [*made, *rest]
