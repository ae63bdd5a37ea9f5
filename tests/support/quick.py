"""Which cases of a parametrised test are quick: the others take the same way through the code with other values."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


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


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes: quick are so many cases that each two values of two axes meet, the others are slow.

    A value that is marked slow is so in every case.
    """
    listed = [tuple(axis) for axis in axes]
    cases = list(product(*map(range, map(len, listed))))
    able = [case for case in cases if not any(_is_slow(axis[i]) for axis, i in zip(listed, case, strict=True))]
    met = {case: {*combinations(enumerate(case), 2)} for case in able}
    missing, quick = set().union(*met.values()), set()
    while missing:
        best = max(able, key=lambda case: len(met[case] & missing))
        quick.add(best)
        missing -= met[best]
    return [_joined([axis[i] for axis, i in zip(listed, case, strict=True)], case in quick) for case in cases]


def _is_slow(part: Any) -> bool:
    return isinstance(part, ParameterSet) and any(getattr(mark, "name", "") == "slow" for mark in part.marks)


def _joined(parts: list[Any], quick: bool) -> Any:
    """One case of values that may have marks of their own."""
    marked = [part for part in parts if isinstance(part, ParameterSet)]
    values = [part.values[0] if isinstance(part, ParameterSet) else part for part in parts]
    marks = [mark for part in marked for mark in part.marks]
    return pytest.param(*values, marks=marks if quick else [*marks, pytest.mark.slow])


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
