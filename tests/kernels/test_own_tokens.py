"""Contract of the kernels that add the targets' own elements to the gradients; without CUDA in Triton's interpreter."""

import math

import pytest
import torch
from head_cases import huge
from torch import Tensor
from triton.runtime.jit import JITFunction

from rlplus.kernels import own_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = isinstance(own_tokens._own_weight_kernel, JITFunction)  # the interpreter truncates to bf16
WIDE, TALL = own_tokens.HIDDEN["BLOCK_C"], own_tokens.WEIGHT["BLOCK_N"]
SHAPES = pytest.mark.parametrize(
    ("n", "V", "H"), [(1, 1, 1), (TALL + 2, 1, 3), (40, 3, own_tokens.WEIGHT["BLOCK_C"] + 1), (7, 200, WIDE + 1)]
)


def draw(n: int, V: int, H: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (n, H), weight (V, H), own (n,) and target (n,); one row of several has nothing, and is garbage."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, H, generator=g).to(DEVICE, dtype) for size in (n, V))
    own, target = torch.randn(n, generator=g).to(DEVICE), torch.randint(V, (n,), generator=g).to(DEVICE)
    if n > 1:
        hidden[n // 2], own[n // 2], target[n // 2] = math.nan, 0.0, -100
    return hidden, weight, own, target


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_the_weight_are_added_to_the_factors_products(n: int, V: int, H: int, dtype: torch.dtype) -> None:
    _, weight, own, target = draw(n, V, H, dtype)
    product, factor = torch.randn(2, n, H, device=DEVICE)[0], torch.randn(n, device=DEVICE)
    for given in (weight, weight.T.contiguous().T):
        row = own.double()[:, None] * given.double()[target.where(own != 0, 0)]
        want, size = factor.double()[:, None] * product.double() + row, row.abs() + product.abs()
        got = product.clone()
        own_tokens.finish_hidden(got, factor, own, given, target)
        assert ((got - want).abs() <= 2 * torch.finfo(torch.float32).eps * size * (1 + factor.abs()[:, None])).all()


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * COMPILED, ids=str)
def test_hidden_states_are_summed_by_token(n: int, V: int, H: int, dtype: torch.dtype) -> None:
    """Also over more rows of a token than a block has; twice with the same bits, whatever rows of 0 hold."""
    hidden, before, own, target = draw(n, V, H)
    before = before.to(dtype)
    on = own != 0
    want, size = before.double(), before.double().abs()
    for total, a, x in ((want, own, hidden), (size, own.abs(), hidden.abs())):
        total.index_add_(0, target[on], a[on].double()[:, None] * x[on].double())
    apart = torch.empty(H, 2 * n, device=DEVICE).T[::2].copy_(hidden)
    found = []
    for given, garbage in ((hidden, -100), (apart, V + 7)):
        got = before.clone()
        own_tokens.add_to_weight(got, own, given, target.where(on, garbage))
        found.append(got)
    assert torch.equal(*found)
    eps = n * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)
    assert ((found[0] - want).abs() <= eps * size).all()


@pytest.mark.parametrize("turned", [False, True])
def test_rows_and_columns_beyond_2_to_the_31(turned: bool) -> None:
    def apart(x: Tensor) -> Tensor:
        """x, whose rows, or columns, are far apart."""
        x = x.T if turned else x
        far = huge(DEVICE, len(x), 2**31 // (len(x) - 1) + 10, x.shape[1]).copy_(x)
        return far.T if turned else far

    hidden, weight, own, target = draw(6, 4, 3)
    product, factor = torch.randn(6, 3, device=DEVICE), torch.randn(6, device=DEVICE)
    found = []
    for place in (lambda x: x, apart):
        got, total = product.clone(), place(weight.clone())
        own_tokens.finish_hidden(got, factor, own, place(weight), target)
        own_tokens.add_to_weight(total, own, place(hidden), target)
        found.append((got, total))
    assert all(torch.equal(near, far) for near, far in zip(*found, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, own, target = draw(5, 9, 4)
    product = torch.zeros(5, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"want product \(n, H\), contiguous.*got \(5, 4\), \(5,\), \(5,\), \(9, 3\)"):
        own_tokens.finish_hidden(product, own, own, weight[:, :3], target)
    with pytest.raises(ValueError, match=r"want product \(n, H\), contiguous"):
        own_tokens.finish_hidden(torch.zeros(4, 5, device=DEVICE).T, own, own, weight, target)
    with pytest.raises(ValueError, match=r"want dweight \(V, H\), own \(n,\).*got \(9, 4\), \(5,\), \(4, 4\), \(5,\)"):
        own_tokens.add_to_weight(weight, own, hidden[:4], target)
