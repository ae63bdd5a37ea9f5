"""Rows that cannot have a gradient, whatever the policy is: they are left out before the logits are known."""

import pytest
import torch
from closed_form import FEATURES, all_objectives, sample_constants

from rlplus import Objective
from rlplus.loss import TokenConstants, token_loss
from rlplus.loss.objective.tokens import may_have_gradient

N = 400


def constants(seed: int) -> TokenConstants:
    """Every third token has no advantage, weight or weight of the entropy."""
    found = sample_constants((N,), seed, torch.float64)
    for i, name in enumerate(("advantage", "token_weight", "entropy_weight")):
        found[name][torch.arange(N) % 7 == i] = 0.0
        found[name][torch.arange(N) % 3 == i] = 0.0
    return TokenConstants(**found)


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["plain", "kl", "mask", "all"]))
def test_a_row_that_is_left_out_never_has_a_gradient(internal: str, external: str, features: str) -> None:
    objective, seen = Objective(internal, external, **FEATURES[features]), torch.zeros(N, dtype=torch.bool)
    c = constants(len(internal))
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        logprob, entropy = -4 * torch.rand(N, generator=g).double(), torch.rand(N, generator=g).double()
        out = token_loss(logprob, entropy, c, objective)
        seen |= (out.dlogprob != 0) | (out.dentropy != 0)
    may = may_have_gradient(c, objective)
    assert not (seen & ~may).any()
    assert (may & ~seen).sum() <= N / 4  # clipped or masked five times


def test_rows_of_advantage_0_are_left_out() -> None:
    """But for demonstrations that no advantage weighs."""
    c = constants(0)
    silent = (c.advantage == 0) | (c.token_weight == 0)
    assert torch.equal(may_have_gradient(c, Objective("clip", "mis")), ~silent)
    sft = may_have_gradient(c, Objective("clip", "nll"))
    assert torch.equal(sft, torch.where(c.external, c.token_weight != 0, ~silent))
    assert torch.equal(may_have_gradient(c, Objective("clip", "none")), ~silent & ~c.external)
