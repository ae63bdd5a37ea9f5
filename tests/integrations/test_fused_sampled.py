"""`fuse_head(..., backward="sampled")`: the mean of many gradients of a model's weights is the exact gradient."""

import copy
import math

import pytest
import torch
from causal_lms import make
from fused_heads import IDS, TARGETS, gradients, loss_of
from torch import Tensor

from rlplus import Objective
from rlplus.integrations.transformers import fuse_head

DRAWS = 48


def sharp_model(tied: bool) -> torch.nn.Module:
    """In float64, so that the noise of the draws is all there is. Most of its probabilities are small ones."""
    model = make("Qwen2", {"vocab_size": 4000, "tie_word_embeddings": tied}).double()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.6)
    return model


def gradient(model: torch.nn.Module, policy: bool) -> dict[str, Tensor]:
    model.zero_grad()
    if policy:
        on = (TARGETS >= 0).double()
        given = {"advantage": torch.tensor([1.5, -0.5]), "token_weight": on / on.sum()}
        model(input_ids=IDS, targets=TARGETS, policy={"objective": Objective("clip"), **given}).loss.backward()
    else:
        out = model(input_ids=IDS, targets=TARGETS)
        loss_of(out.logprob, out.entropy).backward()
    return {name: each.clone() for name, each in gradients(model).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policy", [False, True])
def test_the_mean_over_draws_is_the_exact_gradient_of_every_weight(tied: bool, policy: bool) -> None:
    """The squared error of the mean of K draws has the expectation variance / K, with the variance that is measured."""
    model = sharp_model(tied)
    want = gradient(fuse_head(copy.deepcopy(model), backend="torch", backward="exact"), policy)
    fused = fuse_head(model, backend="torch", backward="sampled")
    torch.manual_seed(0)
    draws = [gradient(fused, policy) for _ in range(DRAWS)]
    ratios = []
    for name, exact in want.items():
        each = torch.stack([draw[name] for draw in draws])
        variance = each.var(0).sum()
        assert variance > 1e-8 * exact.square().sum(), f"{name}: nothing was drawn"
        ratios.append(float((each.mean(0) - exact).square().sum() / (variance / DRAWS)))
        # One direction of noise would be a chi-square of one degree: 16 is four deviations.
        assert ratios[-1] < 16, (name, ratios[-1])
    assert sum(ratios) / len(ratios) < 1 + 3 * math.sqrt(2)


def test_a_seed_of_torch_repeats_the_gradient() -> None:
    fused = fuse_head(sharp_model(tied=False), backend="torch", backward="sampled")
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(gradient(fused, policy=False))
    for name, first in found[0].items():
        assert torch.equal(first, found[1][name]), name
        assert not torch.equal(first, found[2][name]), name
