"""Sequences for fused heads, and what a model's own logits give for them."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TEMPERATURE = 0.7
IDS = torch.tensor([[5, 9, 12, 30, 31, 22, 8], [3, 44, 17, 2, 50, 6, 1]])
TARGETS = torch.full_like(IDS, -100)
TARGETS[0, 1:-1], TARGETS[1, 3:5] = IDS[0, 2:], IDS[1, 4:6]
ON = TARGETS != -100


def logprob_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """From whole logits, 0 where there is no target."""
    logp = (logits / TEMPERATURE).log_softmax(-1)
    logprob = logp.gather(-1, TARGETS.clamp(min=0)[..., None])[..., 0]
    return logprob * ON, -(logp.exp() * logp).sum(-1) * ON


def slopes() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(IDS.shape, generator=g), torch.randn(IDS.shape, generator=g)


def loss_of(logprob: Tensor, entropy: Tensor) -> Tensor:
    a, b = slopes()
    return (a * logprob + b * entropy).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    """By name, cleared."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    model.zero_grad(set_to_none=True)
    return found


def expected(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logprob, entropy = logprob_and_entropy(model(input_ids=IDS).logits)
    loss_of(logprob, entropy).backward()
    return logprob, entropy, gradients(model)


def close(got: Any, want: Any) -> None:
    dtype = torch.float64 if isinstance(want, Tensor) else None
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if (dtype is None or want.dtype == torch.float32) else {}
    torch.testing.assert_close(got, want, check_dtype=False, **tolerance)
