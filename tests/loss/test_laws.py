"""Every objective in every dtype, and the laws that every backend obeys."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from amx import use_amx
from closed_form import EXTERNAL, FEATURES, all_objectives
from head_bounds import (
    BF16,
    CPP,
    DEVICE,
    EVERY,
    FP16,
    FP32,
    FP64,
    GRADIENTS,
    Case,
    bits,
    check,
    dtypes_of,
    fused,
    loss_bounds,
)
from head_cases import EVERYTHING, run, sample, tensors
from torch import Tensor

from rlplus import Objective, group_advantages, linear_logprob, linear_policy_loss, policy_loss, token_weights


def ordinary(seed: int, dtype: torch.dtype = FP32, objective: Objective = EVERYTHING, n: int = 13) -> Case:
    head, constants = sample(n, V=61, seed=seed, dtype=dtype)
    return Case(head, constants, objective, (1.0, 0.7)[seed % 2], (1e-9, 3 * 16 * 61 / 1e6, None)[seed % 3], math.nan)


# ---- every objective, and what may differ


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_every_objective_in_every_dtype(backend: str, dtype: torch.dtype) -> None:
    """In fp64 and for the other backends there are separate tests."""
    for seed, (internal, external, features) in enumerate(all_objectives(["plain", "mismatch", "all"])):
        case = ordinary(seed, dtype, Objective(internal, external, **FEATURES[features]))
        check(case, fused(backend, case.head, case.constants, case.objective, **case.options), backend)


@pytest.mark.parametrize(("internal", "external", "_"), all_objectives([""]))
def test_gradcheck_of_the_definition(internal: str, external: str, _: str) -> None:
    """With gamma 0 and old_logprob given little is detached: numeric differences of the loss are its gradient.

    Along random directions of each leaf, not one number after the other, which takes ten times as long.
    """
    if internal in ("cispo", "dppo") or external == "dft":  # their weight is detached
        return
    head, constants = sample(8, V=5, seed=3)
    leaves = [head[k].requires_grad_() for k in ("hidden", "weight", "bias")]
    for features in ("no-gamma", "kl", "kl-k2", "entropy", "mismatch"):
        objective = Objective(internal, external, **(FEATURES[features] | {"gamma": 0.0, "dual_clip": 1.5}))

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor, objective: Objective = objective) -> Tensor:
            options = {"bias": bias, "objective": objective, "backend": "reference", "temperature": 0.8}
            return linear_policy_loss(hidden, weight, head["target"], **constants, **options).loss

        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


def one_token(ref: float, **fields: Any) -> dict[torch.dtype, float]:
    """The loss of a demonstrated token with the logprob -1e-6, in both dtypes."""
    losses = {}
    for dtype in (FP32, FP64):
        logprob = torch.tensor([-1e-6], dtype=FP32).to(dtype)
        constants = {k: torch.ones(1, dtype=dtype) for k in ("advantage", "token_weight")}
        constants |= {"old_logprob": logprob, "external": torch.tensor([True])}
        constants["ref_logprob"] = torch.tensor([ref], dtype=FP32).to(dtype)
        losses[dtype] = policy_loss(logprob, objective=Objective(**fields), **constants)[0].item()
    return losses


def test_the_exploration_weight_is_accurate_near_p_1() -> None:
    loss = one_token(-1.0)
    assert loss[FP32] == pytest.approx(loss[FP64], rel=1e-6)


def test_the_kl_term_is_accurate_near_0() -> None:
    loss = one_token(-1e-3, external="none", kl_coef=1.0)
    assert loss[FP32] == pytest.approx(loss[FP64], rel=1e-3)


@pytest.mark.parametrize("amx", [False, True], ids=["this CPU", "AMX"])
@pytest.mark.parametrize("backend", [CPP])
def test_bf16_gradients_are_rounded_without_bias(backend: str, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if amx:
        use_amx(monkeypatch)
    g = torch.Generator().manual_seed(0)
    V, target = 3000, torch.tensor([7])
    bias, hidden = torch.randn(V, generator=g).bfloat16().requires_grad_(), torch.zeros(1, 2, dtype=BF16)
    logprob, _ = linear_logprob(hidden, torch.zeros(V, 2, dtype=BF16), target, bias=bias, backend=backend)
    (slope,) = torch.autograd.grad(logprob.sum(), bias)
    others = torch.arange(V) != 7
    want = -bias.detach().double().softmax(0)[others]
    assert (slope[others].double().sum() - want.sum()).abs() <= torch.finfo(BF16).eps / 16 * want.abs().sum()


# ---- laws


def same(got: dict[str, Any], want: dict[str, Any], case: Case) -> None:
    """Both may be off by what rounding explains."""
    bounds = loss_bounds(case, torch.finfo(want["loss"].dtype).eps)
    for name, value in tensors(got).items():
        error = (value - tensors(want)[name]).abs()
        assert (error <= 2 * bounds[name]).all(), f"{name}: {error.max():.2e}, bound {2 * bounds[name].max():.2e}"


@EVERY
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_tokens_and_of_the_vocabulary_does_not_matter(backend: str, seed: int) -> None:
    case = ordinary(seed)
    want = fused(backend, case.head, case.constants, case.objective, **case.options)
    g = torch.Generator().manual_seed(seed)
    rows, words = torch.randperm(13, generator=g), torch.randperm(61, generator=g)
    head = {"hidden": case.head["hidden"][rows], "target": words.argsort()[case.head["target"][rows]]}
    head |= {k: case.head[k][words] for k in ("weight", "bias")}
    got = fused(backend, head, {k: v[rows] for k, v in case.constants.items()}, case.objective, **case.options)
    back = {k: got[k][rows.argsort()] for k in ("logprob", "entropy", "dhidden")}
    same(got | back | {k: got[k][words.argsort()] for k in ("dweight", "dbias")}, want, case)


@EVERY
@pytest.mark.parametrize("shift", [-40.0, 3.0])
def test_a_shift_of_all_logits_changes_nothing(backend: str, shift: float) -> None:
    case = ordinary(1)
    want = fused(backend, case.head, case.constants, case.objective)
    head = case.head | {"bias": case.head["bias"] + shift}
    same(fused(backend, head, case.constants, case.objective), want, replace(case, head=head, temperature=1.0))


@EVERY
@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_micro_batches_add_up(backend: str, seed: int) -> None:
    case = ordinary(seed)
    whole = fused(backend, case.head, case.constants, case.objective, temperature=case.temperature)
    for mb in (1e-9, 2 * 16 * 61 / 1e6, 7 * 16 * 61 / 1e6):
        options = {"temperature": case.temperature, "max_scratch_mb": mb}
        same(fused(backend, case.head, case.constants, case.objective, **options), whole, case)
    pieces = []
    for part in (slice(0, 5), slice(5, 6), slice(6, 13)):
        head = case.head | {k: case.head[k][part] for k in ("hidden", "target")}
        constants = {k: v[part] for k, v in case.constants.items()}
        pieces.append(fused(backend, head, constants, case.objective, temperature=case.temperature))
    together = {k: sum(p[k] for p in pieces) for k in ("loss", "dweight", "dbias")}
    together |= {k: torch.cat([p[k] for p in pieces]) for k in ("logprob", "entropy", "dhidden")}
    same(together | {"stats": {}}, whole, case)
    for name, value in whole["stats"].items():
        torch.testing.assert_close(sum(p["stats"][name] for p in pieces), value, rtol=1e-4, atol=1e-4)


@EVERY
@pytest.mark.parametrize("threads", [1, 2])
def test_same_inputs_give_the_same_bits(backend: str, threads: int) -> None:
    n, V = (6, 61) if backend == "triton" else (300, 300)  # several chunks, and work for both threads
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in dtypes_of(backend) if backend != "triton" else (FP32,):
            head, constants = sample(n, V, dtype=dtype)
            first, *others = (fused(backend, head, constants, EVERYTHING, max_scratch_mb=n * V / 1e6) for _ in range(3))
            everything = torch.ones(n, dtype=torch.bool)
            for other in others:
                pairs = zip(bits(first, everything), bits(other, everything), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
    finally:
        torch.set_num_threads(before)


@EVERY
def test_the_default_dtype_changes_no_bit(backend: str) -> None:
    n, g = 5, torch.Generator().manual_seed(0)
    every, slope = torch.ones(n, dtype=torch.bool), torch.randn(n, dtype=FP64, generator=g)
    for dtype in (BF16,) if backend == "triton" else dtypes_of(backend):
        head, constants = sample(n, V=61, dtype=dtype)

        def results(head: dict[str, Tensor], constants: dict[str, Tensor]) -> list[Tensor]:
            there = {k: v.to(DEVICE.get(backend, "cpu")).detach() for k, v in head.items()}
            leaves = [there[k].requires_grad_() for k in ("hidden", "weight", "bias")]
            logprob, entropy = linear_logprob(**there, backend=backend)
            out = [logprob.detach().cpu(), entropy.detach().cpu()]
            out += torch.autograd.grad(((logprob - 0.5 * entropy) * slope.to(logprob)).sum(), leaves)
            out += bits(fused(backend, head, constants, EVERYTHING), every)
            out.append(policy_loss(out[0], entropy=out[1], objective=EVERYTHING, **constants)[0])
            out.append(token_weights(constants["token_weight"] != 0, "token"))
            return [*out, group_advantages(constants["advantage"], head["target"] % 3)]

        want = results(head, constants)
        for default in (BF16, FP64):
            torch.set_default_dtype(default)
            try:
                got = results(head, constants)
            finally:
                torch.set_default_dtype(FP32)
            assert [x.dtype for x in got] == [x.dtype for x in want]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["torch", CPP])
def test_nearly_sure_tokens_keep_their_relative_accuracy(backend: str) -> None:
    """1 - p from 1e-2 to 1e-30, though fp32 holds no p between 1 - 6e-8 and 1. weight = identity: logits are exact."""
    V, gaps = 5000, torch.linspace(13.0, 76.0, 20)
    target, g = torch.arange(20) * 263, torch.Generator().manual_seed(0)
    logits = torch.randn(20, V, generator=g).scatter(1, target[:, None], gaps[:, None])
    head = {"hidden": logits, "weight": torch.eye(V), "target": target}
    constants = {"advantage": torch.ones(20), "token_weight": torch.ones(20), "external": target < 0}
    got = run(head, constants, Objective("reinforce"), backend=backend, max_scratch_mb=2 * 8 * V / 1e6)  # two tokens
    others = logits.double().scatter(1, target[:, None], -math.inf)
    odds = (others - gaps.double()[:, None]).exp()
    want = {"logprob": -odds.sum(1).log1p(), "entropy": odds.sum(1).log1p()}
    p = odds / (1 + odds.sum(1, keepdim=True))
    want["entropy"] += (p * (gaps.double()[:, None] - others).where(odds > 0, 0.0)).sum(1)
    want["dhidden"] = p.scatter(1, target[:, None], -p.sum(1, keepdim=True))  # the loss is minus the sum of logprobs
    eps = 8 * torch.finfo(FP32).eps * (1 + logits.abs().max() + gaps.max())  # e^z's error, by z's
    for name, value in want.items():
        assert ((got[name] - value).abs() <= eps * value.abs()).all(), name


@EVERY
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_a_demonstrated_token_that_cannot_be(backend: str, spread: float) -> None:
    """Its logit is -inf: log p is -1e30, and the gradient is the one at p = 0."""
    head, constants = sample(3, V=23, dtype=FP32)
    head["weight"] *= spread
    head["bias"][4], head["target"][1] = -math.inf, 4
    ones = {"advantage": torch.ones(3), "token_weight": torch.ones(3), "external": torch.tensor([False, True, True])}
    for external in EXTERNAL:
        objective = Objective("ratio", external, gamma=0.5)
        got = fused(backend, head, {**ones, "old_logprob": constants["old_logprob"]}, objective)
        assert got["logprob"][1] == -1e30
        assert all(got[name].isfinite().all() for name in (*GRADIENTS, "loss", "entropy"))
        slope = -(1.0 if external == "nll" else 0.0)
        alone = {k: v[1:2] for k, v in ({**ones, "old_logprob": constants["old_logprob"]}).items()}
        one = fused(backend, head | {k: head[k][1:2] for k in ("hidden", "target")}, alone, objective)
        p = (head["hidden"][1] @ head["weight"].T + head["bias"]).softmax(-1)
        torch.testing.assert_close(one["dbias"], slope * (torch.eye(23)[4] - p), rtol=1e-4, atol=1e-6)


@EVERY
def test_an_infinite_logit_makes_no_number_of_its_row(backend: str) -> None:
    head, constants = sample(3, V=23, dtype=FP32)
    constants |= {name: torch.zeros(3) for name in ("token_weight", "entropy_weight")}
    head["bias"][4] = math.inf
    for target in (3, 4, 5):
        got = fused(backend, head | {"target": torch.full((3,), target)}, constants, EVERYTHING)
        assert got["logprob"].isnan().all()
        assert got["entropy"].isnan().all()


@EVERY
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_hidden_state_that_is_no_number_is_seen_in_loss_and_gradients(backend: str, poison: float) -> None:
    head, _ = sample(3, V=23, dtype=FP32)
    head["hidden"][1, 2] = poison
    ones = {"advantage": torch.ones(3), "token_weight": torch.ones(3)}
    for external in (False, True):
        got = fused(backend, head, {**ones, "external": torch.full((3,), external)}, Objective())
        assert got["loss"].isnan()
        assert got["dweight"].isnan().any()
        assert got["dhidden"].isnan().any(-1).tolist() == [False, True, False]


@EVERY
def test_a_target_just_outside_the_vocabulary_is_no_token(backend: str) -> None:
    head, constants = sample(4, V=23, dtype=FP32)
    for name in ("token_weight", "entropy_weight"):
        constants[name] = torch.zeros(4)
    head["target"] = torch.tensor([22, 23, -1, 0])
    got = fused(backend, head, constants, EVERYTHING)
    assert got["logprob"].isnan().tolist() == [False, True, True, False]


@EVERY
def test_a_block_of_tokens_that_cannot_be(backend: str) -> None:
    """As if they did not exist, even if a row starts or ends with more of them than a kernel processes at a time."""
    head, constants = sample(3, V=5000, dtype=FP32)
    head["target"] = torch.tensor([4600, 4700, 4999])
    for banned in (slice(0, 4500), slice(100, 4600)):
        kept = torch.ones(5000, dtype=torch.bool)
        kept[banned] = False
        short = {k: head[k][kept] for k in ("weight", "bias")} | {"target": (kept.cumsum(0) - 1)[head["target"]]}
        want = fused(backend, head | short, constants, EVERYTHING)
        got = fused(backend, head | {"bias": head["bias"].masked_fill(~kept, -math.inf)}, constants, EVERYTHING)
        got |= {k: got[k][kept] for k in ("dweight", "dbias")}
        torch.testing.assert_close(tensors(got), tensors(want), rtol=1e-4, atol=1e-5)
