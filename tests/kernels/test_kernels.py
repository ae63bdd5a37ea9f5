"""Contract of the Triton kernels and their backend. Without CUDA they run in Triton's interpreter (see conftest.py)."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, Head, check_precision, on_device, sample, tensors
from head_rows import BLOCK_V, statistics
from hypothesis import example, given
from hypothesis import strategies as st
from quick import pairs
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.kernels import linear_logprob as linear_kernels
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends import triton_chunks, ways
from rlplus.loss.head import gradient_sum as gradients
from rlplus.loss.head.head import Head as OpHead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
SCRATCH = {"one row": 1e-9, "few rows": 8e-3, "all rows": None}  # MB, for 23 tokens
EVERY = pytest.mark.parametrize("max_scratch_mb", SCRATCH.values(), ids=SCRATCH)
MOSTLY_QUICK = [  # tests of many cases use it: 23 chunks take the interpreter seconds
    pytest.param(value, marks=pytest.mark.slow if name == "one row" else (), id=name) for name, value in SCRATCH.items()
]


def fused(head: Head, constants: dict[str, Any], objective: Objective, **options: Any) -> dict[str, Any]:
    return on_device(DEVICE, head, constants, objective, **options)


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["all"]))
def test_matches_the_closed_form(internal: str, external: str, features: str) -> None:
    objective = Objective(internal, external, **FEATURES[features])
    head, constants = sample(17, seed=len(internal + external), dtype=torch.float32)
    mb = list(SCRATCH.values())[len(internal + external) % 3]
    got = fused(head, constants, objective, max_scratch_mb=mb, temperature=0.7)
    check_precision(got, head, constants, objective, 0.7)


@pytest.mark.parametrize(
    ("max_scratch_mb", "dtype", "objective"),
    pairs(
        MOSTLY_QUICK,
        [torch.float32, torch.float16, torch.bfloat16],
        [Objective(), EVERYTHING, Objective.preset("dapo"), Objective.preset("sft")],
    ),
)
def test_low_precision_inputs_keep_the_errors_of_fp32(
    max_scratch_mb: float | None, dtype: torch.dtype, objective: Objective
) -> None:
    head, constants = sample(23, V=61, dtype=dtype)
    got = fused(head, constants, objective, max_scratch_mb=max_scratch_mb)
    gemm_dtype = dtype if DEVICE == "cuda" else torch.float32
    check_precision(got, head, constants, objective, gemm_dtype=gemm_dtype)


@pytest.mark.parametrize("V", [1, 2, BLOCK_V - 1, BLOCK_V, BLOCK_V + 1, 2 * BLOCK_V + 16])
@pytest.mark.parametrize("n", [1, 5])
def test_vocabularies_that_do_not_fill_their_last_block(n: int, V: int) -> None:
    head, constants = sample(n, V=V, dtype=torch.float32)
    constants["token_weight"] = constants["token_weight"] + 0.5
    head["target"][0] = V - 1
    got = fused(head, constants, EVERYTHING)
    check_precision(got, head, constants, EVERYTHING)
    if V == 1:
        assert got["logprob"].eq(0).all()
        assert not any(got[name].any() for name in ("entropy", "dhidden", "dweight", "dbias"))


@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e4])
def test_flat_and_certain_policies(scale: float) -> None:
    head, constants = sample(23, dtype=torch.float32)
    head["weight"] *= scale
    objective = Objective("clip", "mis", gamma=1.7, entropy_coef=0.2)
    check_precision(fused(head, constants, objective), head, constants, objective)


@pytest.mark.parametrize("n", [0, 5])
def test_nothing_to_learn_from(n: int) -> None:
    head, constants = sample(n, dtype=torch.float32)
    head["target"].fill_(-100)
    head["hidden"].fill_(math.nan)
    off = {k: torch.zeros(n) for k in ("token_weight", "entropy_weight")}
    got = fused(head, constants | off, EVERYTHING)
    assert not any(got[name].any() for name in ("loss", "dhidden", "dweight", "dbias"))
    assert not any(value.item() for value in got["stats"].values())
    assert len(got["logprob"]) == n
    assert got["logprob"].isnan().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="there the gradients are fp16, too: test_gpu.py has what holds of them")
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_fp16_gradients_of_the_logits_do_not_vanish(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounding as on CUDA: the logits' gradient becomes fp16 before the backward GEMMs."""
    head, constants = sample(23, dtype=torch.float32)
    for name in ("token_weight", "entropy_weight"):
        constants[name] *= size
    want = fused(head, constants, EVERYTHING)
    for module in (backend, gradients, ways):
        monkeypatch.setattr(module, "gradient_dtype", lambda head: torch.float16)
    monkeypatch.setattr(backend, "dhidden", lambda dz, head, f=backend.dhidden: f(dz.float(), head))
    add = gradients.add_dweight
    monkeypatch.setattr(gradients, "add_dweight", lambda dw, dz, h, **o: add(dw, dz.float(), h, **o))
    got = fused(head, constants, EVERYTHING)
    for name in ("dhidden", "dweight", "dbias"):
        error = (got[name].float() - want[name]).abs().max()
        assert error <= 4 * torch.finfo(torch.float16).eps * want[name].abs().max(), name


@EVERY
def test_in_a_cuda_graph_every_row_takes_part(max_scratch_mb: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result; NaN in rows of weight 0 still reaches nothing."""
    head, constants = sample(23, dtype=torch.float32)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    head["hidden"][off] = math.nan
    want = fused(head, constants, EVERYTHING, max_scratch_mb=max_scratch_mb)
    monkeypatch.setattr(backend, "_capturing", lambda device: True)
    got = fused(head, constants, EVERYTHING, max_scratch_mb=max_scratch_mb)
    torch.testing.assert_close(tensors(got), tensors(want), equal_nan=True, rtol=1e-5, atol=1e-5)


# ---- laws


@pytest.mark.parametrize("max_scratch_mb", MOSTLY_QUICK)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_rows_of_weight_0_change_no_bit(max_scratch_mb: float | None, poison: float) -> None:
    head, constants = sample(23, dtype=torch.float32)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert off.any()
    want = fused(head, constants, EVERYTHING, max_scratch_mb=max_scratch_mb)
    spoilt = {k: v.masked_fill(off, poison) for k, v in constants.items() if v.is_floating_point()}
    spoilt |= {k: constants[k] for k in ("token_weight", "entropy_weight")} | {"external": constants["external"] ^ off}
    for target in (-100, 10**6):
        dirty = head | {"target": head["target"].masked_fill(off, target)}
        dirty["hidden"] = head["hidden"].masked_fill(off[:, None], poison)
        got = fused(dirty, spoilt, EVERYTHING, max_scratch_mb=max_scratch_mb)
        for name in ("loss", "dhidden", "dweight", "dbias"):
            assert torch.equal(got[name], want[name]), name
        assert {k: v.item() for k, v in got["stats"].items()} == {k: v.item() for k, v in want["stats"].items()}
        assert got["logprob"][off].isnan().all()


# ---- memory


def test_rows_without_a_gradient_cost_a_forward_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    head, constants = sample(64, dtype=torch.float32)
    constants["token_weight"][torch.arange(64) % 4 != 0] = 0.0
    constants["token_weight"][::4] = 1.0
    constants["advantage"].fill_(1.0)
    sizes: list[int] = []
    original = gradients.add_dweight
    monkeypatch.setattr(gradients, "add_dweight", lambda *a, **o: (sizes.append(len(a[1])), original(*a, **o))[1])
    monkeypatch.setattr(triton_chunks, "chunk_rows", lambda *_: 5)
    objective = Objective("ratio", "none")
    constants["external"].fill_(False)
    got = fused(head, constants, objective)
    assert sizes == [5, 5, 5, 1]
    check_precision(got, head, constants, objective)


@example(n=5000, V=1000, H=1, scratch=1e6, gradient=True, own=False, bonus=False, dtype=torch.bfloat16)
@given(
    n=st.integers(0, 5000), V=st.integers(1, 200_000), H=st.integers(1, 5000), scratch=st.floats(1.0, 1e10),
    gradient=st.booleans(), own=st.booleans(), bonus=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_chunk_keeps_to_its_scratch(
    n: int, V: int, H: int, scratch: float, gradient: bool, own: bool, bonus: bool, dtype: torch.dtype
) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.zeros(1).expand(*shape)

    target = torch.zeros(1, dtype=torch.int64).expand(n)
    head = OpHead(empty(n, H).to(dtype), empty(V, H).to(dtype), None, target, 1.0)
    tile = linear_kernels.default_tile(head.hidden, False)
    with mock.patch.object(ways, "our_tile", return_value=tile if own else None):
        way = ways.way_of(head, gradient, bonus)
    rows = ways.chunk_rows(head, way, scratch)
    assert 1 <= rows <= max(n, 1)
    if rows > 1:
        row = 12 * -(-V // tile.BLOCK_V) if way.tile else 4 * V  # the sums of tiles, or logits
        # Exponentials; the gradient of logits is written over them.
        row += gradient * (4 * V * (way.exponentials is not None) + 4 * H)
        assert row * rows <= scratch


# ---- inputs


def test_reads_strided_inputs_in_place() -> None:
    head, constants = sample(23, dtype=torch.float32)
    want = fused(head, constants, EVERYTHING)
    wide = {
        "hidden": head["hidden"].repeat_interleave(2, 1)[:, ::2],
        "weight": head["weight"].T.contiguous().T,
        "bias": head["bias"].repeat_interleave(3)[::3],
        "target": head["target"].repeat_interleave(2)[::2],
    }
    assert not any(t.is_contiguous() for t in wide.values())
    spread = {k: v.repeat_interleave(2)[::2] for k, v in constants.items()}
    leaf = {k: v.to(DEVICE).requires_grad_(v.is_floating_point()) for k, v in wide.items()}
    out = linear_policy_loss(
        **leaf, **{k: v.to(DEVICE) for k, v in spread.items()}, objective=EVERYTHING, backend="triton"
    )
    torch.testing.assert_close(out.loss.cpu(), want["loss"], rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(out.loss, leaf["hidden"])
    torch.testing.assert_close(grad.cpu(), want["dhidden"])


def test_without_bias_is_with_a_bias_of_0() -> None:
    head, constants = sample(23, dtype=torch.float32)
    head["bias"].zero_()
    want = fused(head, constants, EVERYTHING)
    del head["bias"]
    got = tensors(fused(head, constants, EVERYTHING))
    assert all(torch.equal(value, want[name]) for name, value in got.items())


@EVERY
def test_linear_logprob_differentiates_any_downstream_loss(max_scratch_mb: float | None) -> None:
    """A row without an upstream gradient, NaN here, leaks nothing."""
    head, _ = sample(23, dtype=torch.float32)
    on = torch.arange(23) % 3 != 0

    def downstream(name: str, dtype: torch.dtype, poison: float) -> tuple[Tensor, ...]:
        leaf = {k: v.to(DEVICE, dtype).requires_grad_() for k, v in head.items() if k != "target"}
        hidden = leaf["hidden"].masked_fill(~on[:, None].to(DEVICE), poison)
        options = {"temperature": 0.6, "backend": name, "max_scratch_mb": max_scratch_mb}
        inputs = {**leaf, "hidden": hidden, "target": head["target"].to(DEVICE)}
        logprob, entropy = (x[on.to(DEVICE)] for x in linear_logprob(**inputs, **options))
        loss = (logprob * entropy).exp().sum() + logprob[3] ** 2 - entropy[:5].std()
        return logprob, entropy, *torch.autograd.grad(loss, list(leaf.values()))

    got = downstream("triton", torch.float32, math.nan)
    exact, plain = (downstream("reference", dtype, 0.0) for dtype in (torch.float64, torch.float32))
    for g, e, p in zip(got, exact, plain, strict=True):
        assert ((g - e).abs() <= 2 * (p - e).abs().max() + 64 * EPS * e.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_says_what_it_cannot_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    head, constants = sample(3, dtype=dtype)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' needs CUDA tensors, or TRITON_INTERPRET=1 .*got float.* on cpu"):
        linear_policy_loss(**head, **constants, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if dtype == torch.float64:
        with pytest.raises(ValueError, match="'triton' needs bf16, fp16 or fp32; got float64"):
            linear_logprob(**head, backend="triton")
    with pytest.raises(ValueError, match=r"want logits \(3, W\) float32, W >= 5, contiguous in W.*strides \(1, 3\)"):
        statistics(torch.zeros(5, 3, device=DEVICE).T, torch.zeros(3, dtype=torch.int64, device=DEVICE))
