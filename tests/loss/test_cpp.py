"""Contract of the cpp backend: the reference's numbers from native kernels, whatever is chunked and skipped."""

import math
from typing import Any

import pytest
import torch
from amx import use_amx
from closed_form import FEATURES, all_objectives, sample_constants
from head_cases import EVERYTHING, absolute_sums, closed, run, tensors, to
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.loss.backends import cpp, native
from rlplus.loss.backends.selection import choose
from rlplus.loss.head.head import Head

pytestmark = pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = {dtype: torch.finfo(dtype).eps for dtype in (FP32, BF16, FP16)}
EVERY_DTYPE = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
Inputs = tuple[dict[str, Tensor], dict[str, Tensor]]


def sample(n: int, V: int = 61, H: int = 8, dtype: torch.dtype = FP32, seed: int = 0, scale: float = 0.6) -> Inputs:
    g = torch.Generator().manual_seed(3000 + seed)
    shapes = {"hidden": (n, H), "weight": (V, H), "bias": (V,)}
    head = {k: torch.randn(s, generator=g) * (scale if k == "weight" else 1) for k, s in shapes.items()}
    return to(head, dtype) | {"target": torch.randint(V, (n,), generator=g)}, sample_constants((n,), seed, FP32)


def megabytes(rows: int, V: int = 61) -> float:
    """max_scratch_mb for chunks of that many rows."""
    return (rows + 0.5) * 4 * V / 1e6


def plain(head: dict[str, Tensor], constants: dict[str, Tensor], objective: Objective) -> dict[str, Any]:
    """Plain PyTorch of the head's dtype: statistics in fp32, the logits' gradient rounded for the backward GEMMs."""
    dtype = head["hidden"].dtype
    out = closed(to(head, FP32), constants, objective)
    if dtype != BF16:
        return out
    rows = torch.eye(len(head["target"]))
    seen = {
        "hidden": torch.cat([head["hidden"].float(), rows], 1),
        "target": head["target"],
        "bias": head["bias"].float(),
    }
    seen["weight"] = torch.cat([head["weight"].float(), torch.zeros(len(head["weight"]), len(rows))], 1)
    dz = closed(seen, constants, objective)["dweight"][:, -len(rows) :].T.to(dtype)  # dweight = dz^T hidden
    return out | {"dhidden": dz @ head["weight"], "dweight": dz.T @ head["hidden"], "dbias": dz.float().sum(0)}


def check(got: dict[str, Any], head: dict[str, Tensor], constants: dict[str, Tensor], objective: Objective) -> None:
    """error <= 2 max|plain PyTorch's error| + 8 eps (sum of absolute terms), and one rounding to the inputs' dtype."""
    dtype, wide = head["hidden"].dtype, (to(head, torch.float64), to(constants, torch.float64))
    exact, other = closed(*wide, objective), plain(head, constants, objective)
    sums = absolute_sums(*wide, objective, exact)
    for name, value in tensors(got).items():
        bound = 2 * (other[name] - exact[name]).abs().max() + 8 * EPS[FP32] * sums[name]
        if name.startswith("d"):
            assert value.dtype == dtype
            bound = bound + EPS[dtype] * exact[name].abs() + torch.finfo(dtype).tiny
        error = (value - exact[name]).abs()
        assert (error <= bound).all(), f"{name}: error {error.max():.1e}, bound {bound.max():.1e}"


# ---- values and derivatives


@EVERY_DTYPE
@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["plain", "mismatch", "all"]))
def test_every_objective_matches_float64(internal: str, external: str, features: str, dtype: torch.dtype) -> None:
    objective = Objective(internal=internal, external=external, **FEATURES[features])
    head, constants = sample(19, dtype=dtype, seed=len(internal + external + features))
    for rows, absent in ((50, ()), (5, ("old_logprob", "entropy_weight")), (1, ("behavior_logprob",))):
        constants = {k: v for k, v in constants.items() if k not in absent}
        got = run(head, constants, objective, backend="cpp", max_scratch_mb=megabytes(rows))
        check(got, head, constants, objective)


@EVERY_DTYPE
@pytest.mark.parametrize(("n", "V", "H"), [(2, 1, 2), (3, 17, 7), (70, 4099, 24), (5, 2048, 16)])
def test_every_shape_has_its_tails(n: int, V: int, H: int, dtype: torch.dtype) -> None:
    """More than a block of columns, more than a panel of rows, odd H, one token, one word."""
    head, constants = sample(n, V, H, dtype)
    constants["old_logprob"], constants["ref_logprob"] = None, torch.full((n,), -12.0)  # no ratio that fp16 cannot hold
    constants = {k: v for k, v in constants.items() if v is not None}
    check(run(head, constants, EVERYTHING, backend="cpp"), head, constants, EVERYTHING)


@pytest.mark.parametrize("rows", [40, 16])
def test_bf16_gradients_of_a_wide_head(rows: int) -> None:
    """Several blocks of hidden's columns in the GEMM for dweight, summed over one or several buffers."""
    head, constants = sample(40, 150, 1000, BF16)
    head["hidden"] /= 32
    got = run(head, constants, EVERYTHING, backend="cpp", max_scratch_mb=rows * 150 * 4e-6)
    check(got, head, constants, EVERYTHING)


@EVERY_DTYPE
def test_strided_inputs_and_temperature(dtype: torch.dtype) -> None:
    head, constants = sample(19, dtype=dtype)
    want = run(head, constants, EVERYTHING, backend="cpp", temperature=0.7)
    strided = {k: torch.stack([v, v], -1)[..., 0] for k, v in head.items()}
    strided["weight"] = head["weight"].T.contiguous().T
    assert not any(v.is_contiguous() for v in strided.values())
    options = {k: v for k, v in strided.items() if k != "target"}
    leaves = [v.requires_grad_() for v in options.values()]
    out = linear_policy_loss(**strided, **constants, objective=EVERYTHING, backend="cpp", temperature=0.7)
    for got, name in zip(torch.autograd.grad(out.loss, leaves), options, strict=True):
        assert torch.equal(got, want[f"d{name}"]), name
    exact = closed(to(head, torch.float64), to(constants, torch.float64), EVERYTHING, 0.7)
    torch.testing.assert_close(want["logprob"].double(), exact["logprob"], rtol=1e-5, atol=1e-5)


def test_without_torchs_bf16_gemm_bf16_inputs_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "torch_gemm", lambda: None)
    head, constants = sample(19, dtype=BF16)
    got = run(head, constants, EVERYTHING, backend="cpp")
    check(got, head, constants, EVERYTHING)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_bf16_gemm_that_is_switched_off_is_not_called() -> None:
    """torch's would throw where nothing can catch it, and end the process."""
    head, constants = sample(19, dtype=BF16)
    with torch.backends.mkldnn.flags(enabled=False):
        got = run(head, constants, EVERYTHING, backend="cpp")
    check(got, head, constants, EVERYTHING)


@pytest.mark.parametrize(("n", "V", "H"), [(70, 4099, 24), (40, 65, 8), (33, 31, 2), (9, 20, 8), (3, 1, 2)])
def test_a_bf16_gemm_may_read_past_the_rows(n: int, V: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the logits, which their narrower gradient leaves half free, holds bits that can be NaN."""
    use_amx(monkeypatch)
    head, constants = sample(n, V, H, BF16)
    constants["old_logprob"], constants["ref_logprob"] = None, torch.full((n,), -12.0)
    constants = {k: v for k, v in constants.items() if v is not None}
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    dirty = head | {"hidden": head["hidden"].masked_fill(off[:, None], math.nan)}
    for rows in (n, 4):
        options = {"backend": "cpp", "max_scratch_mb": megabytes(rows, V)}
        want, got = run(head, constants, EVERYTHING, **options), run(dirty, constants, EVERYTHING, **options)
        check(want, head, constants, EVERYTHING)
        for name in ("loss", "dhidden", "dweight", "dbias"):
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize(("noise", "margin"), [(0.5, 0.0), (3.0, 25.0)], ids=["flat", "confident"])
def test_bf16_logprobs_are_far_better_than_those_of_rounded_logits(noise: float, margin: float) -> None:
    g = torch.Generator().manual_seed(0)
    weight, target = torch.randn(3000, 64, generator=g) / 8, torch.randint(3000, (200,), generator=g)
    hidden = (noise * torch.randn(200, 64, generator=g) + margin * weight[target]).bfloat16()
    weight = weight.bfloat16()
    got, _ = linear_logprob(hidden, weight, target, backend="cpp")
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    assert (got - exact).abs().max() <= 0.1 * (rounded - exact).abs().max()


@EVERY_DTYPE
def test_logprob_differentiates_any_downstream_loss(dtype: torch.dtype) -> None:
    head, _ = sample(23, dtype=dtype)

    def downstream(head: dict[str, Tensor], backend: str) -> tuple[Tensor, ...]:
        leaf = {k: v.clone().requires_grad_() for k, v in head.items() if k != "target"}
        logprob, entropy = linear_logprob(**leaf, target=head["target"], temperature=0.7, backend=backend)
        loss = (0.1 * logprob * entropy)[::2].sum() + logprob[3] - entropy[:5].sum()
        return logprob, entropy, *torch.autograd.grad(loss, list(leaf.values()))

    want = downstream(to(head, torch.float64), "reference")
    for got, exact in zip(downstream(head, "cpp"), want, strict=True):
        tolerance = 4 * EPS[FP32 if got.dtype == FP32 else dtype]
        torch.testing.assert_close(
            got.double(), exact, rtol=tolerance, atol=tolerance * max(10.0, exact.abs().max().item())
        )


# ---- extreme values


def test_extreme_logits() -> None:
    """hidden = 1 makes weight the logits of every row: large, equal, impossible."""
    columns = [[0.0, 1e4, -1e4], [1e4, 1e4, 1e4], [0.0, -math.inf, 0.0], [-200.0, 0.0, -90.0]]
    for column in columns:
        weight = torch.tensor(column)[:, None].requires_grad_()
        bias = torch.zeros(3)
        if math.inf in weight.abs():
            weight, bias = torch.zeros(3, 1, requires_grad=True), torch.tensor(column)
        for target in range(3):
            inputs = (torch.ones(1, 1), weight, torch.tensor([target]))
            logprob, entropy = linear_logprob(*inputs, bias=bias, backend="cpp")
            z = torch.tensor(column, dtype=torch.float64)
            logp = z.log_softmax(-1).clamp(min=-1e30)
            assert logprob.item() == pytest.approx(logp[target].item(), rel=1e-6, abs=1e-6)
            assert entropy.item() == pytest.approx(-(logp.exp() * logp).sum().item(), abs=1e-6)
            (slope,) = torch.autograd.grad(logprob.sum(), weight)
            want = -z.softmax(-1)
            want[target] += 1
            torch.testing.assert_close(slope.squeeze(1).double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_comes_out_where_it_went_in(bad: float) -> None:
    head, constants = sample(9)
    constants = {k: v for k, v in constants.items() if k != "entropy_weight"} | {"token_weight": torch.ones(9)}
    head["hidden"][4, 2] = bad
    got = run(head, constants, EVERYTHING, backend="cpp")
    assert got["logprob"].isnan().tolist() == [i == 4 for i in range(9)]
    assert got["loss"].isnan()
    assert got["dhidden"].isnan().any(-1).tolist() == [i == 4 for i in range(9)]
    assert got["dweight"].isnan().all()


# ---- laws


@EVERY_DTYPE
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [50, 6, 1])
def test_rows_of_weight_0_change_no_bit(dtype: torch.dtype, poison: float, rows: int) -> None:
    head, constants = sample(40, dtype=dtype)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    options = {"backend": "cpp", "max_scratch_mb": megabytes(rows)}
    want = run(head, constants, EVERYTHING, **options)
    dirty = head | {"hidden": head["hidden"].masked_fill(off[:, None], poison)}
    dirty["target"] = head["target"].masked_fill(off, -100)
    got = run(dirty, constants, EVERYTHING, **options)
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name
    assert torch.equal(got["logprob"][~off], want["logprob"][~off])
    assert got["logprob"][off].isnan().all()


@EVERY_DTYPE
@pytest.mark.parametrize("active", ["none", "first", "last", "one in five", "all but one"])
def test_rows_are_skipped_across_chunks(dtype: torch.dtype, active: str) -> None:
    i = torch.arange(57)
    weight = {"none": i < 0, "first": i == 0, "last": i == 56, "one in five": i % 5 == 2, "all but one": i != 30}[
        active
    ]
    head, constants = sample(57, dtype=dtype)
    constants = {k: v for k, v in constants.items() if k != "entropy_weight"} | {"token_weight": weight.float()}
    whole = run(head, constants, EVERYTHING, backend="cpp")
    if active == "none":
        assert all(
            (value == 0).all() for name, value in tensors(whole).items() if name[0] in "dl" and name != "logprob"
        )
    else:
        check(whole, head, constants, EVERYTHING)
    for rows in (1, 2, 7, 8, 30):
        got = run(head, constants, EVERYTHING, backend="cpp", max_scratch_mb=megabytes(rows))
        again = run(head, constants, EVERYTHING, backend="cpp", max_scratch_mb=megabytes(rows))
        for name, value in tensors(got).items():
            assert torch.equal(value, tensors(again)[name]), name
            size = tensors(whole)[name].abs().max().item() if value.numel() else 0.0
            tolerance = 20 * EPS[dtype if name.startswith("d") else FP32] * max(size, 1.0)
            torch.testing.assert_close(value, tensors(whole)[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "chunks"), [(FP32, [2048, 7]), (FP16, [2048, 7]), (BF16, [512] * 4 + [7])], ids=str)
def test_a_chunk_has_as_many_rows_as_its_gemms_want(
    dtype: torch.dtype, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every GEMM over a chunk packs the whole weight."""
    rows: list[int] = []
    original = native.fill_logits

    def counted(head: Head, gemm: Any, z: Tensor) -> Tensor:
        rows.append(len(z))
        return original(head, gemm, z)

    monkeypatch.setattr(cpp, "fill_logits", counted)
    head, _ = sample(2048 + 7, V=5, H=2, dtype=dtype)
    linear_logprob(head["hidden"], head["weight"], head["target"], backend="cpp")
    assert rows == chunks


@EVERY_DTYPE
def test_no_tokens(dtype: torch.dtype) -> None:
    head, constants = sample(0, dtype=dtype)
    got = run(head, constants, EVERYTHING, backend="cpp")
    assert all((value == 0).all() for value in tensors(got).values())
    assert got["dweight"].shape == head["weight"].shape


def test_gradient_rows_sum_to_0() -> None:
    """weight = identity makes hidden the logits and dhidden their gradient."""
    _, constants = sample(40)
    head = {"hidden": 3 * torch.randn(40, 23, generator=torch.Generator().manual_seed(5)), "weight": torch.eye(23)}
    head["target"] = torch.arange(40) % 23
    got = run(head, constants, EVERYTHING, backend="cpp")["dhidden"]
    assert (got.sum(-1).abs() <= 30 * EPS[FP32] * got.abs().sum(-1)).all()


@EVERY_DTYPE
def test_a_kept_graph_gives_the_same_gradient_again(dtype: torch.dtype) -> None:
    """The last backward pass scales the gradients in place."""
    head, constants = sample(9, dtype=dtype)
    leaf = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in head.items()}
    loss = linear_policy_loss(**leaf, **constants, backend="cpp").loss
    first = torch.autograd.grad(3 * loss, leaf["weight"], retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(3 * loss, leaf["weight"], retain_graph=True)[0], first)
    assert torch.equal(torch.autograd.grad(3 * loss, leaf["weight"])[0], first)


def test_only_what_needs_a_gradient_gets_one() -> None:
    head, constants = sample(19)
    want = run(head, constants, EVERYTHING, backend="cpp")
    for name in ("hidden", "weight", "bias"):
        leaf = head | {name: head[name].clone().requires_grad_()}
        linear_policy_loss(**leaf, **constants, objective=EVERYTHING, backend="cpp").loss.backward()
        assert torch.equal(leaf[name].grad, want[f"d{name}"])


# ---- the choice


CPU = torch.device("cpu")


def test_auto_takes_it_for_what_it_can_take() -> None:
    assert choose("auto", CPU, FP32) == choose("auto", CPU, BF16) == ("cpp", "it is built")
    assert choose("auto", CPU, torch.float64).backend == choose("auto", torch.device("meta"), FP32).backend == "torch"
    with pytest.raises(ValueError, match=r"want CPU tensors of float32, bfloat16, float16.*got float64 on cpu"):
        choose("cpp", CPU, torch.float64)


def test_where_it_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_C.so")
    native.load.cache_clear()
    try:
        assert choose("auto", CPU, FP32) == ("torch", "'cpp' is not built, or does not load")
        with pytest.raises(ValueError, match=r"want backend 'cpp' built: .*_C.so.*RLPLUS_EXT=1 pip install"):
            choose("cpp", CPU, FP32)
    finally:
        native.load.cache_clear()
