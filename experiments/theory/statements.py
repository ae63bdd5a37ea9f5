"""The paper's statements, each with what exact sums show about it. Verdicts are computed, not written down."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from rlplus.loss import Objective, exploration_weight

from .coefficients import GROUP, VOCABULARY, from_estimate, from_objective, peak
from .sums import (
    Problem,
    bayes_estimate,
    bayes_risk,
    bias,
    chi_squared,
    expectation,
    independent_problems,
    mis,
    mis_bias,
    mis_factor,
    mixture,
    proxy_bias,
    random_problems,
    support_bias,
    unbiased_author,
    variance,
    without,
    worst_proxy_bias,
)

COUNT, OUTCOMES, MISSING = 500, 8, 3  # problems, and outcomes of each; those that the author never writes
EXACT = 1e-12  # absolute error of sums of terms of order 1
EQUAL = f"equal on {COUNT} random problems"
PAPER = from_objective(Objective())


@dataclass(frozen=True)
class Finding:
    """A statement with its place in the paper, what was computed, and whether that confirms each of its claims."""

    place: str
    statement: str
    computed: str
    claims: tuple[bool, ...]

    @property
    def verdict(self) -> str:
        if all(self.claims):
            return "holds"
        return "holds in part" if any(self.claims) else "does not hold as written"


def zero(values: Tensor) -> bool:
    return bool((values.abs() < EXACT).all())


def proxy_formula() -> Finding:
    problem = random_problems(COUNT, OUTCOMES)
    found = bias(problem, problem.policy / problem.old, problem.author)
    return Finding(
        "Lemma A.5",
        "the bias of π_θ/π_old on demonstrations is Σ π_θ R (π_ω/π_old − 1)",
        f"{EQUAL}; |bias| up to {found.abs().max():.2f}, where J is at most 1",
        (zero(found - proxy_bias(problem)),),
    )


def proxy_iff() -> Finding:
    """The counter-example goes from the old policy towards the random author, along the part that keeps the bias 0."""
    problem = random_problems(COUNT, OUTCOMES)
    author = unbiased_author(problem, problem.author - problem.old)
    found = bias(problem._replace(author=author), problem.policy / problem.old, author)
    least, total = (author - problem.old).abs().amin(-1), (author - problem.old).abs().sum(-1) / 2
    example = least.argmax()
    return Finding(
        "proof of A.5",
        "that bias is zero only if π_ω = π_old on all relevant outcomes",
        "every problem has a π_ω of bias 0 that differs from π_old at every outcome, in one by at least "
        f"{least[example]:.3f} (total variation {total[example]:.2f}). If π_θ = π_old, equal mean rewards suffice",
        (not (zero(found) and bool((least > 0).all())),),
    )


def proxy_iff_for_all() -> Finding:
    """The statement that is true: a bias of zero for every reward at once, not for the one at hand."""
    problem = random_problems(COUNT, OUTCOMES)
    worst = worst_proxy_bias(problem)
    same = worst_proxy_bias(problem._replace(author=problem.old))
    rewards = torch.tensor(list(product((0.0, 1.0), repeat=OUTCOMES)), dtype=torch.float64)
    every = [proxy_bias(problem._replace(reward=reward.expand_as(problem.reward))).abs() for reward in rewards]
    return Finding(
        "proof of A.5, all R",
        "for all rewards at once, that bias is zero only if π_ω = π_old wherever π_θ > 0",
        f"the largest |bias| over rewards in [0, 1] is at least {worst.min():.2g} and up to {worst.max():.2g}, reached "
        f"by one of the {len(rewards)} rewards of 0 and 1; it is 0 for π_ω = π_old",
        (zero(torch.stack(every).amax(0) - worst) and bool((worst > 1e-3).all()), zero(same)),
    )


def support_formula() -> Finding:
    problem = random_problems(COUNT, OUTCOMES, missing=MISSING)
    found = bias(problem, problem.policy / problem.author, problem.author)
    return Finding(
        "Lemma A.6",
        "the bias of π_θ/π_ω from missing support is −Σ π_θ R over the outcomes with π_ω = 0",
        f"{EQUAL} in which π_ω lacks {MISSING} of {OUTCOMES} outcomes",
        (zero(found - support_bias(problem)),),
    )


def support_iff() -> Finding:
    """The counter-example has rewards of both signs that cancel over the outcomes the author never writes."""
    problem = random_problems(COUNT, OUTCOMES, missing=MISSING)
    cancelling = without(problem.reward[:, :MISSING] - 0.5, problem.policy[:, :MISSING])
    reward = torch.cat([cancelling, problem.reward[:, MISSING:]], -1)
    found = bias(problem._replace(reward=reward), problem.policy / problem.author, problem.author)
    return Finding(
        "proof of A.6",
        "that bias is zero only if π_ω covers π_θ",
        "every problem has rewards, not 0 where π_ω = 0, that cancel there: bias 0 without cover. With rewards ≥ 0 it "
        "takes R = 0 there",
        (not (zero(found) and bool((cancelling != 0).all())),),
    )


def ratio_variance() -> Finding:
    problem = random_problems(COUNT, OUTCOMES)
    found = variance(problem.author, problem.policy / problem.author)
    error = (found / chi_squared(problem.policy, problem.author) - 1).abs().max()
    return Finding(
        "Lemma A.7",
        "the variance of π_θ/π_ω under π_ω is χ²(π_θ ‖ π_ω)",
        f"{EQUAL}; from {found.min():.2g} to {found.max():.2g}",
        (bool(error < 1e-9),),
    )


def unbiased() -> Finding:
    problem = random_problems(COUNT, OUTCOMES, missing=MISSING)
    mixed = bias(problem, mis(problem), mixture((problem.author, problem.old), (0.5, 0.5)))
    alone = bias(problem, mis(problem), problem.author)
    whole = random_problems(COUNT, OUTCOMES)
    covered = bias(whole, mis(whole), whole.author).abs().mean()
    return Finding(
        "Appendix A; Remark A.11",
        "MIS is unbiased (said to be proven, without a proof)",
        "bias 0 if all samples come from the mixture and all have its weight. On demonstrations alone, as in eq. 7, "
        f"|bias| is {alone.abs().mean():.3f} on average and up to {alone.abs().max():.2f} where π_ω lacks {MISSING} of "
        f"{OUTCOMES} outcomes, and {covered:.3f} on average where it lacks none",
        (zero(mixed), zero(alone)),
    )


def controlled_bias() -> Finding:
    problem = random_problems(COUNT, OUTCOMES, missing=MISSING)
    found, factor = bias(problem, mis(problem), problem.author), mis_factor(problem)
    proxy_factor = (problem.author - problem.old) / problem.old
    worse, worse_covered, worse_apart = (
        (bias(each, mis(each), each.author).abs() > proxy_bias(each).abs()).double().mean()
        for each in (problem, random_problems(COUNT, OUTCOMES), independent_problems(COUNT, OUTCOMES))
    )
    right = problem._replace(reward=(problem.author > problem.old).double())
    worse_right = (mis_bias(right) > proxy_bias(right)).double().mean()
    below = bool((factor.abs() <= proxy_factor.abs() + EXACT).all())
    return Finding(
        "Remark A.8",
        "the bias of MIS is Σ π_θ R f, with |f| below the proxy's factor and strictly below 1",
        f"{EQUAL}; |f| is never above the proxy's, but 1 where π_ω = 0. |bias| is above the proxy's, whose terms "
        f"cancel, in {worse:.0%} of these problems, in {worse_covered:.0%} where π_ω lacks no outcome, in "
        f"{worse_apart:.0%} where the three policies are independent, and in {worse_right:.0%} if exactly what π_ω "
        "prefers is right",
        (zero(found - mis_bias(problem)), below, bool((factor.abs() < 1).all())),
    )


def overcomes_support() -> Finding:
    """Only what the author never writes is rewarded, so the whole bias comes from missing support."""
    problem = random_problems(COUNT, OUTCOMES, missing=MISSING)
    problem = problem._replace(reward=torch.where(problem.author == 0, problem.reward, 0.0))
    plain = bias(problem, problem.policy / problem.author, problem.author)
    alone = bias(problem, mis(problem), problem.author)
    mixed = bias(problem, mis(problem), mixture((problem.author, problem.old), (0.5, 0.5)))
    group = ((GROUP - 1) * bias(problem, problem.policy / problem.old, problem.old) + alone) / GROUP
    return Finding(
        "Remark A.9",
        "MIS on demonstrations eliminates the truncation error of missing support",
        f"reward lost where π_ω = 0: {-plain.mean():.3f} on average with π_θ/π_ω and {-alone.mean():.3f} with MIS, "
        "equal in every problem: no weight helps an outcome that is never drawn. If the mixture is sampled it "
        f"is {mixed.abs().mean():.3f}; in a group with 7 rollouts of weight π_θ/π_old, {-group.mean():.3f}",
        (not zero(alone - plain),),
    )


def variance_robustness() -> Finding:
    claims, plain, most = [], [], 0.0
    for distance in (1.0, 4.0, 16.0):
        problem = random_problems(COUNT, OUTCOMES, distance=distance)
        weight, limit = mis(problem), 1 + chi_squared(problem.policy, problem.old)
        mixed = variance(mixture((problem.author, problem.old), (0.5, 0.5)), weight)
        claims.append(bool((expectation(problem.author, weight**2) <= limit).all()))
        claims.append(bool((mixed <= 2 * limit - 1).all()))
        claims.append(bool((weight <= 2 * problem.policy / problem.old).all()))
        plain.append(float(variance(problem.author, problem.policy / problem.author).max()))
        most = max(most, float(mixed.max()))
    return Finding(
        "Theorem A.10",
        "one behavior policy close to π_θ keeps the variance low, however bad the others are",
        "with the true π_ω: E_ω[r²] ≤ 1 + χ²(π_θ ‖ π_old), and on the mixture a variance of at most "
        f"(1 + χ²)/α_old − 1, {most:.2f} here; π_θ/π_ω has up to {', '.join(f'{value:.0e}' for value in plain)} "
        "for authors 1, 4 and 16 away. Low means bounded: with π_θ = π_old, a π_ω elsewhere costs up to 1/α_old − 1",
        tuple(claims),
    )


def bayes_optimal() -> Finding:
    problem = random_problems(COUNT, OUTCOMES)
    uniform, claims = 1 / OUTCOMES, []
    for prior in (0.5, 0.1, 0.9):
        best = bayes_estimate(problem.old, uniform, prior)
        risk, least = (bayes_risk(e, problem.old, uniform, prior) for e in (problem.author, best))
        claims.append(zero(risk - least - ((problem.author - best) ** 2).sum(-1)))
    return Finding(
        "Theorem A.12",
        "(π_old + U)/2 has the least expected squared error if π_ω is π_old or U, equally likely",
        "any other estimate's risk is larger by its squared distance to it; for a prior w it is w π_old + (1 − w) U. "
        "Optimal for π_ω before a demonstration is seen, not for the ratio",
        tuple(claims),
    )


def unit_volume() -> Finding:
    problem = random_problems(COUNT, OUTCOMES)
    estimate, best = (bayes_estimate(problem.old, uniform) for uniform in (1.0, 1 / OUTCOMES))
    risk, least = (bayes_risk(e, problem.old, 1 / OUTCOMES) for e in (estimate, best))
    at, at_vocabulary = (peak(from_estimate(uniform=uniform))[0] for uniform in (1.0, 1 / VOCABULARY))
    return Finding(
        "Assumption A.13",
        "U = 1, so (p_old + 1)/2 estimates π_ω for a token",
        f"over {OUTCOMES} tokens it sums to {estimate.sum(-1).mean():g}, and its risk is {(risk / least).median():.0f} "
        f"times the least (median). U = 1/V is a distribution; with V = {VOCABULARY:,} updates are larger for less "
        f"likely tokens down to p = {at_vocabulary:.4f}, with U = 1 down to p = {at:.3f} only",
        (zero(estimate.sum(-1) - 1),),
    )


def bounded() -> Finding:
    grid = torch.logspace(-9, 0, 400, dtype=torch.float64)
    p, old = (t.flatten() for t in torch.meshgrid(grid, grid, indexing="ij"))
    most = from_objective(Objective(gamma=0.0))(p, old, p).max()
    known = from_objective(Objective(gamma=0.0), known=True)(p, old, torch.full_like(p, 1e-6)).max()
    return Finding(
        "Remark A.14",
        "the uniform part bounds the denominator below and the weight above",
        f"4p/(3p_old + 1) ≤ 4: at most {most:.3f} for p and p_old from 1e-9 to 1. With U = 1/V the bound is 4V. "
        f"A known π_ω leaves 2p/p_old alone: {known:.0e} at p_ω = 1e-6",
        (bool(most <= 4),),
    )


def tokens_for_trajectories() -> Finding:
    """Trajectories of two tokens: a problem for the first token, and one for the second after each first token."""
    first = random_problems(COUNT, OUTCOMES)
    second = random_problems(COUNT, OUTCOMES, OUTCOMES, seed=1)
    policy, old, author = ((a[..., None] * b).flatten(-2) for a, b in zip(first[:3], second[:3], strict=True))
    whole = Problem(policy, old, author, second.reward.flatten(-2))
    sampled = mixture((whole.author, whole.old), (0.5, 0.5))
    weights = mis(whole), mis(first)[..., None].expand_as(second.reward).flatten(-2), mis(second).flatten(-2)
    trajectory, *tokens = (bias(whole, weight, sampled).abs().mean() for weight in weights)
    return Finding(
        "eq. 4",
        "tokens may have the weight that the appendix gives to trajectories",
        f"trajectories of two tokens from the mixture: with their own weight |bias| is {trajectory:.3f} on average, "
        f"with the first token's {tokens[0]:.3f}, with the second token's {tokens[1]:.3f}",
        tuple(zero(found) for found in tokens),
    )


def exploration_gradient() -> Finding:
    p = torch.tensor([0.001, 0.05, 0.95], dtype=torch.float64)
    weight, found = exploration_weight(p.log(), 0.5), PAPER(p, p, p)
    left_out = ", ".join(f"{ratio:.3f}" for ratio in (found / weight).tolist())
    return Finding(
        "Lemma B.1",
        "C is constant in the gradient, which is A·C·∇log π_θ",
        f"with C constant it is A·r·C·∇log π_θ. The lemma leaves out r, which is {left_out} at p = .001, .05, .95",
        (zero(found - 4 * p / (3 * p + 1) * (1 - p) ** 0.5), zero(found - weight)),
    )


def adaptive_focusing() -> Finding:
    p = torch.linspace(1e-3, 1, 1000, dtype=torch.float64)
    alone, whole = exploration_weight(p.log(), 0.5), PAPER(p, p, p)
    (at, most), (at_logit, _) = peak(PAPER), peak(from_objective(Objective(gamma=1.5)))
    return Finding(
        "Theorem B.2",
        "updates are larger for less likely tokens, and keep their magnitude as p → 0",
        f"true of C = (1 − p)^½ alone. The coefficient 4p/(3p + 1)·C of the update goes to 0 with p ({whole[0]:.4f} at "
        f".001) and is greatest, {most:.3f}, at p = {at:.3f}; on the token's logit, times 1 − p, at p = {at_logit:.3f}",
        (bool((alone.diff() < 0).all()), bool((whole.diff() < 0).all())),
    )


STATEMENTS: tuple[Callable[[], Finding], ...] = (
    proxy_formula,
    proxy_iff,
    proxy_iff_for_all,
    support_formula,
    support_iff,
    ratio_variance,
    unbiased,
    controlled_bias,
    overcomes_support,
    variance_robustness,
    bayes_optimal,
    unit_volume,
    bounded,
    tokens_for_trajectories,
    exploration_gradient,
    adaptive_focusing,
)
