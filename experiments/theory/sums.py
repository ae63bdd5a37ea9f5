"""Estimators of J = E[R] under a policy, from outcomes of other policies: bias and variance as exact sums.

Outcomes stand for the trajectories of the paper. All tensors are (..., outcomes) float64; a sum removes the last
dimension. Lemmas, theorems and remarks have the numbers of its appendix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Problem(NamedTuple):
    """Policies and the reward of each outcome, (..., outcomes) each.

    policy: π_θ, to be improved; old: π_θold, which sampled the rollouts; author: π_ω, which wrote the demonstrations.
    """

    policy: Tensor
    old: Tensor
    author: Tensor
    reward: Tensor


def random_problems(*shape: int, distance: float = 2.0, missing: int = 0, seed: int = 0) -> Problem:
    """Problems of that shape, the last of it outcomes, the same ones on every machine.

    The old policy's logits are standard normal, and the policy's and the author's differ from them by normal steps of
    deviation 0.1 and `distance`. Rewards are uniform in [0, 1]. The author never writes the first `missing` outcomes.
    """
    draw = np.random.default_rng(seed)
    logits, step, way = (torch.from_numpy(draw.standard_normal(shape)) for _ in range(3))
    author = (logits + distance * way).softmax(-1)
    author[..., :missing] = 0.0
    author /= author.sum(-1, keepdim=True)
    reward = torch.from_numpy(draw.random(shape))
    return Problem((logits + 0.1 * step).softmax(-1), logits.softmax(-1), author, reward)


def independent_problems(*shape: int, seed: int = 0) -> Problem:
    """Problems of that shape whose three policies have nothing in common: each uniform over all distributions."""
    draw = np.random.default_rng(seed)
    policy, old, author = (torch.from_numpy(draw.dirichlet([1.0] * shape[-1], shape[:-1])) for _ in range(3))
    return Problem(policy, old, author, torch.from_numpy(draw.random(shape)))


def expectation(policy: Tensor, values: Tensor) -> Tensor:
    """E[values] under the policy. Values at outcomes of probability 0 do not count, whatever they are."""
    return torch.where(policy > 0, policy * values, 0.0).sum(-1)


def variance(policy: Tensor, values: Tensor) -> Tensor:
    return expectation(policy, (values - expectation(policy, values)[..., None]) ** 2)


def chi_squared(policy: Tensor, other: Tensor) -> Tensor:
    """χ²(policy ‖ other) = Σ (policy − other)² / other; inf where only `other` is 0."""
    return torch.where(policy == other, 0.0, (policy - other) ** 2 / other).sum(-1)


def mixture(behaviors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Σ α_k π_k, for shares α_k that sum to 1."""
    return sum((share * behavior for share, behavior in zip(shares, behaviors, strict=True)), torch.zeros(()))


def balance(policy: Tensor, behaviors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The balance heuristic π_θ / Σ α_k π_k (Theorem A.10)."""
    return policy / mixture(behaviors, shares)


def bias(problem: Problem, weight: Tensor, sampled: Tensor) -> Tensor:
    """E[weight · R] under the policy that was sampled, less J."""
    return expectation(sampled, weight * problem.reward) - expectation(problem.policy, problem.reward)


def proxy_bias(problem: Problem) -> Tensor:
    """The bias of the weight π_θ / π_θold on demonstrations, as Lemma A.5 gives it."""
    return (problem.policy * problem.reward * (problem.author / problem.old - 1)).sum(-1)


def worst_proxy_bias(problem: Problem) -> Tensor:
    """The largest absolute bias of π_θ / π_θold on demonstrations over all rewards in [0, 1].

    It is reached by a reward of 1 where π_ω is above π_θold and 0 elsewhere, or the reverse.
    """
    parts = problem.policy * (problem.author / problem.old - 1)
    return torch.maximum(parts.clamp(min=0).sum(-1), -parts.clamp(max=0).sum(-1))


def support_bias(problem: Problem) -> Tensor:
    """The bias of the weight π_θ / π_ω on demonstrations, as Lemma A.6 gives it: the reward the author cannot reach."""
    return -torch.where(problem.author == 0, problem.policy * problem.reward, 0.0).sum(-1)


def mis_factor(problem: Problem) -> Tensor:
    """(π_ω − π_θold) / (π_ω + π_θold), each outcome's share of the bias of eq. 4 (Remark A.8)."""
    return (problem.author - problem.old) / (problem.author + problem.old)


def mis_bias(problem: Problem) -> Tensor:
    """The bias of eq. 4 on demonstrations, with the factor of Remark A.8."""
    return (problem.policy * problem.reward * mis_factor(problem)).sum(-1)


def mis(problem: Problem) -> Tensor:
    """The weight of eq. 4 with the true π_ω: the balance heuristic with shares of 1/2."""
    return balance(problem.policy, (problem.author, problem.old), (0.5, 0.5))


def bayes_estimate(old: Tensor, uniform: Tensor | float, prior: float = 0.5) -> Tensor:
    """The estimate of π_ω by Theorem A.12: prior · π_θold + (1 − prior) · U. The paper's prior is 1/2."""
    return prior * old + (1 - prior) * uniform


def bayes_risk(estimate: Tensor, old: Tensor, uniform: Tensor | float, prior: float = 0.5) -> Tensor:
    """The expected squared error of an estimate if π_ω is π_θold with probability `prior`, else U (Theorem A.12)."""
    return prior * ((estimate - old) ** 2).sum(-1) + (1 - prior) * ((estimate - uniform) ** 2).sum(-1)


def without(direction: Tensor, *others: Tensor) -> Tensor:
    """The part of a direction that is orthogonal to all others."""
    basis = torch.linalg.qr(torch.stack(others, -1)).Q
    return direction - (basis @ (basis.mT @ direction[..., None])).squeeze(-1)


def unbiased_author(problem: Problem, direction: Tensor) -> Tensor:
    """An author who differs from the old policy, and whose demonstrations the weight π_θ / π_θold leaves unbiased.

    direction (..., outcomes): where to go from the old policy, along the part orthogonal to 1 (the sum stays 1) and to
    π_θ R / π_θold (the bias stays 0), and nine tenths of the way to the first probability of 0.
    """
    slope = problem.policy * problem.reward / problem.old
    step = without(direction, torch.ones_like(slope), slope)
    room = torch.where(step < 0, -problem.old / step, torch.inf).amin(-1, keepdim=True)
    return problem.old + 0.9 * room * step
