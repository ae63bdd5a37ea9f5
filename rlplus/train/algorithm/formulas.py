"""The formulas of learners beside the policy.

PPO's critic: advantages from values, and the value loss. PRIME: token rewards from a model that is trained on outcomes
alone (arXiv 2502.01456).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def generalized_advantages(
    rewards: Sequence[float],
    values: Sequence[Tensor],
    *,
    gamma: float,
    gae_lambda: float,
    token_rewards: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Generalized advantage estimates of responses (arXiv 1506.02438).

    A_t = sum over k of (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token.

    rewards: one per response, given at its last token. token_rewards: (T,) per response, further rewards of its tokens.
    values: (T,) per response, V of the state before each token. Returns (T,) float64 per response; A + V is the target
    of V.
    """
    if not values:
        return []
    value = pad_sequence([v.double().flip(0) for v in values])  # (T, B), last tokens first
    advantage = gamma * value.roll(1, 0) - value
    advantage[0] = torch.tensor(rewards, dtype=torch.float64) - value[0]
    if token_rewards is not None:
        advantage += pad_sequence([r.double().flip(0) for r in token_rewards])
    for t in range(1, len(advantage)):
        advantage[t] += gamma * gae_lambda * advantage[t - 1]
    return [advantage[: len(v), i].flip(0) for i, v in enumerate(values)]


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, token_weight: Tensor, clip: float) -> Tensor:
    """1/2 sum over tokens of token_weight max((V - R)^2, (V' - R)^2), V' = V within `clip` of old_value. All (N,).

    With the larger of both errors, a value that has moved by more than `clip` towards its return has no gradient
    (OpenAI's implementation of PPO; Open-Reasoner-Zero).
    """
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    errors = torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)
    return (token_weight * errors).sum() / 2


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
