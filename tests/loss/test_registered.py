"""Token losses that users register, as internal surrogates."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from head_cases import sample
from torch import Tensor

from rlplus import Objective, linear_policy_loss, policy_loss, register_token_loss
from rlplus.loss import TokenConstants
from rlplus.loss.backends import native
from rlplus.loss.objective.surrogates import INTERNAL

CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
MODULE = """
def ratio(logprob, constants):
    loss = -constants.advantage * (logprob - constants.old_logprob).exp()
    return loss, loss
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    built_in = dict(INTERNAL)
    yield
    INTERNAL.clear()
    INTERNAL.update(built_in)


def ratio(logprob: Tensor, c: TokenConstants) -> tuple[Tensor, Tensor]:
    assert c.old_logprob is not None
    loss = -c.advantage * (logprob - c.old_logprob).exp()
    return loss, loss


def detached_ratio(logprob: Tensor, c: TokenConstants) -> tuple[Tensor, Tensor]:
    slope = ratio(logprob, c)[1]
    return slope * logprob, slope


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("backend", ["reference", "torch", CPP])
def test_is_used_like_a_built_in_one(backend: str, old: bool) -> None:
    """The same formula as "ratio", so the same numbers, with everything else that an objective has."""
    register_token_loss("mine", ratio)
    fields = {"kl_coef": 0.3, "entropy_coef": 0.2, "mismatch_cap": 1.5}
    results = []
    for internal in ("ratio", "mine"):
        head, constants = sample(13, dtype=torch.float32)
        leaves = [head[k].requires_grad_() for k in ("hidden", "weight", "bias")]
        constants["old_logprob"] = constants["old_logprob"] if old else None
        objective = Objective(internal, **fields)
        out = linear_policy_loss(**head, **constants, objective=objective, backend=backend)
        results.append((out.loss, *torch.autograd.grad(out.loss, leaves)))
    for got, want in zip(*reversed(results), strict=True):
        assert torch.equal(got, want)


def test_weights_and_advantages_of_0_leave_tokens_out() -> None:
    def infinite(logprob: Tensor, c: TokenConstants) -> tuple[Tensor, Tensor]:
        return torch.full_like(logprob, torch.inf), torch.full_like(logprob, torch.nan)

    register_token_loss("infinite", infinite, check_slope=False)
    logprob = -torch.ones(3, requires_grad=True)
    constants = {"advantage": torch.tensor([0.0, 1.0, 1.0]), "token_weight": torch.tensor([1.0, 0.0, 1.0])}
    constants |= {"external": torch.tensor([False, False, True]), "old_logprob": None}
    loss, _ = policy_loss(logprob, **constants, objective=Objective("infinite", "nll", gamma=0.0))
    assert loss == 1
    assert torch.autograd.grad(loss, logprob)[0].tolist() == [0, 0, -1]


def test_the_slope_is_checked() -> None:
    def wrong(logprob: Tensor, c: TokenConstants) -> tuple[Tensor, Tensor]:
        loss, slope = ratio(logprob, c)
        return loss, 1.01 * slope

    with pytest.raises(ValueError, match=r"'wrong': want slope the derivative of loss; got .* finite differences give"):
        register_token_loss("wrong", wrong)
    with pytest.raises(ValueError, match="check_slope=False for a loss that holds a factor constant"):
        register_token_loss("detached", detached_ratio)
    register_token_loss("detached", detached_ratio, check_slope=False)
    assert Objective("detached").internal == "detached"
    with pytest.raises(ValueError, match=r"want loss like logprob, torch.float64 \(64,\); got torch.float64 \(\)"):
        register_token_loss("mean", lambda logprob, c: (logprob.mean(), logprob))
    with pytest.raises(ValueError, match=r"want slope like logprob, .*; got float"):
        register_token_loss("number", lambda logprob, c: (logprob, 1.0))


def test_names_are_new_and_known() -> None:
    register_token_loss("mine", ratio)
    for taken in ("mine", "clip"):
        with pytest.raises(ValueError, match=f"want a new name for a token loss; got '{taken}'"):
            register_token_loss(taken, ratio)
    with pytest.raises(ValueError, match=r"internal surrogate one of ratio, .*, mine; got 'mine2'; nearest: mine"):
        Objective("mine2")


def test_a_module_is_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert Objective("own_losses:ratio").internal in INTERNAL
    with pytest.raises(ValueError, match=r"'own_losses:ratios': want module:function; .*no attribute 'ratios'"):
        Objective("own_losses:ratios")
    with pytest.raises(ValueError, match="'nowhere:ratio': want module:function; No module named 'nowhere'"):
        Objective("nowhere:ratio")


def test_triton_refuses_it() -> None:
    register_token_loss("mine", ratio)
    head, constants = sample(4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"backend 'triton' has built-in token losses only: .*; got internal 'mine'"):
        linear_policy_loss(**head, **constants, objective=Objective("mine"), backend="triton")
