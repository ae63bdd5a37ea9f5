"""The size of a demonstrated token's update: the coefficient of A·∇log π_θ, in the paper's form and in variants of it.

A coefficient is a function of p, p_old and p_ω, the token's probabilities under the policy, the old policy and the
demonstration's author, (...) float64 each.
"""

from collections.abc import Callable, Iterator
from math import comb, log
from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss import Objective, batch_advantages, exploration_weight, group_advantages, policy_loss

from .sums import balance, bayes_estimate, bias, expectation, random_problems, variance

Coefficient = Callable[[Tensor, Tensor, Tensor], Tensor]
GROUP, GAMMA, VOCABULARY = 8, 0.5, 151_936  # the paper's: 7 rollouts and 1 demonstration; tokens of Qwen2.5
HARD = 0.05  # a token less likely than this is hard
GRID = torch.linspace(0, 1, 100_001, dtype=torch.float64)[1:]  # values of p


class Variant(NamedTuple):
    name: str
    formula: str
    coefficient: Coefficient


def from_objective(objective: Objective, *, known: bool = False) -> Coefficient:
    """The coefficient in the gradient of `rlplus.policy_loss`. known: p_ω is given to it."""

    def coefficient(p: Tensor, old: Tensor, author: Tensor) -> Tensor:
        logprob, one = p.log().requires_grad_(), torch.ones_like(p)
        loss, _ = policy_loss(
            logprob, old_logprob=old.log(), advantage=one, token_weight=one, external=one > 0,
            behavior_logprob=author.log() if known else None, objective=objective,
        )  # fmt: skip
        return -torch.autograd.grad(loss, logprob)[0]

    return coefficient


def from_estimate(
    *, uniform: float = 1.0, prior: float = 0.5, share: float = 0.5, known: bool = False, gamma: float = GAMMA
) -> Coefficient:
    """The balance heuristic times the exploration weight, with p_ω estimated as prior · p_old + (1 − prior) · uniform.

    share: demonstrations' share of the samples; known: p_ω in place of its estimate. The defaults are the paper's.
    """

    def coefficient(p: Tensor, old: Tensor, author: Tensor) -> Tensor:
        estimate = author if known else bayes_estimate(old, uniform, prior)
        return balance(p, (estimate, old), (share, 1 - share)) * exploration_weight(p.log(), gamma)

    return coefficient


def variants(vocabulary: int) -> list[Variant]:
    """The paper's form, other presets' forms, and what the paper's theory suggests in their place."""
    paper, shares = from_objective(Objective()), from_estimate(share=1 / GROUP)
    return [
        Variant("paper", "4p / (3p_old + 1) · C", paper),
        Variant("paper, without C", "4p / (3p_old + 1)", from_objective(Objective(gamma=0.0))),
        Variant("LUFFY", "κp / (p + κ)²", from_objective(Objective(external="shaped", gamma=0.0))),
        Variant("plain", "p / p_ω", from_objective(Objective(external="omega", gamma=0.0), known=True)),
        Variant("proxy", "p / p_old", from_objective(Objective(external="proxy", gamma=0.0))),
        Variant("actual shares, 1:7", "16p / (15p_old + 1) · C", shares),
        Variant("true p_ω", "2p / (p_ω + p_old) · C", from_objective(Objective(), known=True)),
        Variant("true p_ω, 1:7", "8p / (p_ω + 7p_old) · C", from_estimate(share=1 / GROUP, known=True)),
        Variant("uniform 1/V", "4p / (3p_old + 1/V) · C", from_estimate(uniform=1 / vocabulary)),
        Variant("Lemma B.1", "C", from_objective(Objective(external="nll"))),
    ]


def on_policy(coefficient: Coefficient, p: Tensor) -> Tensor:
    """The coefficient on the current policy, for an author who is sure of the token."""
    return coefficient(p, p, torch.ones_like(p))


def peak(coefficient: Coefficient) -> tuple[float, float]:
    """The probability at which the coefficient is greatest on the current policy, to 1e-5, and its value there."""
    values = on_policy(coefficient, GRID)
    return float(GRID[values.argmax()]), float(values.max())


def limit(coefficient: Coefficient) -> float:
    """The coefficient on the current policy as p goes to 0."""
    return float(on_policy(coefficient, torch.tensor([1e-30], dtype=torch.float64)))


def bound(coefficient: Coefficient) -> float:
    """The greatest coefficient for any p, with p_ω = 1, as p_old goes to 0."""
    return float(coefficient(GRID, torch.full_like(GRID, 1e-30), torch.ones_like(GRID)).max())


def updates(coefficient: Coefficient, start: float, end: float) -> float:
    """Gradient steps, in units of 1 / (learning rate · A), that lift a token from probability start to end.

    The token is one of two outcomes with a logit each: a step moves their difference by 2 c (1 − p). Small steps on the
    current policy, so a count is the integral of 1 / (2 c (1 − p)) over that difference.
    """
    low, high = (log(p / (1 - p)) for p in (start, end))
    logit = torch.linspace(low, high, 10_001, dtype=torch.float64)
    p = logit.sigmoid()
    return float(torch.trapezoid(1 / (2 * on_policy(coefficient, p) * (1 - p)), logit))


def coefficient_rows() -> Iterator[tuple[str, ...]]:
    """A row for each variant: its coefficient on the current policy with p_ω = 1, and the greatest where p_old is 0."""
    yield ("variant", "coefficient", "greatest", "at p", "p = .001", "p → 0", "p_old → 0", "updates from .001 to .5")
    for name, formula, coefficient in variants(VOCABULARY):
        (at, most), any_old = peak(coefficient), bound(coefficient)
        low = on_policy(coefficient, torch.tensor([0.001], dtype=torch.float64))
        yield (
            name,
            formula,
            f"{most:.3f}",
            f"{at:.4f}" if at > 1e-5 else "0",
            f"{float(low):.4f}",
            f"{limit(coefficient):.0f}",
            f"{any_old:.3g}" if any_old < 1e9 else "unbounded",
            f"{updates(coefficient, 0.001, 0.5):.1f}",
        )


def estimate_rows() -> Iterator[tuple[str, ...]]:
    """A row for each variant: its coefficient as the weight in an estimate of J from one demonstration of 32 outcomes.

    Absolute bias and standard deviation are exact sums, averaged over 500 problems; first with rewards independent of
    the policies, then with an author who is right: rewards of 1 where π_ω > π_old, else 0. Last the share of the
    expected coefficient that hard tokens get.
    """
    yield ("variant", "bias", "sd", "bias, author right", "sd", f"share of tokens with p < {HARD:g}")
    problem = random_problems(500, 32)
    right = problem._replace(reward=(problem.author > problem.old).double())
    hard = (problem.policy < HARD).double()
    yield ("demonstrated tokens", "", "", "", "", f"{expectation(problem.author, hard).mean():.0%}")
    for name, _, coefficient in variants(32):
        weight = coefficient(problem.policy, problem.old, problem.author)
        share = expectation(problem.author, weight * hard) / expectation(problem.author, weight)
        cells = []
        for each in (problem, right):
            error = bias(each, weight, each.author).abs().mean()
            cells += [f"{error:.3f}", f"{variance(each.author, weight * each.reward).sqrt().mean():.3f}"]
        yield (name, *cells, f"{share.mean():.0%}")


def demonstration_advantage(right: int, estimator: str, k: int = 4) -> float:
    """The advantage of a right demonstration in a group of 8 with so many right rollouts.

    estimator: "std" for (R − mean) / std, "mean" for R − mean, "pass@k".
    """
    reward = torch.tensor([1.0] * (right + 1) + [0.0] * (GROUP - 1 - right), dtype=torch.float64)
    group = torch.zeros(GROUP, dtype=torch.int64)
    if estimator == "pass@k":
        return float(batch_advantages(reward, group, "pass@k", k=k)[0])
    return float(group_advantages(reward, group, normalize_std=estimator == "std")[0])


def expected_advantage(solve_rate: float, estimator: str) -> tuple[float, float]:
    """Mean and standard deviation of `demonstration_advantage` if rollouts are right with probability `solve_rate`."""
    n = GROUP - 1
    chance = [comb(n, c) * solve_rate**c * (1 - solve_rate) ** (n - c) for c in range(n + 1)]
    found = [demonstration_advantage(c, estimator) for c in range(n + 1)]
    mean = sum(a * b for a, b in zip(chance, found, strict=True))
    return mean, sum(a * (b - mean) ** 2 for a, b in zip(chance, found, strict=True)) ** 0.5


def advantage_rows() -> Iterator[tuple[str, ...]]:
    """Mean and standard deviation of a demonstration's advantage by how often rollouts are right."""
    rates = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
    yield ("advantage of the demonstration", *(f"{rate:.0%} right" for rate in rates))
    for name, estimator in (("(R − mean) / std", "std"), ("R − mean", "mean"), ("pass@4", "pass@k")):
        yield (name, *("{:.2f} ± {:.2f}".format(*expected_advantage(rate, estimator)) for rate in rates))
