"""The arguments of the Triton kernel of the objective, from constants of tokens and an objective."""

import torch
from torch import Tensor

from rlplus.kernels import policy_loss as token_kernels
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import TokenConstants


def columns(c: TokenConstants) -> tuple[Tensor, token_kernels.Given]:
    """The per-token constants as one (N, 8) tensor, and which of the optional ones are given."""
    given = token_kernels.Given(c.old_logprob is not None, c.behavior_logprob is not None, c.engine_logprob is not None)
    filled = c._replace(
        external=c.external.to(c.advantage.dtype),
        entropy_weight=c.token_weight if c.entropy_weight is None else c.entropy_weight,
    )
    absent = torch.zeros_like(c.advantage)
    return torch.stack([absent if x is None else x for x in filled], 1), given


def choices(objective: Objective) -> token_kernels.Choices:
    if objective.internal not in token_kernels.INTERNAL:
        raise ValueError(
            "backend 'triton' has built-in token losses only: want backend reference, torch or cpp for the registered "
            f"one; got internal {objective.internal!r}"
        )
    return token_kernels.Choices(*(getattr(objective, name) for name in token_kernels.Choices._fields))


def coefficients(objective: Objective) -> token_kernels.Coefficients:
    values = (getattr(objective, name) for name in token_kernels.Coefficients._fields)
    return token_kernels.Coefficients(*(float("inf") if v is None else float(v) for v in values))
