"""Tokens with a probability of nearly 1: what is proportional to 1 - p keeps its digits on every backend, in fp32."""

import math

import pytest
import torch
from head_bounds import CPP, DEVICE

from rlplus import linear_logprob, linear_policy_loss

V = 300
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch", CPP, "triton"])


def exact(gap: float) -> tuple[float, float]:
    """1 - p and the entropy, where every other logit is `gap` below the target's."""
    rest = (V - 1) * math.exp(-gap)
    return rest / (1 + rest), math.log1p(rest) + gap * rest / (1 + rest)


@BACKENDS
@pytest.mark.parametrize("gap", [10.0, 21.8, 30.0])
def test_nothing_of_1_minus_p_is_lost(backend: str, gap: float) -> None:
    """1 - p of 1e-2, 1e-7 and 3e-11: logprob, entropy, and dhidden, whose first column is the logits' gradient."""
    hidden = torch.zeros(3, V)
    hidden[torch.arange(3), torch.tensor([0, 7, V - 1])] = gap
    device = DEVICE.get(backend, "cpu")
    target = torch.tensor([0, 7, V - 1]).to(device)
    hidden, weight = hidden.to(device).requires_grad_(), torch.eye(V, device=device)
    rest, entropy = exact(gap)
    options = {"backend": backend} | ({} if backend == "reference" else {"max_scratch_mb": 0.01})
    logprob, found = linear_logprob(hidden, weight, target, **options)
    torch.testing.assert_close(logprob.detach().cpu(), torch.full((3,), math.log1p(-rest)), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.detach().cpu(), torch.full((3,), entropy), rtol=1e-4, atol=0)
    row = {"advantage": torch.ones(3), "token_weight": torch.ones(3), "external": torch.zeros(3, dtype=torch.bool)}
    row["old_logprob"] = logprob.detach().cpu()
    out = linear_policy_loss(hidden, weight, target, **{k: v.to(target.device) for k, v in row.items()}, **options)
    (dhidden,) = torch.autograd.grad(out.loss, [hidden])
    own = dhidden.gather(1, target[:, None])[:, 0].cpu()
    torch.testing.assert_close(own, torch.full((3,), -rest), rtol=1e-4, atol=0)
