"""How surely a comparison shows something: the permutation test, Holm, and the share of runs that find the skill."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from experiments.significance import exact_interval, finds_the_skill, holm, permutation_p, rows_of, table
from rlplus.tools.compare.config import BASE, Comparison
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.train.evaluation.results import Evaluation

SEEDS = 6
COMPARISON = {
    "run": "run.yaml",
    "settings": {"one": {}, "two": {}},
    "methods": {"GRPO": {"preset": "grpo"}, "RL-PLUS": {"preset": "rlplus"}},
    "studies": {"Methods": {"settings": ["one", "two"], "methods": ["GRPO", "RL-PLUS"], "seeds": SEEDS}},
}


def outcome(setting: str, method: str, seed: int, easy: int, hard: int, subtraction: int = 0) -> Outcome:
    """Ten samples each of two easy and two hard problems of the set that is trained on, and of one of another set."""

    def evaluation(name: str, right: tuple[int, ...]) -> Evaluation:
        common: dict[str, Any] = dict(k=(1,), temperature=1.0, seed=seed, mean_response_length=5.0, truncated_share=0.0)
        problems, n, statuses = tuple(range(len(right))), (10,) * len(right), {"ok": 10 * len(right)}
        return Evaluation(name, problems, n, right, statuses=statuses, mean_reward=None, **common)

    results = {
        "trained": evaluation("trained", (easy, hard, easy, hard)),
        "subtraction": evaluation("subtraction", (subtraction,)),
    }
    return Outcome(setting, seed, method, 1e-3, 1, 1, 1.0, "", results, {})


def made(right: dict[tuple[str, str], list[tuple[int, int, int]]]) -> Results:
    outcomes = [outcome(*key, seed, *each) for key, seeds in right.items() for seed, each in enumerate(seeds)]
    return Results(Comparison.model_validate(COMPARISON), {}, {}, {}, outcomes)


@pytest.mark.parametrize("differences", [[3, 1, 2, 5], [3, -1, 2, -5, 0], [-4] * 6, [0, 0, 0], [7]])
def test_p_is_the_share_of_sign_patterns_that_are_as_far_from_zero(differences: list[int]) -> None:
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    assert permutation_p(differences) == np.mean([abs(each) >= abs(sum(differences)) for each in sums])


def test_p_of_twenty_seeds_that_all_differ_one_way_is_the_least_possible() -> None:
    assert permutation_p(np.arange(1, 21)) == 2 / 2**20
    with pytest.raises(ValueError, match="want at most 20 seeds; got 21"):
        permutation_p([1] * 21)


def test_holm_multiplies_by_the_hypotheses_that_are_left_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("found", "runs"), [(0, 20), (1, 20), (4, 5), (5, 5), (10, 20), (2, 10), (0, 1)])
def test_the_limits_of_a_share_are_where_such_a_count_has_a_probability_of_2_5_percent(found: int, runs: int) -> None:
    def probability(p: float, counts: range) -> float:
        patterns = (sum(each) for each in product((0, 1), repeat=runs)) if runs <= 10 else None
        if patterns is not None:
            return sum(p**k * (1 - p) ** (runs - k) for k in patterns if k in counts)
        return sum(
            math.factorial(runs) / math.factorial(k) / math.factorial(runs - k) * p**k * (1 - p) ** (runs - k)
            for k in counts
        )

    low, high = exact_interval(found, runs)
    assert low == 0 if found == 0 else probability(low, range(found, runs + 1)) == pytest.approx(0.025)
    assert high == 1 if found == runs else probability(high, range(found + 1)) == pytest.approx(0.025)
    with pytest.raises(ValueError, match="want 0 <= found <= runs"):
        exact_interval(runs + 1, runs)


def test_rows_have_means_over_all_samples_and_the_share_of_seeds_that_solve_hard_problems() -> None:
    found, lost = (10, 5, 0), (10, 4, 0)
    results = made(
        {
            ("one", BASE): [(0, 0, 0)] * SEEDS,
            ("one", "GRPO"): [lost] * 4 + [found] * 2,
            ("one", "RL-PLUS"): [(10, 9, 5)] * SEEDS,
            ("two", BASE): [(0, 0, 0)] * SEEDS,
            ("two", "GRPO"): [found] * SEEDS,
            ("two", "RL-PLUS"): [found] * SEEDS,
        }
    )
    assert finds_the_skill(outcome("one", "GRPO", 0, *found))
    assert not finds_the_skill(outcome("one", "GRPO", 0, *lost))
    rows = {(row.setting, row.method): row for row in rows_of(results, "Methods")}
    grpo = rows["one", "GRPO"]
    assert (grpo.pass_at_1, grpo.found) == pytest.approx(((4 * 28 + 2 * 30) / 300, 2 / 6))
    assert grpo.difference == pytest.approx(((28 * 4 + 30 * 2) / 6 - 43) / 50)
    assert grpo.p == pytest.approx(2 * 2 / 2**6), "two differences are corrected together"
    assert rows["two", "GRPO"].p == 1.0
    assert [rows["one", method].p for method in (BASE, "RL-PLUS")] == [None, None]
    assert table([grpo])[-1] == "| one | GRPO | 57.3 | 33 % | −28.7 | 0.0625 |"
    (alone,) = (row for row in rows_of(results, "Methods", "trained") if (row.setting, row.method) == ("one", "GRPO"))
    assert alone.pass_at_1 == pytest.approx((4 * 28 + 2 * 30) / 240)
    assert alone.difference == pytest.approx(((28 * 4 + 30 * 2) / 6 - 38) / 40)
    with pytest.raises(ValueError, match="want one of the test sets trained, subtraction; got lengths"):
        rows_of(results, "Methods", "lengths")
    with pytest.raises(ValueError, match=r"want all seeds of GRPO in two; there are none of \[0, 1, 2, 3, 4, 5\]"):
        rows_of(
            Results(
                results.comparison, {}, {}, {}, [o for o in results.outcomes if o.setting == "one" or o.method == BASE]
            ),
            "Methods",
        )
