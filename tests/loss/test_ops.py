"""Contract of rlplus.loss.operations: every backend agrees with float64 closed forms and obeys the laws they obey."""

import math
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives, logprob_and_entropy
from head_cases import EVERYTHING, H, check_precision, closed, on_policy, run, sample, tensors, to
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.loss.backends import native
from rlplus.loss.operations import library

SCRATCH = {"one row": 1e-9, "few rows": 5 * 16 * 23e-6, "all rows": None}  # MB, for 23 tokens of vocabulary in fp64
BACKENDS = [("reference", None), *(("torch", mb) for mb in SCRATCH.values())]
BOTH = pytest.mark.parametrize("backend", ["reference", "torch"])
CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
WITH_CPP = pytest.mark.parametrize("backend", ["reference", "torch", CPP])  # where inputs are of 32 bits or fewer
EVERY = pytest.mark.parametrize(("backend", "max_scratch_mb"), BACKENDS, ids=["reference", *SCRATCH])
EXACT = {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["no-gamma", "mismatch", "all"]))
def test_matches_the_closed_form_in_fp64(internal: str, external: str, features: str) -> None:
    objective = Objective(internal=internal, external=external, **FEATURES[features])
    head, constants = sample(17, seed=len(internal + external + features))
    for i, absent in enumerate([(), ("old_logprob", "entropy_weight"), ("behavior_logprob", "bias")]):
        temperature = (1.0, 0.6, 1.7)[i]
        head = {k: v for k, v in head.items() if k not in absent}
        constants = {k: v for k, v in constants.items() if k not in absent}
        want = closed(head, constants, objective, temperature)
        backend, max_scratch_mb = BACKENDS[(i + len(features)) % len(BACKENDS)]
        options = {"temperature": temperature, "backend": backend, "max_scratch_mb": max_scratch_mb}
        got = run(head, constants, objective, **options)
        # An unclipped ratio, as in k3-unbiased, multiplies the rounding of logprobs: by up to the size of the loss.
        atol = max(EXACT["atol"], 1e-15 * want["loss"].abs().item())
        torch.testing.assert_close(tensors(got), tensors(want), rtol=EXACT["rtol"], atol=atol)
        stats = {name: got["stats"][name].item() for name in want["stats"]}
        assert stats == pytest.approx(want["stats"], rel=1e-11, abs=1e-12)


@EVERY
def test_every_backend_and_chunk_size_matches_the_closed_form(backend: str, max_scratch_mb: float | None) -> None:
    head, constants = sample(23)
    got = run(head, constants, EVERYTHING, temperature=0.7, backend=backend, max_scratch_mb=max_scratch_mb)
    want = closed(head, constants, EVERYTHING, 0.7)
    torch.testing.assert_close(tensors(got), tensors(want), **EXACT)
    assert not any(t.requires_grad for t in (got["logprob"], got["entropy"], *got["stats"].values()))


@pytest.mark.parametrize("objective", [Objective(), EVERYTHING, Objective.preset("dapo"), Objective.preset("sft")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EVERY
def test_low_precision_inputs_keep_the_errors_of_fp32(
    backend: str, max_scratch_mb: float | None, dtype: torch.dtype, objective: Objective, monkeypatch: Any
) -> None:
    monkeypatch.setattr("rlplus.loss.head.head.VOCABULARY_BLOCK", 16)  # several blocks of the vocabulary
    head, constants = sample(23, V=61, dtype=dtype)
    got = run(head, constants, objective, backend=backend, max_scratch_mb=max_scratch_mb)
    check_precision(got, head, constants, objective)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "V", "H"), [(40, 200, 64), (129, 1001, 80)])
def test_the_tolerance_for_rounded_gradients_notices_wrong_ones(n: int, V: int, H: int, dtype: torch.dtype) -> None:
    """The tolerance of the tests on a GPU, where the logits' gradient is rounded as well."""
    head, constants = sample(n, V, H=H, dtype=dtype)
    head = on_policy(head)
    got = run(head, constants, EVERYTHING, backend="torch")
    check_precision(got, head, constants, EVERYTHING, gemm_dtype=dtype)
    for name in ("dhidden", "dweight", "dbias"):
        for factor in (0.0, -1.0, 1.1):
            with pytest.raises(AssertionError, match=name):
                check_precision(got | {name: factor * got[name]}, head, constants, EVERYTHING, gemm_dtype=dtype)


@WITH_CPP
def test_autocast_does_not_lower_the_precision(backend: str) -> None:
    head, constants = sample(23, dtype=torch.float32)
    want = run(head, constants, EVERYTHING, backend=backend)
    leaf = {k: v.clone().requires_grad_() for k, v in head.items() if k != "target"}
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_policy_loss(**leaf, target=head["target"], objective=EVERYTHING, backend=backend, **constants)
        logprob, entropy = linear_logprob(**head, backend=backend)
    assert torch.equal(torch.stack([logprob, entropy]), torch.stack([want["logprob"], want["entropy"]]))
    assert torch.equal(out.loss, want["loss"])
    assert torch.equal(torch.autograd.grad(out.loss, leaf["hidden"])[0], want["dhidden"])


@pytest.mark.parametrize("keep_graph", [False, True])
@WITH_CPP
def test_fp16_survives_a_loss_scale_beyond_its_range(
    backend: str, keep_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "PIECE", 3)
    head, constants = sample(8, dtype=torch.float16)
    head["hidden"].requires_grad_()
    constants["token_weight"] *= 1e-3
    out = linear_policy_loss(**head, **constants, backend=backend)
    (scaled,) = torch.autograd.grad(out.loss * 2.0**16, head["hidden"], retain_graph=keep_graph)
    exact = closed(to(head, torch.float64), to(constants, torch.float64), Objective())["dhidden"] * 2.0**16
    torch.testing.assert_close(scaled.double(), exact, rtol=1e-2, atol=1e-2)


# ---- laws


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_rows_of_weight_0_change_no_bit(
    backend: str, max_scratch_mb: float | None, dtype: torch.dtype, poison: float
) -> None:
    head, constants = sample(23, dtype=dtype)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert off.any()
    options = {"backend": backend, "max_scratch_mb": max_scratch_mb}
    want = run(head, constants, EVERYTHING, **options)
    spoilt = {k: v.masked_fill(off, poison) for k, v in constants.items() if v.is_floating_point()}
    spoilt |= {k: constants[k] for k in ("token_weight", "entropy_weight")} | {"external": constants["external"] ^ off}
    for target in (-100, 10**6, 0):
        dirty = head | {"target": head["target"].masked_fill(off, target)}
        dirty["hidden"] = head["hidden"].masked_fill(off[:, None], poison)
        got = run(dirty, spoilt, EVERYTHING, **options)
        for name in ("loss", "dhidden", "dweight", "dbias"):
            assert torch.equal(got[name], want[name]), name
        assert {k: v.item() for k, v in got["stats"].items()} == {k: v.item() for k, v in want["stats"].items()}
        assert torch.equal(got["logprob"][~off], want["logprob"][~off])
        assert got["logprob"][off].isnan().all() or (target == 0 and poison == 1e30)


@EVERY
def test_logprob_and_entropy_are_returned_whatever_the_weight(backend: str, max_scratch_mb: float | None) -> None:
    head, constants = sample(23)
    for weight in (0.0, 1.0):
        constants["token_weight"] = torch.full((23,), weight, dtype=torch.float64)
        out = run(head, constants, Objective(), backend=backend, max_scratch_mb=max_scratch_mb)
        torch.testing.assert_close((out["logprob"], out["entropy"]), logprob_and_entropy(**head), **EXACT)


@EVERY
@pytest.mark.parametrize("n", [0, 5])
def test_all_masked_gives_zero_and_keeps_the_graph(backend: str, max_scratch_mb: float | None, n: int) -> None:
    head, constants = sample(n)
    head["target"].fill_(-100)
    head["hidden"].fill_(math.nan)
    off = {k: torch.zeros(n, dtype=torch.float64) for k in ("token_weight", "entropy_weight")}
    got = run(head, constants | off, EVERYTHING, backend=backend, max_scratch_mb=max_scratch_mb)
    assert got["loss"].requires_grad
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name].detach(), torch.zeros_like(got[name])), name
    assert all(value == 0 for value in got["stats"].values())


@BOTH
def test_an_entropy_bonus_needs_no_target(backend: str) -> None:
    head, constants = sample(23)
    only_entropy = (constants["token_weight"] == 0) & (constants["entropy_weight"] != 0)
    assert only_entropy.any()
    want = run(head, constants, EVERYTHING, backend=backend)
    got = run(head | {"target": head["target"].masked_fill(only_entropy, -100)}, constants, EVERYTHING, backend=backend)
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name])


@EVERY
def test_a_vocabulary_of_one_is_certain(backend: str, max_scratch_mb: float | None) -> None:
    head, constants = sample(6, V=1)
    got = run(head, constants, EVERYTHING, backend=backend, max_scratch_mb=max_scratch_mb)
    for name in ("logprob", "entropy", "dhidden", "dweight", "dbias"):
        torch.testing.assert_close(got[name], torch.zeros_like(got[name]), atol=1e-15, rtol=0)


@EVERY
def test_gradient_rows_sum_to_0_and_a_shift_of_the_bias_changes_nothing(
    backend: str, max_scratch_mb: float | None
) -> None:
    head, constants = sample(23)
    options = {"backend": backend, "max_scratch_mb": max_scratch_mb}
    want = run(head, constants, EVERYTHING, **options)
    assert want["dbias"].sum().abs() < 1e-13
    for t in (0, 5, 9):  # one token at a time, so that the bias gradient is that token's logit gradient
        single = {k: v[t : t + 1] for k, v in constants.items()} | {"token_weight": torch.ones(1, dtype=torch.float64)}
        one = head | {k: head[k][t : t + 1] for k in ("hidden", "target")}
        assert run(one, single, EVERYTHING, **options)["dbias"].sum().abs() < 1e-13
    shifted = run(head | {"bias": head["bias"] + 64}, constants, EVERYTHING, **options)
    torch.testing.assert_close(tensors(shifted), tensors(want), rtol=1e-11, atol=1e-11)


@EVERY
def test_impossible_tokens_cost_nothing(backend: str, max_scratch_mb: float | None) -> None:
    """A logit of -inf, as a banned token has, is as if the token did not exist."""
    head, constants = sample(23)
    options = {"backend": backend, "max_scratch_mb": max_scratch_mb}
    want = run(head, constants, EVERYTHING, **options)
    banned = head | {"weight": torch.cat([head["weight"], torch.ones(2, H, dtype=torch.float64)])}
    banned["bias"] = torch.cat([head["bias"], torch.full((2,), -math.inf, dtype=torch.float64)])
    got = run(banned, constants, EVERYTHING, **options)
    got |= {"dweight": got["dweight"][:23], "dbias": got["dbias"][:23]}
    torch.testing.assert_close(tensors(got), tensors(want), **EXACT)


@EVERY
def test_micro_batches_add_up_and_leading_shapes_do_not_matter(backend: str, max_scratch_mb: float | None) -> None:
    head, constants = sample(24)
    options = {"backend": backend, "max_scratch_mb": max_scratch_mb}
    whole = run(head, constants, EVERYTHING, **options)
    for parts in (2, 4):
        rows = [slice(i * 24 // parts, (i + 1) * 24 // parts) for i in range(parts)]
        pieces = [
            run(
                head | {k: head[k][r] for k in ("hidden", "target")},
                {k: v[r] for k, v in constants.items()},
                EVERYTHING,
                **options,
            )
            for r in rows
        ]
        for name in ("loss", "dweight", "dbias"):
            torch.testing.assert_close(sum(p[name] for p in pieces), whole[name], **EXACT)
        torch.testing.assert_close(torch.cat([p["dhidden"] for p in pieces]), whole["dhidden"], **EXACT)
        for name, value in whole["stats"].items():
            torch.testing.assert_close(sum(p["stats"][name] for p in pieces), value, **EXACT)
    folded = head | {"hidden": head["hidden"].view(2, 3, 4, H), "target": head["target"].view(2, 3, 4)}
    got = run(folded, {k: v.view(2, 3, 4) for k, v in constants.items()}, EVERYTHING, **options)
    for name, value in tensors(whole).items():
        assert torch.equal(got[name].reshape(value.shape), value)
    assert got["logprob"].shape == got["entropy"].shape == (2, 3, 4)


@BOTH
def test_no_old_logprob_means_the_current_policy(backend: str) -> None:
    head, constants = sample(23)
    current = run(head, constants, EVERYTHING, backend=backend)["logprob"]
    want = run(head, constants | {"old_logprob": current}, EVERYTHING, backend=backend)
    got = run(head, constants | {"old_logprob": None}, EVERYTHING, backend=backend)
    torch.testing.assert_close(tensors(got), tensors(want), **EXACT)


@BOTH
def test_only_what_needs_a_gradient_gets_one_and_upstream_gradients_scale_it(backend: str) -> None:
    head, constants = sample(23)
    want = run(head, constants, Objective(), backend=backend)
    for name in ("hidden", "weight", "bias"):
        leaf = head | {name: head[name].clone().requires_grad_()}
        out = linear_policy_loss(**leaf, **constants, backend=backend)
        (-3 * out.loss).backward()
        torch.testing.assert_close(leaf[name].grad, -3 * want[f"d{name}"], **EXACT)
    with torch.no_grad():
        out = linear_policy_loss(**leaf, **constants, backend=backend)
    assert not out.loss.requires_grad
    assert torch.equal(out.loss, want["loss"])
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(
            linear_policy_loss(**leaf, **constants, backend=backend).loss, leaf["bias"], create_graph=True
        )


# ---- linear_logprob


@EVERY
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_linear_logprob_differentiates_any_downstream_loss(
    backend: str, max_scratch_mb: float | None, temperature: float
) -> None:
    head, _ = sample(23)

    def downstream(f: Any, **options: Any) -> tuple[Tensor, ...]:
        leaf = {k: v.clone().requires_grad_() for k, v in head.items() if k != "target"}
        logprob, entropy = f(**leaf, target=head["target"], temperature=temperature, **options)
        loss = (logprob * entropy).exp().sum() + logprob[3] ** 2 - entropy[:5].std()
        return logprob, entropy, *torch.autograd.grad(loss, list(leaf.values()))

    got = downstream(linear_logprob, backend=backend, max_scratch_mb=max_scratch_mb)
    torch.testing.assert_close(got, downstream(logprob_and_entropy), **EXACT)


@pytest.mark.parametrize("mb", SCRATCH.values(), ids=SCRATCH)
def test_linear_logprob_rows_without_upstream_gradient_do_not_leak(mb: float | None) -> None:
    head, _ = sample(23)
    on = torch.arange(23) % 3 != 0
    clean = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in head.items()}
    dirty = {k: v.clone() for k, v in head.items()}
    dirty["hidden"][~on] = math.nan
    dirty = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in dirty.items()}
    for inputs in (clean, dirty):
        logprob, entropy = linear_logprob(**inputs, backend="torch", max_scratch_mb=mb)
        (logprob[on].sum() - entropy[on].sum()).backward()
    for name in ("hidden", "weight", "bias"):
        assert torch.equal(dirty[name].grad, clean[name].grad), name


@BOTH
def test_gradcheck(backend: str) -> None:
    head, constants = sample(6, V=5)
    leaves = [head[k].requires_grad_() for k in ("hidden", "weight", "bias")]
    objective = Objective("ratio", "mis", gamma=0.0, kl_coef=0.3, entropy_coef=0.2)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {"bias": bias, "objective": objective, "backend": backend, "temperature": 0.8}
        return linear_policy_loss(hidden, weight, head["target"], **constants, **options).loss

    def logprob(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprob(hidden, weight, head["target"], bias=bias, temperature=0.8, backend=backend)

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradcheck(logprob, leaves)
