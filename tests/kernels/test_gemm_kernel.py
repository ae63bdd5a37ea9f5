"""Our first GEMM, with exponentials and their sums in its epilogue; without CUDA in Triton's interpreter."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, check_precision, huge, on_device, own_gemm, sample, tensors
from head_rows import DENTROPY, DLOGPROB, ENTROPY, LOGPROB, REFERENCE, closed
from quick import only, pairs
from torch import Tensor

from rlplus import Objective, linear_logprob
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.row_values import WIDTH
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends import ways
from rlplus.loss.backends.ways import Way
from rlplus.loss.head.head import Head
from rlplus.loss.objective.tokens import FLOOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
# Small ones, on CUDA too.
TILES = [pytest.param(tile, id="TMA" if tile.tma else "pointers") for tile in kernels.TILES[0]]
EVERY_TILE = pytest.mark.parametrize("tile", TILES)


@pytest.fixture(autouse=True)
def use_this_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "our_tile", own_gemm)


def inputs(n: int, V: int, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = torch.randn(n, H), 2 * H**-0.5 * torch.randn(V, H), torch.randn(V)
    target = torch.randint(V, (n,))
    return tuple(x.to(DEVICE) for x in (hidden, weight, target, bias))  # type: ignore[return-value]


def evaluated(head: Head, tile: kernels.Tile, kept: torch.dtype | None = None) -> tuple[Tensor, Any]:
    """values (n, WIDTH) and exponentials (n, W) of all rows as the backend computes them."""
    work = backend.Work(head, Way(tile, kept), None, 1e9)
    ((_, _, values),) = work.chunks()
    return values, work.exponentials


def expected(head: Head, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """z, logprob and entropy."""
    z = (head.hidden.to(dtype) @ head.weight.to(dtype).T + (0 if head.bias is None else head.bias.to(dtype))) / (
        head.temperature
    )
    logp = z.log_softmax(1).clamp(min=FLOOR)
    return z, logp.gather(1, head.target[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize(
    ("n", "shape", "tile"),
    pairs([1, pytest.param(33, marks=pytest.mark.slow), 100], [(1, 1), (63, 7), (64, 32), (65, 72), (200, 31)], TILES),
)
def test_every_shape_with_and_without_storing(n: int, shape: tuple[int, int], tile: kernels.Tile) -> None:
    """100 rows: more tiles than a group has, and the last group has fewer."""
    V, H = shape
    hidden, weight, target, bias = inputs(n, V, H)
    head = Head(hidden, weight, bias, target, 0.7)
    exact, plain = (expected(head, dtype) for dtype in (torch.float64, torch.float32))
    got, e = evaluated(head, tile, torch.float32)
    size = ((hidden.abs() @ weight.abs().T + bias.abs()) / 0.7).max()
    for column, want, p in zip((LOGPROB, ENTROPY), exact[1:], plain[1:], strict=True):
        bound = 2 * (p - want).abs().max() + 8 * EPS * size * (1 + (column == ENTROPY) * exact[2].max())
        assert ((got[:, column] - want).abs() <= bound).all()
    others = (exact[0] - got[:, REFERENCE, None]).exp().scatter(1, target[:, None], 0.0)
    assert ((e[:, :V] - others).abs() <= 16 * EPS * size * others).all()
    alone, none = evaluated(head, tile)
    assert none is None
    # Not the same bits: a product of one term may be fused with the bias.
    torch.testing.assert_close(alone[:, :DLOGPROB], got[:, :DLOGPROB], rtol=0, atol=8 * EPS * size.item())


@EVERY_TILE
def test_every_tile_is_computed_at_once(tile: kernels.Tile) -> None:
    """Also in the last group, which has fewer tiles: sums that are NaN would be computed again, and be right."""
    n, V = (2 * tile.GROUP_M + 1) * tile.BLOCK_M - 3, 3 * tile.BLOCK_V + 1
    hidden, weight, target, bias = inputs(n, V, 8)
    values, e = torch.empty(n, WIDTH.value, device=DEVICE), torch.full((n, V), torch.nan, device=DEVICE)
    kernels.target_logits(values, hidden, weight, target, bias, 1.0)
    partial = torch.full((4, kernels.PARTIALS.value, n), torch.nan, device=DEVICE)
    kernels.linear_exponentials(partial, e, values, hidden, weight, target, bias, 1.0, tile=tile)
    assert partial.isfinite().all()
    assert e.isfinite().all()


@EVERY_TILE
@pytest.mark.parametrize("entropy", [False, True])
def test_the_gradient_of_the_logits(entropy: bool, tile: kernels.Tile) -> None:
    hidden, weight, target, bias = inputs(40, 200, 31)
    own = 0.5 + torch.rand(40, device=DEVICE)
    for softcap in (None, *(() if entropy else (4.0,))):
        head = Head(hidden, weight, bias, target, 0.7, softcap, own)
        values, e = evaluated(head, tile, torch.float32)
        values[:, DLOGPROB], values[:, DENTROPY] = torch.randn(40, device=DEVICE), 0.0
        values[::3, DENTROPY] = 0.1 * entropy
        logits = (hidden.double() @ weight.double().T).requires_grad_()
        x = (logits + bias) / 0.7
        z = (x if softcap is None else softcap * (x / softcap).tanh()) / own[:, None]
        logp = z.log_softmax(1)
        logprob, h = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)
        total = (values[:, DLOGPROB] * logprob + values[:, DENTROPY] * h).sum()
        (want,) = torch.autograd.grad(total, logits)
        got = closed(values, e, 200, target, 0.7, own, entropy=entropy)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


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
    head = Head(hidden, weight, bias, target, 1.0)
    got, _ = evaluated(head, tile, torch.float32)
    known = (target >= 0) & (target < V)
    _, logprob, entropy = expected(head._replace(target=target.where(known, 0)), torch.float64)
    logprob = logprob.masked_fill(~known, math.nan)
    torch.testing.assert_close(got[:, LOGPROB].double(), logprob, equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, ENTROPY].double(), entropy, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert got[1, LOGPROB] == FLOOR
    for value in (-math.inf, math.inf, math.nan):
        spoilt = bias.clone()
        spoilt[:] = value if value < 0 else spoilt
        spoilt[140] = value
        assert evaluated(head._replace(bias=spoilt), tile)[0][:, :2].isnan().all()


@EVERY_TILE
@pytest.mark.parametrize("gap", only([41.0, 200.0], [39.0, 41.0, 100.0, 200.0]))
def test_rows_whose_token_is_next_to_impossible_are_computed_again(gap: float, tile: kernels.Tile) -> None:
    """Two in different tiles of rows, beside others, whose bits they leave as they are: those of the same places."""
    n, V = 70, 150
    hidden, weight, target, _ = inputs(n, V, 8)
    plain, e_plain = evaluated(Head(hidden, weight, None, target, 1.0), tile, torch.float32)
    bad = torch.tensor([5, 66], device=DEVICE)
    hidden[bad], target[bad] = 0.0, torch.tensor([7, 149], device=DEVICE)
    hidden[bad, 0] = gap
    weight[:, 0] = 0.01 * torch.rand(V, device=DEVICE)
    weight[[7, 149], 0] = -1.0
    others = torch.ones(n, dtype=torch.bool, device=DEVICE).index_fill(0, bad, value=False)
    hidden[others, 0] = 0.0
    head = Head(hidden, weight, None, target, 1.0)
    values, e = evaluated(head, tile, torch.float32)
    z, logprob, entropy = expected(head, torch.float64)
    torch.testing.assert_close(values[:, LOGPROB].double(), logprob, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(values[:, ENTROPY].double(), entropy, rtol=1e-5, atol=1e-5)
    tame = evaluated(head._replace(hidden=hidden.masked_fill(~others[:, None], 0.0)), tile, torch.float32)
    assert torch.equal(values[others, :DLOGPROB], tame[0][others, :DLOGPROB])
    values[:, DLOGPROB], values[:, DENTROPY] = 0.5, 0.0
    got = closed(values, e, V, target, 1.0)
    want = 0.5 * (torch.nn.functional.one_hot(target, V) - z.softmax(1))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-7)
    assert plain.shape == values.shape
    assert e_plain.shape == e.shape


@EVERY_TILE
@pytest.mark.parametrize(("tiles", "good"), [(3, 1), (2, 0)])
def test_rows_of_several_tiles_are_computed_again(tiles: int, good: int, tile: kernels.Tile) -> None:
    """Whole tiles of them; with and without a row behind that is not."""
    bad, V = tiles * tile.BLOCK_M, 150
    n = bad + good
    hidden, weight, target, _ = inputs(n, V, 8)
    target[:bad], hidden[:bad, 0], hidden[bad:, 0], weight[:, 0] = 7, 100.0, 0.0, 0.0
    weight[7, 0] = -1.0
    head = Head(hidden, weight, None, target, 1.0)
    values, e = evaluated(head, tile, torch.float32)
    z, logprob, entropy = expected(head, torch.float64)
    torch.testing.assert_close(values[:, LOGPROB].double(), logprob, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(values[:, ENTROPY].double(), entropy, rtol=1e-5, atol=1e-5)
    values[:, DLOGPROB], values[:, DENTROPY] = 0.5, 0.0
    want = 0.5 * (torch.nn.functional.one_hot(target, V) - z.softmax(1))
    torch.testing.assert_close(closed(values, e, V, target, 1.0).double(), want, rtol=1e-4, atol=1e-7)


@EVERY_TILE
def test_a_nearly_sure_token_keeps_all_its_digits(tile: kernels.Tile) -> None:
    hidden, weight = torch.ones(1, 1, device=DEVICE), torch.zeros(300, 1, device=DEVICE)
    weight[7], weight[208] = 100, 86  # one rival, in another tile: 1 - p and the entropy are about e^-14
    values, _ = evaluated(Head(hidden, weight, None, torch.tensor([7], device=DEVICE), 1.0), tile)
    rest = math.exp(-14.0) + 298 * math.exp(-100.0)
    entropy = math.log1p(rest) + 14 * rest / (1 + rest)
    assert values[0, LOGPROB].item() == pytest.approx(-math.log1p(rest), rel=1e-5)
    assert values[0, ENTROPY].item() == pytest.approx(entropy, rel=1e-5)


@EVERY_TILE
def test_rows_far_apart(tile: kernels.Tile) -> None:
    hidden, weight, target, bias = inputs(40, 70, 16)
    head = Head(hidden, weight, bias, target, 1.0)
    want = evaluated(head, tile)[0][:, :DLOGPROB]
    hidden_apart, weight_apart = (x.repeat_interleave(3, 0)[::3] for x in (hidden, weight))
    found, _ = evaluated(head._replace(hidden=hidden_apart, weight=weight_apart), tile)
    assert torch.equal(found[:, :DLOGPROB], want)
    if DEVICE == "cpu":  # where untouched memory costs nothing
        apart = 2**31 // 2 + 16  # row 2 begins past 2^31 elements
        far, e = huge(DEVICE, 3, apart, 16), huge(DEVICE, 3, apart, 70)
        far.copy_(hidden[:3])
        values, near = torch.zeros(3, want.shape[1] + 3), torch.empty(3, 70)
        for x, kept in ((far, e), (hidden[:3], near)):
            rest = (x, weight, target[:3], bias, 1.0)
            partial = torch.empty(-(-70 // tile.BLOCK_V), kernels.PARTIALS.value, 3)
            kernels.target_logits(values, *rest)
            kernels.linear_exponentials(partial, kept, values, *rest, tile=tile)
        assert torch.equal(e.contiguous(), near)
    odd = torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view_as(hidden)  # not at a multiple of 16 bytes
    assert torch.equal(evaluated(head._replace(hidden=odd), tile)[0][:, :DLOGPROB], want)


SCRATCH = (1e-9, 8e-3, None)  # MB: one row, few rows, all rows
OBJECTIVES = [names[:2] for names in all_objectives(["all"])[::3]]


@pytest.mark.parametrize(
    ("names", "max_scratch_mb"),
    only([(names, SCRATCH[i % 3]) for i, names in enumerate(OBJECTIVES)], product(OBJECTIVES, SCRATCH)),
)
def test_the_loss_matches_the_closed_form(names: tuple[str, str], max_scratch_mb: float | None) -> None:
    objective = Objective(*names, **FEATURES["all"])
    head, constants = sample(17, V=70, dtype=torch.float32, H=16)
    got = on_device(DEVICE, head, constants, objective, max_scratch_mb=max_scratch_mb, temperature=0.7)
    check_precision(got, head, constants, objective, 0.7)


def test_a_loss_without_gradients_and_logprobs_store_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[bool] = []
    original = kernels.linear_exponentials
    monkeypatch.setattr(
        kernels, "linear_exponentials", lambda *a, **o: (stored.append(a[1] is not None), original(*a, **o))[1]
    )
    head, constants = sample(17, V=70, dtype=torch.float32, H=16)
    want = on_device(DEVICE, head, constants, EVERYTHING)
    assert any(stored)
    stored.clear()
    there = {k: v.to(DEVICE) for k, v in head.items()}
    logprob, entropy = linear_logprob(**there, backend="triton")
    assert stored
    assert not any(stored)
    torch.testing.assert_close((logprob.cpu(), entropy.cpu()), (want["logprob"], want["entropy"]))


def test_a_weight_that_lies_the_other_way_is_left_to_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "linear_exponentials")
    head, constants = sample(17, V=70, dtype=torch.float32, H=16)
    head["weight"] = head["weight"].T.contiguous().T
    check_precision(on_device(DEVICE, head, constants, EVERYTHING), head, constants, EVERYTHING)


def test_same_inputs_give_the_same_bits() -> None:
    head, constants = sample(40, V=70, dtype=torch.float32, H=16)
    first, second = (tensors(on_device(DEVICE, head, constants, EVERYTHING)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_says_what_it_cannot_read() -> None:
    hidden, weight, target, bias = inputs(3, 5, 4)
    values, partial = torch.empty(3, 7, device=DEVICE), torch.empty(1, 3, 3, device=DEVICE)
    for args in ((hidden[:, :3], weight), (hidden, weight.T.contiguous().T)):
        with pytest.raises(ValueError, match=r"want hidden \(n, H\) and weight \(V, H\), contiguous in H; got"):
            kernels.linear_exponentials(partial, None, values, *args, target, bias, 1.0)
    with pytest.raises(ValueError, match=r"want partial \(1, 3, 3\), contiguous; got \(2, 3, 3\)"):
        kernels.linear_exponentials(torch.empty(2, 3, 3), None, values, hidden, weight, target, bias, 1.0)
    with pytest.raises(ValueError, match=r"want exponentials \(3, W\), W >= 5, contiguous in W; got .*\(3, 4\)"):
        kernels.linear_exponentials(partial, values[:, :4], values, hidden, weight, target, bias, 1.0)
    with pytest.raises(ValueError, match=r"want hidden \(3, 4\); got \(3, 3\)"):
        kernels.target_logits(values, hidden[:, :3], weight, target, bias, 1.0)
