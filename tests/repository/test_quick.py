"""`quick.pairs`, which chooses the quick cases among a product of parameters."""

from itertools import combinations, product
from typing import Any

import pytest
import quick

AXES = [("a", "b"), (1, 2, 3), (None, pytest.param(0.5, marks=pytest.mark.gpu), 1.5)]


def names(case: Any) -> list[str]:
    """Names of its marks."""
    return [getattr(mark, "name", "") for mark in case.marks]


def test_each_two_values_meet_in_a_quick_case_and_marks_stay() -> None:
    cases = quick.pairs(*AXES)
    assert [case.values for case in cases] == list(product("ab", (1, 2, 3), (None, 0.5, 1.5)))
    assert all((0.5 in case.values) == ("gpu" in names(case)) for case in cases)
    chosen = [case.values for case in cases if "slow" not in names(case)]
    met = {pair for values in chosen for pair in combinations(enumerate(values), 2)}
    assert met == {pair for case in cases for pair in combinations(enumerate(case.values), 2)}
    assert len(chosen) == 9


def test_a_value_that_is_slow_takes_no_place_among_the_quick_cases() -> None:
    late = pytest.param(4, marks=pytest.mark.slow)
    cases = quick.pairs("ab", (1, 2, 3, late), (None, 0.5))
    chosen = {case.values for case in cases if "slow" not in names(case)}
    alone = {case.values for case in quick.pairs("ab", (1, 2, 3), (None, 0.5)) if "slow" not in names(case)}
    assert chosen == alone
    assert len(cases) == 16
