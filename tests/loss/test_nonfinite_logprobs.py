"""A logprob of the policy that is no number makes the loss none, whatever the objective."""

import math
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives, sample_constants
from torch import Tensor

from rlplus import Objective, policy_loss


def sample(n: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """logprob, entropy and constants of n tokens."""
    logprob, entropy = torch.rand(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return -4 * logprob, 3 * entropy, sample_constants((n,), 0, torch.float64)


def run(logprob: Tensor, entropy: Tensor, constants: dict[str, Any], objective: Objective) -> tuple[Tensor, Tensor]:
    """loss, and the gradient of logprob."""
    leaf = logprob.clone().requires_grad_()
    options = {"old_logprob": None} | constants
    loss, _ = policy_loss(leaf, entropy=entropy, objective=objective, **options)
    return loss, torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]


@pytest.mark.parametrize("old", [None, -1.0])
def test_a_logprob_of_nan_in_a_row_that_counts_is_never_a_finite_loss(old: float | None) -> None:
    """Whatever the objective and the kind of token: who looks at the loss alone must see it."""
    for internal, external, features in all_objectives():
        objective = Objective(internal, external, **FEATURES[features])
        logprob, entropy, constants = sample(20)
        constants |= {name: torch.ones(20).double() for name in ("advantage", "token_weight")}
        if old is not None:  # no mismatch removes the token
            constants["old_logprob"] = constants["engine_logprob"] = old * torch.ones(20).double()
        else:
            constants["old_logprob"] = None
        for is_external in (False, True):
            if is_external and external == "none":
                continue
            spoilt = logprob.index_fill(0, (constants["external"] == is_external).nonzero()[0], math.nan)
            loss, dlogprob = run(spoilt, entropy, constants, objective)
            assert loss.isnan(), objective
            reinforced = not is_external and internal == "reinforce"  # its slope is -advantage, whatever the logprob
            assert reinforced or (is_external and external == "nll") or dlogprob[spoilt.isnan()].isnan(), objective


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_the_ratio_to_an_infinite_logprob_of_the_current_policy_is_no_number(infinite: float) -> None:
    logprob = torch.tensor([-1.0, infinite], dtype=torch.float64)
    constants = {"advantage": torch.ones(2).double(), "token_weight": torch.ones(2).double()}
    for name in ("grpo", "rlplus", "cispo", "sapo"):
        plain = (logprob - logprob.detach()).exp()  # as PyTorch has it
        assert plain[1].isnan()
        assert run(logprob, torch.ones(2).double(), constants, Objective.preset(name))[0].isnan(), name
