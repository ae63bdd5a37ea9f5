"""Advantage estimators besides the group-relative one: leave-one-out, batch-whitened, pass@k and others."""

from math import comb
from typing import get_args

import torch
from torch import Tensor

from rlplus.common.errors import check_name
from rlplus.loss.objective.inputs import check_tensor
from rlplus.loss.objective.objective import AdvantageEstimator
from rlplus.loss.objective.weights import group_advantages


def batch_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    estimator: AdvantageEstimator,
    *,
    include: Tensor | None = None,
    tokens: Tensor | None = None,
    k: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Advantages (n,) float64 of a whole batch, all ranks and micro-batches.

    rewards (n,) floating; group_ids (n,) int64; include (n,) bool or None: which rows enter the statistics. mean and n
    are a row's group's, std has n - 1 in its denominator, and whiten(x) = (x - mean of x) / (std of x + eps)
    over the batch, in which a response counts once per token; tokens (n,) int64 is required there. The estimators:

    - "group": group_advantages(normalize_std=False), R - mean.
    - "leave-one-out": R - mean of the others, RLOO (Ahmadian et al., arXiv 2402.14740).
    - "batch": whiten(R), REINFORCE++ (arXiv 2501.03262).
    - "group-batch": whiten(R - mean), REINFORCE++ with baseline.
    - "batch-std": (R - mean) / (std of R over the batch + eps), TRL's scale_rewards="batch".
    - "mean": (R - mean) / mean, 0 where the mean is not above 0, maximum likelihood RL.
    - "pass@k": pass@k training (arXiv 2508.10751). The mean over all subsets of k responses of the group that contain
      this one of (1 if one of them is right, else 0) - pass@k, over the standard deviation sqrt(pass@k (1 - pass@k)).
      Right is a reward of 1 or more. 0 where pass@k is 0 or 1. In a group of fewer than k responses, because some were
      left out, k is their number.

    Raises ValueError as group_advantages does, for another estimator, for missing tokens, and for k below 1.
    """
    check_name("estimator", estimator, get_args(AdvantageEstimator))
    centred = group_advantages(rewards, group_ids, normalize_std=False, include=include).double()
    R = rewards.double()
    on = torch.ones_like(rewards, dtype=torch.bool) if include is None else include
    if estimator == "group":
        return centred
    if estimator in ("batch", "group-batch"):
        if tokens is None:
            raise ValueError(f"want tokens for advantages {estimator}: a response counts as often as it has some")
        if isinstance(tokens, Tensor) and bool((tokens < 0).any()):
            raise ValueError(f"want tokens of 0 or more; got {int(tokens.min())}")
        weight = check_tensor("tokens", tokens, (rewards.shape, rewards.device), dtype=torch.int64) * on
        return _whiten(R if estimator == "batch" else centred, weight.double(), eps)
    if estimator == "batch-std":
        return centred / (R[on].std() + eps) if on.sum() > 1 else centred
    groups, group = group_ids.unique(return_inverse=True)
    size = torch.bincount(group[on], minlength=len(groups))
    if estimator == "leave-one-out":
        others = (size.double() / (size - 1).clamp(min=1))[group]
        return torch.where(on, centred * others, centred)
    alone = (size < 2)[group]  # nothing to compare with: R, as of `group_advantages`
    if estimator == "mean":
        mean = R - centred
        return torch.where(alone, centred, torch.where(mean > 0, centred / mean, 0.0))
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"want k an integer of at least 1; got {k}")
    solved = torch.bincount(group[on & (R >= 1)], minlength=len(groups))
    values = torch.tensor([_pass_at_k(int(n), int(c), k) for n, c in zip(size, solved, strict=True)], dtype=R.dtype)
    right, wrong = values.view(len(groups), 2).to(R.device)[group].unbind(1)
    return torch.where(alone, centred, torch.where(R >= 1, right, wrong))


def _whiten(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    count = weight.sum()
    if count < 2:
        return torch.zeros_like(values)
    mean = (weight * values).sum() / count
    variance = (weight * (values - mean) ** 2).sum() / (count - 1)
    return (values - mean) / (variance.sqrt() + eps)


def _pass_at_k(n: int, solved: int, k: int) -> tuple[float, float]:
    """The advantages of a right and of a wrong response in a group of n."""
    k = min(k, n)
    missed = comb(n - solved, k) / comb(n, k)  # the share of k responses without a right one: 1 - pass@k
    if missed in (0.0, 1.0):
        return 0.0, 0.0
    std = (missed * (1 - missed)) ** 0.5
    return missed / std, (missed - comb(n - solved - 1, k - 1) / comb(n - 1, k - 1)) / std
