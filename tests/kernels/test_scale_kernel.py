"""Contract of the kernel that scales gradients; without CUDA in Triton's interpreter (see conftest.py)."""

import math

import pytest
import torch
from head_cases import huge
from triton.runtime.jit import JITFunction

from rlplus.kernels import scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = isinstance(scale._scale_kernel, JITFunction)  # the interpreter truncates to bf16
DTYPES = [torch.float16, torch.float32, torch.float64] + [torch.bfloat16] * COMPILED
BLOCK = scale.LAUNCH["BLOCK"]


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
