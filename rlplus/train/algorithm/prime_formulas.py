"""PRIME: token rewards from a model that is trained on outcomes alone (arXiv 2502.01456)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def process_advantages(outcomes: Sequence[float], scores: Sequence[Tensor]) -> list[Tensor]:
    """Advantages of a group's tokens: the sum of rewards from each token to the end, (T,) float64 per response.

    outcomes: one reward per response, given at its last token. scores: process rewards (T,) of its tokens. The
    leave-one-out baseline of each kind is subtracted first. A group of one has no baseline; its advantages are 0.
    """
    rewards = _leave_one_out([score.double() for score in scores])
    ends = _leave_one_out([torch.tensor([outcome], dtype=torch.float64) for outcome in outcomes])
    for reward, end in zip(rewards, ends, strict=True):
        reward[-1] += end[0]
    return [reward.flip(0).cumsum(0).flip(0) for reward in rewards]


def _leave_one_out(rewards: Sequence[Tensor]) -> list[Tensor]:
    """n / (n - 1) r_t - sum of all n responses' mean rewards / (n - 1): for one reward each, r - mean of the others."""
    others = len(rewards) - 1
    if not others:
        return [torch.zeros_like(reward) for reward in rewards]
    baseline = sum(float(reward.mean()) for reward in rewards) / others
    return [reward * (1 + 1 / others) - baseline for reward in rewards]


def outcome_loss(score: Tensor, outcome: Tensor, token_weight: Tensor, sequence: Tensor, beta: float) -> Tensor:
    """Binary cross-entropy of sigmoid(beta * sum of scores) and the outcome. A sequence's weight is its tokens' sum.

    score, outcome (the same for a sequence's tokens, in [0, 1]), token_weight (N,); sequence (N,) int64.
    """
    count = int(sequence.max()) + 1
    logit, weight, right = (
        torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequence, values)
        for values in (beta * score, token_weight, token_weight * outcome)
    )
    return (weight * torch.nn.functional.softplus(logit) - right * logit).sum()
