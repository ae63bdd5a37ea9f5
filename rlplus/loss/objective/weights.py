"""Group-relative advantages and token weights: the factors of a token's gradient."""

from typing import get_args

import torch
from torch import Tensor

from rlplus.loss.objective.inputs import check_tensor, describe
from rlplus.loss.objective.objective import Reduction

Total = int | Tensor | tuple[int | Tensor, int | Tensor]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize_std: bool = True,
    include: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages (RL-PLUS eq. 3): (R - mean) / (std + eps), or R - mean.

    rewards (...) floating; group_ids (...) int64, any values in any order; include (...) bool or None: which rows
    enter mean and standard deviation (the others are still measured against them). Returns (...), of rewards' dtype.

    The standard deviation has n - 1 in its denominator; one of 0 counts as 1. Equal rewards give exactly 0. A group
    with fewer than two included rows has nothing to compare with: its mean is taken as 0, so A = R.
    Raises ValueError for wrong shapes and dtypes and for non-finite rewards.
    """
    check_tensor("rewards", rewards)
    check_tensor("group_ids", group_ids, (rewards.shape, rewards.device), dtype=torch.int64)
    if include is not None:
        check_tensor("include", include, (rewards.shape, rewards.device), dtype=torch.bool)
    if not rewards.isfinite().all():
        raise ValueError("want rewards finite everywhere; got NaN or Inf")
    R = rewards.reshape(-1).double()
    groups, group = group_ids.reshape(-1).unique(return_inverse=True)
    counted = torch.ones_like(R, dtype=torch.bool) if include is None else include.reshape(-1)

    def over_groups(values: Tensor, reduce: str, start: float) -> Tensor:
        out = torch.full((len(groups),), start, dtype=R.dtype, device=R.device)
        return out.scatter_reduce(0, group[counted], values[counted], reduce)

    n = over_groups(torch.ones_like(R), "sum", 0.0)
    low = over_groups(R, "amin", torch.inf)
    high = over_groups(R, "amax", -torch.inf)
    equal = low == high  # decided before anything is rounded
    mean = torch.where(equal, low, over_groups(R, "sum", 0.0) / n)
    mean = torch.where(n < 2, 0.0, mean)
    variance = over_groups((R - mean[group]) ** 2, "sum", 0.0) / (n - 1)
    advantage = R - mean[group]
    if normalize_std:
        scale = torch.where(equal | (n < 2), 1.0, variance.sqrt() + eps)
        advantage = advantage / scale[group]
    return advantage.to(rewards.dtype).view(rewards.shape)


def token_weights(
    mask: Tensor,
    reduction: Reduction = "token",
    *,
    max_length: int | None = None,
    total_tokens: Total | None = None,
    total_sequences: Total | None = None,
    sequence_ids: Tensor | None = None,
    external: Tensor | None = None,
    ranks: int = 8,
) -> Tensor:
    """Mask and normaliser in one: loss = sum over tokens of weight * token loss.

    mask (...) bool or 0/1; sequences are its rows or, when packed, given per token by sequence_ids (...) int64.
    Returns (...) fp32: 0 where masked, elsewhere, by `reduction`:

    - "token": 1 / total_tokens (DAPO; RL-PLUS here).
    - "sequence": 1 / (total_sequences * the sequence's own length) (original GRPO).
    - "constant": 1 / (total_sequences * max_length) (Dr.GRPO).
    - "official": 1 / (ranks * max_length) (the official RL-PLUS and LUFFY scripts).

    The totals span the *global* batch, all micro-batches and ranks; None means that this mask is all of it.
    A sequence counts when it has an unmasked token. With external (...) bool given, internal and external tokens have
    denominators of their own ("token", "sequence", "constant"), and given totals are pairs (internal, external).
    Raises ValueError when an input is missing or does not fit.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"want reduction one of {', '.join(get_args(Reduction))}; got {reduction!r}")
    on = _as_mask(mask)
    counts_sequences = reduction == "sequence" or (reduction == "constant" and total_sequences is None)
    ids = _sequence_ids(on, sequence_ids, needed=counts_sequences)
    if reduction in ("constant", "official") and (max_length is None or max_length < 1):
        raise ValueError(f"want max_length >= 1 for reduction {reduction!r}; got {max_length}")
    if ranks < 1:
        raise ValueError(f"want ranks >= 1; got {ranks}")
    if external is None or reduction == "official":
        kinds = [torch.ones_like(on)]
    else:
        check_tensor("external", external, (mask.shape, mask.device), dtype=torch.bool)
        kinds = [~external, external]
    totals = (
        _per_kind("total_tokens", total_tokens, len(kinds)),
        _per_kind("total_sequences", total_sequences, len(kinds)),
    )

    weight = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    for kind, tokens, sequences in zip(kinds, *totals, strict=True):
        chosen = on & kind
        if reduction == "official":
            divisor: Tensor | float = float(ranks * (max_length or 1))
        elif reduction == "token":
            divisor = chosen.sum() if tokens is None else tokens
        else:
            names, place = ids.unique(return_inverse=True)
            length = torch.bincount(place[chosen], minlength=len(names)).double()
            count = (length > 0).sum() if sequences is None else sequences
            divisor = count * (length[place] if reduction == "sequence" else float(max_length or 1))
        weight = torch.where(chosen, 1.0 / torch.as_tensor(divisor, dtype=torch.float64, device=mask.device), weight)
    return weight.float()


def _as_mask(mask: Tensor) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ValueError(f"want mask a tensor; got {describe(mask)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"want mask bool or only 0 and 1; got other values in {describe(mask)}")
    return mask != 0


def _sequence_ids(on: Tensor, sequence_ids: Tensor | None, needed: bool) -> Tensor:
    if sequence_ids is not None:
        return check_tensor("sequence_ids", sequence_ids, (on.shape, on.device), dtype=torch.int64)
    if on.ndim < 2:
        if needed:
            raise ValueError(f"want sequence_ids, or a mask (sequences, tokens); got a mask {tuple(on.shape)} alone")
        return torch.zeros_like(on, dtype=torch.int64)
    rows = on.shape[:-1]
    return torch.arange(rows.numel(), device=on.device).view(*rows, 1).expand(on.shape)


def _per_kind(name: str, value: Total | None, kinds: int) -> tuple[int | Tensor | None, ...]:
    if value is None:
        return (None,) * kinds
    values = value if isinstance(value, tuple) else (value,)
    if len(values) != kinds:
        wanted = "a pair (internal, external) with external given" if kinds == 2 else "one number"
        raise ValueError(f"want {name} {wanted}; got {value!r}")
    for number in values:
        if isinstance(number, int) and number < 0:
            raise ValueError(f"want {name} >= 0; got {number}")
    return values
