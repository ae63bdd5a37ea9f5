"""Which cases of a parametrised test are quick: the others take the same way through the code with other values."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, all after the first n marked slow."""
    listed = list(cases)
    return [*listed[:n], *(_slow(case) for case in listed[n:])]


def only(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the quick ones marked slow; ValueError if a quick one is none of them."""
    quick, listed = list(quick), list(cases)
    if unknown := [case for case in quick if case not in listed]:
        raise ValueError(f"want quick cases among {listed}; got {unknown}")
    return [case if case in quick else _slow(case) for case in listed]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
