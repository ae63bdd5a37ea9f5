"""Contract of the small kernels around the gradient buffer; without CUDA in Triton's interpreter (see conftest.py)."""

import math

import pytest
import torch
from head_cases import huge
from torch import Tensor
from triton.runtime.jit import JITFunction

from rlplus.kernels import active_rows as gathering
from rlplus.kernels import scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = isinstance(scale._scale_kernel, JITFunction)  # the interpreter truncates to bf16
DTYPES = [torch.float16, torch.float32, torch.float64] + [torch.bfloat16] * COMPILED
BLOCK, BLOCK_N = scale.LAUNCH["BLOCK"], gathering.LAUNCH["BLOCK_N"]


# ---- the factor of the backward pass


@pytest.mark.parametrize("shape", [(1,), (BLOCK + 1,), (3, 7), (2, BLOCK), (5, 80), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_is_one_multiplication_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    x = (100 * torch.randn(shape, generator=g, dtype=torch.float64)).to(DEVICE, dtype)
    for factor in (0.37, -3.0, 65536.0, 1e-6, 0.0, 1.0, math.inf, math.nan):
        by = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
        got = x.clone()
        assert scale.scale_(got, by) is got
        torch.testing.assert_close(got, (x.to(by.dtype) * by).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_scaling_shares_rows_out_over_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "PROGRAMS", 4)
    for rows in (3, 4, 9):
        x = torch.randn(rows, 5, device=DEVICE)
        assert torch.equal(scale.scale_(x.clone(), torch.tensor(0.3, device=DEVICE)), x * 0.3)


def test_scaling_rows_that_lie_apart_and_beyond_2_to_the_31() -> None:
    x = huge(DEVICE, 3, 2**31 // 2 + 10, 20)
    x.copy_(torch.randn(3, 20))
    want = x * 0.3
    assert torch.equal(scale.scale_(x, torch.tensor(0.3, device=DEVICE)), want)


def test_scaling_says_what_it_cannot_do() -> None:
    one = torch.ones((), device=DEVICE)
    with pytest.raises(
        ValueError, match=r"want x \(n, m\) or \(m,\), contiguous in m.*got \(2, 3\) with strides \(1, 2\)"
    ):
        scale.scale_(torch.zeros(3, 2, device=DEVICE).T, one)
    with pytest.raises(ValueError, match="one number"):
        scale.scale_(torch.zeros(3, 2, device=DEVICE), torch.ones(2, device=DEVICE))


# ---- which rows have a gradient


def slopes(n: int) -> Tensor:
    """values (n, 6): slopes of every kind, NaN among them, a third of the rows without any."""
    g = torch.Generator().manual_seed(n)
    values = torch.randn(n, 6, generator=g)
    kind = torch.randint(7, (n,), generator=g)
    values[kind < 2, 4:] = 0.0
    values[kind == 2, 4] = values[kind == 3, 5] = 0.0
    values[kind == 4, 4:] = torch.tensor([math.nan, 0.0])
    values[kind == 5, 4:] = torch.tensor([0.0, math.nan])
    return values.to(DEVICE)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("n", [0, 1, 7, BLOCK_N, 2 * BLOCK_N + 5])
def test_active_rows_get_places_in_their_order(n: int, scaled: bool, every: bool) -> None:
    before, first, start = slopes(n), 13, 100
    values, spare = before.clone(), first + n + 3
    slot = torch.full((n,), -9, device=DEVICE)
    token, filled = torch.full((spare,), -7, device=DEVICE), torch.tensor([first], device=DEVICE)
    active = torch.empty(n, dtype=torch.int32, device=DEVICE) if every else None
    factor = torch.tensor(4.0, device=DEVICE) if scaled else None
    gathering.active_rows(slot, token, filled, values, start, factor, active)

    on = ((before[:, 4] != 0) | (before[:, 5] != 0)).tolist()
    if active is not None:
        assert active.tolist() == on
    taken = [i for i in range(n) if on[i] or every]
    assert slot.tolist() == [first + taken.index(i) if i in taken else -1 for i in range(n)]
    assert filled.tolist() == [first + len(taken)]
    rest = spare - first - len(taken)
    assert token.tolist() == [-7] * first + [start + i for i in taken] + [-7] * rest
    before[:, 4:] *= 4.0 if scaled else 1.0
    torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)


def test_chunks_follow_one_another_in_the_buffer() -> None:
    token, filled = torch.full((64,), -7, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    want: list[int] = []
    for start in range(0, 60, 20):
        values = slopes(20 + start)[:20]
        slot = torch.empty(20, dtype=torch.int64, device=DEVICE)
        gathering.active_rows(slot, token, filled, values, start, None, None)
        want += [start + i for i, row in enumerate(values[:, 4:].tolist()) if any(x != 0 for x in row)]
    assert token[: len(want)].tolist() == want
    assert filled.item() == len(want)


def test_active_rows_says_what_it_cannot_do() -> None:
    slot = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"want values \(n, 6\), contiguous, and slot \(n,\); got \(3, 5\)"):
        gathering.active_rows(slot, slot, slot[:1], torch.zeros(3, 5, device=DEVICE), 0, None, None)
