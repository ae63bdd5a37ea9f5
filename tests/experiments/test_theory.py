"""The theory against independent enumerations: outcomes in fractions, subsets one by one, steps of gradient ascent.

Here a problem is a list of outcomes (policy, old policy, author, reward), each a Fraction.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, product
from math import exp, sqrt
from pathlib import Path
from random import Random
from statistics import stdev

import pytest
import torch

from experiments.theory import coefficients, sums
from experiments.theory.__main__ import main
from experiments.theory.coefficients import GROUP, VOCABULARY, from_estimate, from_objective, on_policy, peak, variants
from experiments.theory.statements import EXACT, STATEMENTS, Finding
from experiments.theory.sums import Problem
from rlplus.loss import Objective

ROOT = Path(__file__).parents[2]
Outcomes = list[tuple[Fraction, Fraction, Fraction, Fraction]]
HALF = Fraction(1, 2)


def distribution(random: Random, n: int, missing: int = 0) -> list[Fraction]:
    counts = [0] * missing + [random.randint(1, 40) for _ in range(n - missing)]
    return [Fraction(count, sum(counts)) for count in counts]


def problem(seed: int, missing: int = 0, n: int = 5) -> Outcomes:
    random = Random(seed)
    reward = [Fraction(random.randint(-10, 10), 10) for _ in range(n)]
    old = distribution(random, n)
    return list(zip(distribution(random, n), old, distribution(random, n, missing), reward, strict=True))


def tensors(outcomes: Outcomes) -> Problem:
    return Problem(*torch.tensor([[float(x) for x in row] for row in outcomes], dtype=torch.float64).unbind(-1))


PROBLEMS = [problem(seed, missing=seed % 3) for seed in range(12)]


def near(found: torch.Tensor, want: Fraction | list[Fraction]) -> None:
    expected = torch.tensor([float(x) for x in want] if isinstance(want, list) else float(want), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# ---- estimators


@pytest.mark.parametrize("outcomes", PROBLEMS)
def test_biases_are_those_of_an_enumeration(outcomes: Outcomes) -> None:
    J = sum(t * R for t, _, _, R in outcomes)
    exact = tensors(outcomes)
    proxy = sum(w * t / o * R for t, o, w, R in outcomes) - J
    near(sums.bias(exact, exact.policy / exact.old, exact.author), proxy)
    near(sums.proxy_bias(exact), proxy)
    plain = sum(w * t / w * R for t, o, w, R in outcomes if w) - J
    near(sums.bias(exact, exact.policy / exact.author, exact.author), plain)
    near(sums.support_bias(exact), plain)
    mis = sum(w * 2 * t / (w + o) * R for t, o, w, R in outcomes) - J
    near(sums.bias(exact, sums.mis(exact), exact.author), mis)
    near(sums.mis_bias(exact), mis)
    near(sums.mis_factor(exact), [(w - o) / (w + o) for _, o, w, _ in outcomes])
    mixed = sums.mixture((exact.author, exact.old), (0.5, 0.5))
    near(sums.bias(exact, sums.mis(exact), mixed), Fraction(0))


@pytest.mark.parametrize("outcomes", PROBLEMS)
def test_the_variance_is_that_of_an_enumeration(outcomes: Outcomes) -> None:
    exact = tensors(outcomes)
    mean = sum(w * (t / w) for t, _, w, _ in outcomes if w)
    near(
        sums.variance(exact.author, exact.policy / exact.author),
        sum((w * (t / w - mean) ** 2 for t, _, w, _ in outcomes if w), Fraction(0)),
    )
    divergence = sum((t - o) ** 2 / o for t, o, _, _ in outcomes)
    near(sums.chi_squared(exact.policy, exact.old), Fraction(divergence))
    near(sums.variance(exact.old, exact.policy / exact.old), Fraction(divergence))
    assert sums.chi_squared(exact.policy, exact.author).isinf() == any(w == 0 for _, _, w, _ in outcomes)


def test_the_second_moment_of_mis_stays_below_its_bound() -> None:
    """In fractions, for authors of any kind; the bound is reached where the author is the old policy."""
    for outcomes in (problem(seed, missing=seed % 4) for seed in range(300)):
        bound = sum(t * t / o for t, o, _, _ in outcomes)
        assert sum(w * (2 * t / (w + o)) ** 2 for t, o, w, _ in outcomes) <= bound
        assert sum((w + o) / 2 * (2 * t / (w + o)) ** 2 for t, o, w, _ in outcomes) <= 2 * bound
        assert sum(o * (2 * t / (o + o)) ** 2 for t, o, _, _ in outcomes) == bound


def test_the_balance_heuristic_of_three_policies() -> None:
    outcomes, shares = PROBLEMS[1], (Fraction(1, 8), Fraction(3, 8), HALF)
    exact = tensors(outcomes)
    want = [t / (shares[0] * w + shares[1] * o + shares[2] * t) for t, o, w, _ in outcomes]
    near(sums.balance(exact.policy, (exact.author, exact.old, exact.policy), [float(s) for s in shares]), want)


@pytest.mark.parametrize("prior", [HALF, Fraction(1, 10)])
def test_the_bayes_estimate_has_the_least_risk(prior: Fraction) -> None:
    outcomes, uniform = PROBLEMS[2], Fraction(1, 5)
    old = [o for _, o, _, _ in outcomes]

    def risk(estimate: list[Fraction]) -> Fraction:
        pairs = zip(estimate, old, strict=True)
        return sum((prior * (e - o) ** 2 + (1 - prior) * (e - uniform) ** 2 for e, o in pairs), Fraction(0))

    best = [prior * o + (1 - prior) * uniform for o in old]
    exact = tensors(outcomes)
    estimate = sums.bayes_estimate(exact.old, float(uniform), float(prior))
    near(estimate, best)
    near(sums.bayes_risk(estimate, exact.old, float(uniform), float(prior)), risk(best))
    for i, change in product(range(5), (Fraction(1, 1000), Fraction(-1, 1000))):
        assert risk([e + change * (i == j) for j, e in enumerate(best)]) > risk(best)


def test_a_different_author_without_bias_exists() -> None:
    """The program's counter-example, summed in fractions of its floats, and one by hand: equal mean rewards."""
    exact = sums.random_problems(20, 6)
    found = sums.unbiased_author(exact, exact.author - exact.old)
    for rows in zip(exact.policy, exact.old, found, exact.reward, strict=True):
        outcomes = list(zip(*([Fraction(x) for x in row.tolist()] for row in rows), strict=True))
        assert abs(sum(w for _, _, w, _ in outcomes) - 1) < EXACT
        assert all(w > 0 and abs(w - o) > 1e-6 for _, o, w, _ in outcomes)
        assert abs(sum((w - o) * t / o * R for t, o, w, R in outcomes)) < EXACT
    third, by_hand = Fraction(1, 3), (HALF, Fraction(0), HALF)
    same = [(third, third, w, Fraction(R)) for w, R in zip(by_hand, (0, 1, 2), strict=True)]
    near(sums.proxy_bias(tensors(same)), Fraction(0))


@pytest.mark.parametrize("outcomes", PROBLEMS)
def test_the_worst_bias_of_all_rewards(outcomes: Outcomes) -> None:
    subsets = product((0, 1), repeat=len(outcomes))
    every = [abs(sum(t * R * (w / o - 1) for R, (t, o, w, _) in zip(s, outcomes, strict=True))) for s in subsets]
    near(sums.worst_proxy_bias(tensors(outcomes)), max(every))


def test_random_problems_are_distributions_at_the_distance_asked_for() -> None:
    exact = sums.random_problems(50, 6, missing=2)
    for policy in exact[:3]:
        torch.testing.assert_close(policy.sum(-1), torch.ones(50, dtype=torch.float64))
    assert (exact.author[:, :2] == 0).all()
    assert (exact.author[:, 2:] > 0).all()
    assert (exact.reward >= 0).all()
    assert (exact.reward <= 1).all()
    logit = sums.random_problems(5000, 6, distance=3.0)
    for policy, distance in ((logit.author, 3.0), (logit.policy, 0.1)):
        way = (policy / logit.old).log()
        assert abs((way - way.mean(-1, keepdim=True)).square().sum(-1).mean() / 5 - distance**2) < 0.03 * distance**2


# ---- statements


VERDICTS = {
    "Lemma A.5": "holds", "proof of A.5": "does not hold as written",
    "proof of A.5, all R": "holds",
    "Lemma A.6": "holds", "proof of A.6": "does not hold as written",
    "Lemma A.7": "holds", "Appendix A; Remark A.11": "holds in part",
    "Remark A.8": "holds in part", "Remark A.9": "does not hold as written",
    "Theorem A.10": "holds", "Theorem A.12": "holds",
    "Assumption A.13": "does not hold as written", "Remark A.14": "holds",
    "eq. 4": "does not hold as written", "Lemma B.1": "holds in part", "Theorem B.2": "holds in part",
}  # fmt: skip


def test_the_verdicts() -> None:
    found = [statement() for statement in STATEMENTS]
    assert {each.place: each.verdict for each in found} == VERDICTS
    assert len(found) == len(VERDICTS)


def test_a_verdict_counts_the_claims() -> None:
    assert Finding("", "", "", (True, True)).verdict == "holds"
    assert Finding("", "", "", (True, False)).verdict == "holds in part"
    assert Finding("", "", "", (False, False)).verdict == "does not hold as written"


# ---- coefficients


def closed_forms(p: float, old: float, author: float) -> dict[str, float]:
    C = sqrt(1 - p)
    estimate = (old + 1) / 2
    return {
        "paper": p / (estimate / 2 + old / 2) * C,
        "paper, without C": p / (estimate / 2 + old / 2),
        "LUFFY": p * 0.1 / (p + 0.1) ** 2,
        "plain": p / author,
        "proxy": p / old,
        "actual shares, 1:7": p / (estimate / 8 + 7 * old / 8) * C,
        "true p_ω": p / (author / 2 + old / 2) * C,
        "true p_ω, 1:7": p / (author / 8 + 7 * old / 8) * C,
        "uniform 1/V": p / ((old + 0.01) / 4 + old / 2) * C,
        "Lemma B.1": C,
    }


POINTS = [(0.05, 0.05, 1.0), (0.5, 0.25, 0.3), (0.9, 1e-6, 0.01), (1e-4, 2e-4, 0.7)]


@pytest.mark.parametrize(("p", "old", "author"), POINTS)
def test_coefficients_are_their_formulas(p: float, old: float, author: float) -> None:
    inputs = [torch.tensor([value], dtype=torch.float64) for value in (p, old, author)]
    found = {name: float(coefficient(*inputs)) for name, _, coefficient in variants(100)}
    assert found == pytest.approx(closed_forms(p, old, author), rel=1e-12)


def test_printed_formulas_are_the_coefficients() -> None:
    p, old, author, V, κ = 0.3, 0.2, 0.4, 100, 0.1
    inputs = [torch.tensor([value], dtype=torch.float64) for value in (p, old, author)]
    names = {"p": p, "p_old": old, "p_ω": author, "V": V, "κ": κ, "C": sqrt(1 - p)}
    for name, formula, coefficient in variants(V):
        code = re.sub(r"(\d|κ)(p)|(\d)(V)", r"\1\3*\2\4", formula).replace("·", "*").replace("²", "**2")
        assert eval(code, {}, names) == pytest.approx(float(coefficient(*inputs)), rel=1e-12), name


@pytest.mark.parametrize(
    ("coefficient", "slope", "gamma"),
    [
        (from_objective(Objective()), 3, 0.5),
        (from_objective(Objective(gamma=1.5)), 3, 1.5),
        (from_estimate(share=1 / GROUP), 15, 0.5),
        (from_estimate(uniform=1 / VOCABULARY), 3 * VOCABULARY, 0.5),
    ],
)
def test_the_peak_is_where_the_derivative_is_zero(coefficient: Callable, slope: float, gamma: float) -> None:
    """(s + 1) p / (s p + 1) · (1 − p)^γ rises while 1 − p > γ p (s p + 1). The peak is found to 1e-5."""
    root = (-(1 + gamma) + sqrt((1 + gamma) ** 2 + 4 * gamma * slope)) / (2 * gamma * slope)
    at, most = peak(coefficient)
    assert abs(at - root) <= 1e-5
    assert most == pytest.approx(float(on_policy(coefficient, torch.tensor([root], dtype=torch.float64))), rel=1e-5)


def test_the_numbers_of_the_composed_coefficient() -> None:
    """Those that the manual quotes."""
    assert peak(from_objective(Objective())) == pytest.approx((0.457, 0.568), abs=5e-4)
    assert peak(from_objective(Objective(gamma=1.5)))[0] == pytest.approx(0.269, abs=5e-4)


@pytest.mark.parametrize("name", ["paper", "actual shares, 1:7", "uniform 1/V"])
def test_updates_are_those_of_gradient_ascent(name: str) -> None:
    """Two logits, ascended with the gradient of log p times the coefficient, in steps of 0.002."""
    (coefficient,) = (each.coefficient for each in variants(VOCABULARY) if each.name == name)
    grid = torch.linspace(1e-4, 1, 20_001, dtype=torch.float64)
    values = on_policy(coefficient, grid).tolist()
    rate, steps, right, wrong = 0.002, 0, 0.0, -float(torch.tensor(0.01, dtype=torch.float64).logit())
    while (p := 1 / (1 + exp(wrong - right))) < 0.5:
        c = values[round((p - 1e-4) / (1 - 1e-4) * 20_000)]
        right, wrong, steps = right + rate * c * (1 - p), wrong - rate * c * (1 - p), steps + 1
    assert rate * steps == pytest.approx(coefficients.updates(coefficient, 0.01, 0.5), rel=0.01)


def test_the_estimates_table_is_an_enumeration() -> None:
    """Two rows of the table, outcome by outcome, with the rewards of an author who is right."""
    rows = {row[0]: row for row in coefficients.estimate_rows()}
    exact = sums.random_problems(500, 32)
    for name in ("paper", "proxy"):
        errors, spreads, shares = [], [], []
        for t, o, w in zip(*(policy.tolist() for policy in exact[:3]), strict=True):
            c = [closed_forms(a, b, d)[name] for a, b, d in zip(t, o, w, strict=True)]
            R = [float(d > b) for b, d in zip(o, w, strict=True)]
            mean = sum(d * x * r for d, x, r in zip(w, c, R, strict=True))
            errors.append(abs(mean - sum(a * r for a, r in zip(t, R, strict=True))))
            spreads.append(sqrt(sum(d * (x * r - mean) ** 2 for d, x, r in zip(w, c, R, strict=True))))
            hard = sum(d * x for a, d, x in zip(t, w, c, strict=True) if a < 0.05)
            shares.append(hard / sum(d * x for d, x in zip(w, c, strict=True)))
        found = [sum(values) / 500 for values in (errors, spreads, shares)]
        assert rows[name][3:] == (f"{found[0]:.3f}", f"{found[1]:.3f}", f"{found[2]:.0%}")


# ---- advantages


@pytest.mark.parametrize("right", range(8))
def test_a_demonstrations_advantage(right: int) -> None:
    """pass@4: over all fours of the group with the demonstration (always solved), less pass@4, over its deviation."""
    group = [1] * (right + 1) + [0] * (7 - right)
    fours = [max(four) for four in combinations(group, 4)]
    rate = sum(fours) / len(fours)
    spread = sqrt(rate * (1 - rate))
    want = {"mean": 1 - sum(group) / 8, "pass@k": (1 - rate) / spread if spread else 0.0}
    want["std"] = want["mean"] / (stdev(group) + 1e-6) if right < 7 else 0.0
    assert {name: coefficients.demonstration_advantage(right, name) for name in want} == pytest.approx(want, abs=1e-12)


def test_expected_advantages_are_sums_over_all_groups() -> None:
    values = []
    for rollouts in product((0, 1), repeat=7):
        chance = Fraction(1, 4) ** sum(rollouts) * Fraction(3, 4) ** (7 - sum(rollouts))
        values.append((chance, 1 - Fraction(1 + sum(rollouts), 8)))
    mean = sum(chance * value for chance, value in values)
    spread = sqrt(sum(chance * (value - mean) ** 2 for chance, value in values))
    assert coefficients.expected_advantage(0.25, "mean") == pytest.approx((float(mean), spread), rel=1e-12)


# ---- the program


def test_the_program_prints_its_tables_and_draws_the_manuals_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manual's figure has the texts of this one; its bytes depend on matplotlib's version."""
    main(["--figure", str(tmp_path / "figure.svg")])
    printed = capsys.readouterr().out
    assert all(verdict in printed for verdict in VERDICTS.values())
    assert len(re.findall(r"^\| ---", printed, re.MULTILINE)) == 4
    figures = (tmp_path / "figure.svg", ROOT / "docs/theory.svg")
    drawn, shown = (re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL) for path in figures)
    assert "0.568 at 0.457" in drawn
    assert drawn == shown


def test_the_figure_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("experiments.theory.__main__.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--figure", "figure.svg"])
    assert "want matplotlib" in capsys.readouterr().err
