"""The formulas of PPO's critic: advantages from values, and the value loss."""

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
