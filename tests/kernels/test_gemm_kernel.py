"""The GEMM with the statistics of the rows in its epilogue; without CUDA in Triton's interpreter."""

import math

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, check_precision, huge, on_device, own_gemm, sample, tensors
from torch import Tensor

from rlplus import Objective, linear_logprob
from rlplus.kernels import linear_logprob as kernels
from rlplus.loss import tuning
from rlplus.loss.head import FLOOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
COLUMNS = kernels.DLOGPROB.value  # columns of `values` that the statistics fill
TILES = {f"{'TMA' if tile.tma else 'pointers'}": tile for tile in kernels.TILES[0]}  # small ones, on CUDA too
EVERY_TILE = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)


@pytest.fixture(autouse=True)
def use_this_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tiling_of", own_gemm)


def inputs(n: int, V: int, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = torch.randn(n, H), 2 * H**-0.5 * torch.randn(V, H), torch.randn(V)
    target = torch.randint(V, (n,))
    return tuple(x.to(DEVICE) for x in (hidden, weight, target, bias))  # type: ignore[return-value]


def statistics(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, tile: kernels.Tile | None, T: float = 1.0
) -> Tensor:
    values = hidden.new_empty(len(target), kernels.WIDTH.value, dtype=torch.float32)
    kernels.linear_statistics(values, None, hidden, weight, target, bias, T, tile=tile)
    return values[:, :COLUMNS]


def expected(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, T: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    z = (hidden.to(dtype) @ weight.to(dtype).T + (0 if bias is None else bias.to(dtype))) / T
    logp = z.log_softmax(1).clamp(min=FLOOR)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@EVERY_TILE
@pytest.mark.parametrize("n", [1, pytest.param(33, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize(("V", "H"), [(1, 1), (63, 7), (64, 32), (65, 72), (200, 31)])
def test_every_shape_with_and_without_storing(n: int, V: int, H: int, tile: kernels.Tile) -> None:
    """100 rows: more tiles than a group has, and the last group has fewer."""
    hidden, weight, target, bias = inputs(n, V, H)
    exact, plain = (expected(hidden, weight, target, bias, 0.7, dtype) for dtype in (torch.float64, torch.float32))
    got = statistics(hidden, weight, target, bias, tile, 0.7)
    z = ((hidden.abs() @ weight.abs().T + bias.abs()) / 0.7).max()
    for i, (e, p) in enumerate(zip(exact, plain, strict=True)):
        assert ((got[:, i] - e).abs() <= 2 * (p - e).abs().max() + 8 * EPS * z * (1 + i * exact[1].max())).all()
    values, logits = torch.empty(n, kernels.WIDTH.value, device=DEVICE), torch.empty(n, V + 9, device=DEVICE)
    kernels.linear_statistics(values, logits, hidden, weight, target, bias, 0.7, tile=tile)
    # Not the same bits: a product of one term may be fused with the bias, or be rounded to be stored.
    torch.testing.assert_close(values[:, :COLUMNS], got, rtol=0, atol=8 * EPS * z.item())
    exact_logits = hidden.double() @ weight.double().T
    assert ((logits[:, :V] - exact_logits).abs() <= H * EPS * (hidden.abs() @ weight.abs().T)).all()
    again = torch.empty_like(values)
    kernels.row_statistics(again, logits, V, target, bias, 0.7)
    torch.testing.assert_close(again[:, :COLUMNS], got, rtol=1e-5, atol=16 * EPS * z.item())


@EVERY_TILE
def test_impossible_and_undefined_logits(tile: kernels.Tile) -> None:
    """As in log_softmax. The infinities are in the bias: in hidden or weight, times 0, they would be NaN."""
    n, V = 7, 150
    weight, hidden = torch.zeros(V, 8, device=DEVICE), torch.randn(n, 8, device=DEVICE)
    weight[:, 0] = torch.randn(V, device=DEVICE)
    bias = torch.zeros(V, device=DEVICE)
    bias[:70] = -math.inf  # two whole tiles before the first possible token
    hidden[2] = math.nan
    target = torch.tensor([99, 3, 99, 99, -1, V, 149], device=DEVICE)
    got = statistics(hidden, weight, target, bias, tile)
    known = (target >= 0) & (target < V)
    logprob, entropy = expected(hidden, weight, target.where(known, 0), bias, 1.0, torch.float64)
    logprob = logprob.masked_fill(~known, math.nan)
    torch.testing.assert_close(got[:, 0].double(), logprob, equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, 1].double(), entropy, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert got[1, 0] == FLOOR
    for value in (-math.inf, math.inf, math.nan):
        spoilt = bias.clone()
        spoilt[:] = value if value < 0 else spoilt
        spoilt[140] = value
        assert statistics(hidden, weight, target, spoilt, tile)[:, :2].isnan().all()


@EVERY_TILE
def test_peaked_policy_keeps_its_small_entropy(tile: kernels.Tile) -> None:
    hidden, weight = torch.ones(1, 1, device=DEVICE), torch.zeros(300, 1, device=DEVICE)
    weight[7], weight[208] = 1000, 986  # one rival, in another tile: the entropy is about 15 e^-14 = 1.2e-5
    entropy = statistics(hidden, weight, torch.tensor([7], device=DEVICE), None, tile)[0, 1]
    logp = weight[:, 0].double().log_softmax(0)
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(), rtol=2e-2, atol=0)


@EVERY_TILE
def test_rows_far_apart(tile: kernels.Tile) -> None:
    hidden, weight, target, bias = inputs(40, 70, 16)
    want = statistics(hidden, weight, target, bias, tile)
    wide = (x.repeat_interleave(3, 0)[::3] for x in (hidden, weight))
    assert torch.equal(statistics(*wide, target, bias, tile), want)
    if DEVICE == "cpu":  # where untouched memory costs nothing
        apart = 2**31 // 2 + 16  # row 2 begins past 2^31 elements
        far = huge(DEVICE, 3, apart, 16), huge(DEVICE, 3, apart, 70)
        far[0].copy_(hidden[:3])
        values = torch.empty(3, kernels.WIDTH.value)
        kernels.linear_statistics(values, far[1], far[0], weight, target[:3], bias, 1.0, tile=tile)
        assert torch.equal(values[:, :COLUMNS], want[:3])
        torch.testing.assert_close(far[1].contiguous(), hidden[:3] @ weight.T)
    odd = torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view_as(hidden)  # not at a multiple of 16 bytes
    assert torch.equal(statistics(odd, weight, target, bias, tile), want)


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["all"])[::3])
@pytest.mark.parametrize("max_scratch_mb", [1e-9, 8e-3, None], ids=["one row", "few rows", "all rows"])
def test_the_loss_matches_the_closed_form(
    internal: str, external: str, features: str, max_scratch_mb: float | None
) -> None:
    objective = Objective(internal, external, **FEATURES[features])
    head, constants = sample(17, V=70, dtype=torch.float32, H=16)
    got = on_device(DEVICE, head, constants, objective, max_scratch_mb=max_scratch_mb, temperature=0.7)
    check_precision(got, head, constants, objective, 0.7)


def test_a_loss_without_gradients_and_logprobs_store_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[bool] = []
    original = kernels.linear_statistics
    monkeypatch.setattr(
        kernels, "linear_statistics", lambda *a, **o: (stored.append(a[1] is not None), original(*a, **o))[1]
    )
    head, constants = sample(17, V=70, dtype=torch.float32, H=16)
    want = on_device(DEVICE, head, constants, EVERYTHING)
    assert stored == [True]
    there = {k: v.to(DEVICE) for k, v in head.items()}
    logprob, entropy = linear_logprob(**there, backend="triton")
    assert stored == [True, False]
    torch.testing.assert_close((logprob.cpu(), entropy.cpu()), (want["logprob"], want["entropy"]))


def test_a_weight_that_lies_the_other_way_is_left_to_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "linear_statistics")
    head, constants = sample(17, V=70, dtype=torch.float32, H=16)
    head["weight"] = head["weight"].T.contiguous().T
    check_precision(on_device(DEVICE, head, constants, EVERYTHING), head, constants, EVERYTHING)


def test_same_inputs_give_the_same_bits() -> None:
    head, constants = sample(40, V=70, dtype=torch.float32, H=16)
    first, second = (tensors(on_device(DEVICE, head, constants, EVERYTHING)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_says_what_it_cannot_read() -> None:
    hidden, weight, target, bias = inputs(3, 5, 4)
    for args in ((hidden[:, :3], weight), (hidden, weight.T.contiguous().T)):
        with pytest.raises(ValueError, match=r"want hidden \(n, H\) and weight \(V, H\), contiguous in H; got"):
            statistics(*args, target, bias, None)
