"""Exponentials in two bytes in the place of logits, from our first GEMM to the gradient: kernels, losses, choice.

Without CUDA in Triton's interpreter, where bf16 inputs are multiplied in fp32 and their gradients not rounded.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, check_precision, huge, on_device, sample, tensors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.bench.case import Case
from rlplus.bench.cases import Head as SampledHead
from rlplus.bench.cases import Inputs
from rlplus.kernels import exponentials
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import DEFAULT, TILES, Buffers, Tile, Tiling
from rlplus.loss import tuning
from rlplus.loss.backends import triton as backend
from rlplus.loss.head import Head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, HALF_EPS, SUBNORMAL = torch.finfo(torch.float32).eps, torch.finfo(torch.float16).eps, 2.0**-24
ROUNDING = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the logits' gradient is rounded at least as E is
EVERY_TILE = pytest.mark.parametrize("tile", TILES[0], ids=["TMA", "pointers"])
EVERY_SCRATCH = pytest.mark.parametrize(
    "max_scratch_mb",
    [pytest.param(1e-9, marks=pytest.mark.slow), 8e-3, None],  # 23 chunks take the interpreter seconds
    ids=["one row", "few rows", "all rows"],
)
TILE = TILES[0][1]
NO_ENTROPY = {"entropy_coef": 0.0}
PLAIN = Objective("clip", "mis", **(FEATURES["all"] | NO_ENTROPY))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tiling_of", lambda head: Tiling(exponentials=TILE))


# ---- the kernels


def inputs(n: int, V: int, H: int, size: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(n, H), size * H**-0.5 * torch.randn(V, H)
    return hidden.to(DEVICE), weight.to(DEVICE), torch.randint(V, (n,)).to(DEVICE)


def stored(
    hidden: Tensor, weight: Tensor, target: Tensor, tile: Tile, dtype: torch.dtype,
    T: float = 1.0, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """values, logits or exponentials (n, V + 9), tops."""
    values = torch.empty(len(target), kernels.WIDTH.value, device=DEVICE)
    logits = torch.empty(len(target), len(weight) + 9, dtype=dtype, device=DEVICE)
    return values, logits, kernels.linear_statistics(values, logits, hidden, weight, target, bias, T, tile=tile)


@EVERY_TILE
@pytest.mark.parametrize("n", [1, 33])
@pytest.mark.parametrize(("V", "H"), [(1, 1), (64, 32), (65, 72), (200, 31)])
def test_every_shape_keeps_its_statistics_and_exponentials(n: int, V: int, H: int, tile: Tile) -> None:
    args = (*inputs(n, V, H), tile)
    want, logits, _ = stored(*args, torch.float32, 0.7)
    values, e, tops = stored(*args, torch.float16, 0.7)
    z = logits[:, :V].double() / 0.7
    size = 8 * EPS * z.abs().max().item()
    torch.testing.assert_close(values[:, :4], want[:, :4], rtol=0, atol=size)
    assert tops.shape == (-(-V // tile.BLOCK_V), n)
    for i, top in enumerate(tops):
        columns = slice(i * tile.BLOCK_V, min(V, (i + 1) * tile.BLOCK_V))
        torch.testing.assert_close(top.double(), z[:, columns].amax(1), rtol=0, atol=size)
        exact = (z[:, columns] - top[:, None]).exp()
        error = (e[:, columns].double() / kernels.E_SCALE.value - exact).abs()
        assert (error <= exact * (HALF_EPS / 2 + 2 * size) + SUBNORMAL / kernels.E_SCALE.value).all()


@EVERY_TILE
@pytest.mark.parametrize("block", [tiling.gradient for tiling in (DEFAULT, Tiling(gradient=backend.Block(64, 1)))])
@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
def test_the_gradient_is_as_exact_as_fp16(size: float, block: backend.Block, tile: Tile) -> None:
    """Element by element; rounded to bf16, its error is the exact gradient's, rounded to bf16."""
    n, V, T = 20, 333, 0.7
    args = inputs(n, V, 16, size)
    args[2][::2] = (args[0] @ args[1].T).argmax(1)[::2]
    values, e, tops = stored(*args, tile, torch.float16, T)
    values[:, backend.DLOGPROB] = torch.randn(n, device=DEVICE)
    out = torch.empty(n, V + 9, device=DEVICE)
    slot = torch.randperm(n).to(DEVICE)
    exponentials.row_gradient(out, slot, values, e, tops, tile.BLOCK_V, V, args[2], T, block)
    z = args[0].double() @ args[1].double().T / T
    p, onehot = z.softmax(1), torch.nn.functional.one_hot(args[2], V)
    slope = values[:, backend.DLOGPROB, None].double() / T
    got, exact = out[slot, :V].double(), slope * (onehot - p)
    rounding = 16 * EPS * (1 + z.abs().max()) * p.where(onehot == 0, 1 + p)
    assert ((got - exact).abs() <= slope.abs() * (p * HALF_EPS / 2 + rounding + 2.0**-39)).all()
    error, plain = ((x.float().bfloat16() - exact).norm() for x in (got, exact))
    assert error <= 1.02 * plain


def test_gradient_rows_sum_to_0_and_only_rows_with_a_slot_are_written() -> None:
    hidden, weight, target = inputs(6, 150, 8)
    values, e, tops = stored(hidden, weight, target, TILE, torch.float16)
    values[:, backend.DLOGPROB] = torch.tensor([0.7, 0.7, 0.7, math.nan, 0.0, 0.7])
    hidden[4] = e[4] = values[4, : backend.DLOGPROB] = math.nan
    out = torch.full((5, e.shape[1]), 9.0, device=DEVICE)
    slot = torch.tensor([2, -1, 0, -1, 1, -1], device=DEVICE)
    exponentials.row_gradient(out, slot, values, e, tops, TILE.BLOCK_V, 150, target, 1.0)
    assert out[3:].eq(9).all()
    assert not out[1].any()
    rows = out[[0, 2], :150]
    assert (rows.sum(1).abs() <= HALF_EPS * rows.abs().sum(1)).all()
    assert rows.abs().amax(1).gt(1e-2).all()


@EVERY_TILE
def test_impossible_and_undefined_logits(tile: Tile) -> None:
    """NaN where the gradient from logits is, and else the same numbers. The infinities are in the bias."""
    n, V = 6, 150
    hidden, weight = torch.randn(n, 8, device=DEVICE), torch.zeros(V, 8, device=DEVICE)
    weight[:, 0] = torch.randn(V, device=DEVICE)
    hidden[2], hidden[3], hidden[4] = math.nan, 1e37, -3e38
    target = torch.tensor([99, 3, 99, 99, 140, -1], device=DEVICE)
    bias = torch.zeros(V, device=DEVICE)
    bias[:70] = -math.inf  # two whole tiles before the first possible token
    slot = torch.arange(n, device=DEVICE)
    for value in (0.0, -math.inf, math.inf, math.nan):
        spoilt = bias.clone()
        spoilt[:] = value if value < 0 else spoilt
        spoilt[140] += value
        results = []
        for dtype in (torch.float32, torch.float16):
            values, kept, tops = stored(hidden, weight, target, tile, dtype, bias=spoilt)
            values[:, backend.DLOGPROB], values[:, backend.DENTROPY] = 0.5, 0.0
            out = torch.empty(n, V + 9, device=DEVICE)
            if dtype == torch.float32:
                kernels.row_gradient(out, slot, values, kept, V, target, spoilt, 1.0)
            else:
                exponentials.row_gradient(out, slot, values, kept, tops, tile.BLOCK_V, V, target, 1.0)
            results.append(out[:, :V])
        torch.testing.assert_close(results[1], results[0], equal_nan=True, rtol=HALF_EPS, atol=1e-6)
        assert results[1][[2]].isnan().all()
        assert results[1][[0, 1, 4]].isnan().all() == (value != 0)


def test_offsets_beyond_2_to_the_31() -> None:
    hidden, weight, target = inputs(3, 40, 8)
    far, out = huge(DEVICE, 3, 2**29 + 8, 32).view(torch.float16), huge(DEVICE, 3, 2**30 + 8, 64)
    near = torch.empty(3, 64, dtype=torch.float16, device=DEVICE)
    results = []
    for e, into in ((far, out), (near, torch.empty(3, 64, device=DEVICE))):
        values = torch.empty(3, kernels.WIDTH.value, device=DEVICE)
        tops = kernels.linear_statistics(values, e, hidden, weight, target, None, 1.0, tile=TILE)
        values[:, backend.DLOGPROB] = 1.0
        exponentials.row_gradient(into, torch.arange(3, device=DEVICE), values, e, tops, TILE.BLOCK_V, 40, target, 1.0)
        results.append((e[:, :40].contiguous(), into[:, :40].contiguous()))
    assert 2 * far.stride(0) > 2**31 < 2 * out.stride(0)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_says_what_it_cannot_read() -> None:
    hidden, weight, target = inputs(3, 40, 8)
    values, e, tops = stored(hidden, weight, target, TILE, torch.float16)
    out, slot = torch.empty(3, e.shape[1], device=DEVICE), target.clone()
    for wrong, message in (
        ((out, slot, values, e.float(), tops), r"exponentials \(n, 49\) fp16, .* got .*float32"),
        ((out[:, 1:], slot, values, e, tops), r"want dlogits \(m, 49\)"),
        ((out, slot, values, e, tops[:, :2]), r"want tops \(1, 3\) fp32; got torch.float32 \(1, 2\)"),
        ((out, slot[:2], values, e, tops), r"slot and target \(3,\); got \(3, 6\), \(2,\), \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            exponentials.row_gradient(*wrong, TILE.BLOCK_V, 40, target, 1.0)


# ---- the loss


def biasless(n: int, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sampled inputs of bf16 with a bias of 0, for the closed form."""
    head, constants = sample(n, dtype=torch.bfloat16, **options)
    head["bias"].zero_()
    return head, constants


def run(head: dict[str, Tensor], constants: dict[str, Tensor], objective: Objective, **options: Any) -> dict[str, Any]:
    without = {name: value for name, value in head.items() if name != "bias"}
    return on_device(DEVICE, without, constants, objective, **options)


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["all"])[::3])
@EVERY_SCRATCH
@pytest.mark.usefixtures("chosen")
def test_the_loss_matches_the_closed_form(
    internal: str, external: str, features: str, max_scratch_mb: float | None
) -> None:
    objective = Objective(internal, external, **(FEATURES[features] | NO_ENTROPY))
    head, constants = biasless(17, V=70, H=16)
    got = run(head, constants, objective, max_scratch_mb=max_scratch_mb, temperature=0.7)
    check_precision(got, head, constants, objective, 0.7, gemm_dtype=ROUNDING)


@pytest.mark.parametrize(("V", "scale"), [(1, 1.0), (64, 1e-4), (64, 30.0), (4096 + 65, 1.0)])
@pytest.mark.usefixtures("chosen")
def test_flat_and_certain_policies_of_any_vocabulary(V: int, scale: float) -> None:
    head, constants = biasless(9, V=V, H=16)
    head["weight"] *= scale
    objective = Objective("clip", "mis", gamma=1.7)
    check_precision(run(head, constants, objective), head, constants, objective, gemm_dtype=ROUNDING)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_errors_are_those_of_a_plain_bf16_gradient(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """dhidden and dweight, on inputs as in reinforcement learning; the logits' gradient is rounded as on CUDA."""
    if DEVICE == "cpu":
        f, g = backend.dhidden, backend.add_dweight
        monkeypatch.setattr(backend, "dhidden", lambda dz, head: f(dz.bfloat16().float(), head))
        monkeypatch.setattr(backend, "add_dweight", lambda dw, dz, h, **o: g(dw, dz.bfloat16().float(), h, **o))
    data = Inputs(SampledHead(Case("errors", N=128, H=64, V=1000, dtype="bfloat16", methods=()), DEVICE), share)
    exact = data.gradients("policy")
    errors = []
    for tiling in (Tiling(loss=TILE), Tiling(exponentials=TILE)):
        monkeypatch.setattr(tuning, "tiling_of", lambda head, tiling=tiling: tiling)
        total = torch.zeros_like(exact[1], dtype=torch.float32)  # not rounded to bf16 at the end
        options: dict[str, Any] = {"backend": "triton", "weight_grad": total}
        out = linear_policy_loss(data.hidden, data.weight, data.target, **data.constants, **options)
        (dhidden,) = torch.autograd.grad(out.loss, [data.hidden])
        errors.append([(got - want).norm() / want.norm() for got, want in zip((dhidden, total), exact, strict=True)])
    for plain, error in zip(*errors, strict=True):
        assert 1e-4 < error <= 1.02 * plain


@EVERY_SCRATCH
@pytest.mark.parametrize("poison", [math.nan, 1e30])
@pytest.mark.usefixtures("chosen")
def test_rows_of_weight_0_change_no_bit(max_scratch_mb: float | None, poison: float) -> None:
    head, constants = biasless(23)
    off = constants["token_weight"] == 0
    assert off.any()
    want = run(head, constants, PLAIN, max_scratch_mb=max_scratch_mb)
    head["hidden"][off], head["target"][off] = poison, -100
    got = run(head, constants, PLAIN, max_scratch_mb=max_scratch_mb)
    assert all(torch.equal(got[name], want[name]) for name in ("loss", "dhidden", "dweight"))
    assert got["logprob"][off].isnan().all()


@pytest.mark.usefixtures("chosen")
def test_rows_without_a_gradient_cost_no_gemm_and_the_others_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    head, constants = biasless(64)
    constants["token_weight"] = (torch.arange(64) % 4 == 0).float()
    constants["advantage"].fill_(1.0)
    constants["external"].fill_(False)
    sizes: list[int] = []
    original = backend.add_dweight
    monkeypatch.setattr(backend, "add_dweight", lambda *a, **o: (sizes.append(len(a[1])), original(*a, **o))[1])
    monkeypatch.setattr(backend, "plan", lambda *_: (4, 10))  # 16 chunks with one active row each
    objective = Objective("ratio", "none")
    got = run(head, constants, objective)
    assert sizes == [7, 7, 2]  # emptied when 4 more might not fit
    check_precision(got, head, constants, objective, gemm_dtype=ROUNDING)


@EVERY_SCRATCH
@pytest.mark.usefixtures("chosen")
def test_in_a_cuda_graph_every_row_takes_part(max_scratch_mb: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    head, constants = biasless(23)
    head["hidden"][constants["token_weight"] == 0] = math.nan
    want = run(head, constants, PLAIN, max_scratch_mb=max_scratch_mb)
    monkeypatch.setattr(backend, "_capturing", lambda device: True)
    got = run(head, constants, PLAIN, max_scratch_mb=max_scratch_mb)
    torch.testing.assert_close(tensors(got), tensors(want), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("chosen")
def test_same_inputs_give_the_same_bits_also_with_a_filter() -> None:
    case = biasless(40, V=70, H=16)
    first, second = (tensors(run(*case, PLAIN, grad_filter=0.3)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["dweight"], tensors(run(*case, PLAIN))["dweight"])


# ---- where they are used


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each launch of the gradient from exponentials."""
    rows: list[int] = []
    original = exponentials.row_gradient
    monkeypatch.setattr(exponentials, "row_gradient", lambda *a, **o: (rows.append(len(a[3])), original(*a, **o))[1])
    return rows


V, H = 70, 16
PATHS: dict[str, tuple[Objective, Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]] = {
    "entropy bonus": (EVERYTHING, lambda head: head, {}),
    "softcap": (PLAIN, lambda head: head, {"logit_softcap": 9.0}),
    "temperatures": (PLAIN, lambda head: head, {"temperature": torch.linspace(0.5, 2, 23).to(DEVICE)}),
    "bias": (PLAIN, lambda head: head | {"bias": head["weight"][:, 0].contiguous()}, {}),
    "transposed": (PLAIN, lambda head: head | {"weight": head["weight"].T.contiguous().T}, {}),
    "fp16": (PLAIN, lambda head: {k: x.half() if x.is_floating_point() else x for k, x in head.items()}, {}),
    "fp32": (PLAIN, lambda head: {k: x.float() if x.is_floating_point() else x for k, x in head.items()}, {}),
    "least": (PLAIN, lambda head: head, {"memory": "least"}),
}


@pytest.mark.parametrize("name", PATHS)
def test_elsewhere_they_change_no_bit(name: str, used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    objective, change, options = PATHS[name]
    head, constants = sample(23, V, dtype=torch.bfloat16, H=H)
    del head["bias"]
    head = change(head)
    results = []
    for tiling in (DEFAULT, Tiling(exponentials=TILE)):
        kind = tuning.kind_of(torch.device(DEVICE), head["hidden"].dtype, V, H)
        with tuning.using(kind, tiling._replace(buffers=Buffers(5, 2, 10**6))):
            results.append(tensors(on_device(DEVICE, head, constants, objective, max_scratch_mb=1, **options)))
    assert all(torch.equal(x, results[1][key]) for key, x in results[0].items())
    assert not used


def test_logprobs_with_gradients_do_not_use_them(used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever differentiates them may want a gradient of the entropy; only the device knows."""
    hidden, weight, target = (x.bfloat16() if x.is_floating_point() else x for x in inputs(23, V, H))
    results = []
    for tiling in (DEFAULT, Tiling(exponentials=TILE)):
        monkeypatch.setattr(tuning, "tiling_of", lambda head, tiling=tiling: tiling)
        leaf = hidden.clone().requires_grad_()
        logprob, entropy = linear_logprob(leaf, weight, target, backend="triton")
        results.append((logprob, entropy, *torch.autograd.grad((logprob + entropy).sum(), [leaf])))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not used


def test_a_loss_in_bf16_uses_them_with_sizes_of_the_model(used: list[int]) -> None:
    """Timed sizes are for fp32 logits. Without gradients nothing is stored."""
    head, constants = sample(23, V, dtype=torch.bfloat16, H=H)
    del head["bias"]
    kind = tuning.kind_of(torch.device(DEVICE), torch.bfloat16, V, H)
    with tuning.using(kind, Tiling(exponentials=TILE, buffers=Buffers(5, 2, 10**6))):
        on_device(DEVICE, head, constants, PLAIN, max_scratch_mb=1)
        assert used == [23]
        there = {k: x.to(DEVICE) for k, x in (head | constants).items()}
        linear_policy_loss(**there, objective=PLAIN, backend="triton")
    assert used == [23]


def meta(n: int, V: int, H: int) -> Head:
    hidden, weight = (torch.empty(k, H, dtype=torch.bfloat16, device="meta") for k in (n, V))
    return Head(hidden, weight, None, torch.empty(n, dtype=torch.int64, device="meta"), 1.0)


@given(n=st.integers(0, 5000), V=st.integers(1, 200_000), H=st.integers(1, 5000), scratch=st.floats(1.0, 1e10))
def test_the_plan_keeps_to_its_scratch(n: int, V: int, H: int, scratch: float) -> None:
    tile = TILES[9][1]
    rows, capacity = backend.plan(meta(n, V, H), scratch, True, Tiling(loss=tile, exponentials=tile))
    assert 1 <= rows <= max(n, 1)
    assert capacity >= rows * (n > 0)
    if rows > 1:
        assert (2 * V + 12 * -(-V // tile.BLOCK_V)) * rows + (2 * V + 8 * H) * capacity <= scratch


def test_the_same_scratch_has_one_and_a_half_times_the_rows() -> None:
    tile, head = TILES[9][1], meta(16_384, 151_936, 3584)
    rows = [
        sum(backend.row_bytes(head, True, tiling))  # a chunk is a buffer, too
        for tiling in (Tiling(loss=tile), Tiling(loss=tile, exponentials=tile))
    ]
    assert 1.44 < rows[0] / rows[1] < 1.5
