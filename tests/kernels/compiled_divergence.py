"""The kernels of a divergence as Triton compiles them, executed by ptxcheck; see compiled_kernels.py."""

import math
import os

import pytest
import torch
from compiled_heads import BF16, EPS, F16, F32, check_launches, rows
from ptxcheck.launcher import Run
from torch import Tensor
from two_heads import of_logits

from rlplus.kernels import divergence_rows as kernels
from rlplus.kernels.divergence_rows import DIVERGENCE, WEIGHT, WIDTH, Transform
from rlplus.kernels.tiling import Block

ARCHES = pytest.mark.parametrize("arch", [int(arch) for arch in os.environ.get("PTX_ARCHES", "80 90").split()])
slow = pytest.mark.slow
KIND = {0.0: ("forward_kl", None), 1.0: ("reverse_kl", None), 0.3: ("jsd", 0.3)}


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The launcher's: what was never written is known, and not only a NaN."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def z_of(logits: Tensor, transform: Transform) -> Tensor:
    x = logits if transform.bias is None else logits + transform.bias.to(logits.dtype)
    x = x / transform.temperature
    x = x if transform.softcap is None else transform.softcap * (x / transform.softcap).tanh()
    own = transform.row_temperature
    return x if own is None else x / own[:, None].to(x.dtype)


def transform_of(n: int, V: int, bias: torch.dtype | None, softcap: float | None, own: bool) -> Transform:
    shift = None if bias is None else torch.randn(V).to(bias)
    return Transform(shift, 0.7, softcap, 0.5 + torch.rand(n) if own else None)


def check(
    logits: Tensor, teacher: Tensor, V: int, transforms: tuple[Transform, Transform], beta: float, kept: torch.dtype,
    in_place: bool = False,
) -> None:  # fmt: skip
    """Values and gradients against float64; the last row has no weight and NaNs, the one before it is nearly sure."""
    n, (of_student, of_teacher) = len(logits), transforms
    if n > 2:
        logits[-1, :V] = teacher[-1, :V] = math.nan
        logits[-2, V // 3], teacher[-2, V // 3] = 14.0, 15.0
    exact = logits[:, :V].double().requires_grad_()
    values = torch.empty(n, WIDTH.value)
    kernels.row_divergences(values, logits, teacher, V, *transforms, beta)
    kind, number = KIND[beta]
    z, t = z_of(exact, of_student), z_of(teacher[:, :V].double(), of_teacher)
    want = of_logits(z, t, kind, number)
    weights = torch.randn(n)
    if n > 2:
        weights[-1] = 0.0
    counts = weights != 0
    values[:, WEIGHT.value] = weights
    (slope,) = torch.autograd.grad((want.where(counts, 0.0) * weights).sum(), exact)
    slope = slope.where(counts[:, None], 0.0)
    out = logits if in_place else torch.full_like(logits, 9.0, dtype=kept)
    kernels.row_gradients(out, values, logits, teacher, V, *transforms, beta)
    size = 1 + max(x.nan_to_num().abs().max().item() for x in (z.detach(), t))
    found = values[:, DIVERGENCE.value].double()
    assert found.isnan().equal(~counts)
    error, bound = (found - want.detach()).abs(), 16 * EPS * size * want.detach()
    assert (error <= bound + 1e-9)[counts].all(), (error, want)
    error = (out[:, :V].double() - slope).abs()
    rounding = 0.0 if kept == F32 else torch.finfo(kept).eps
    bound = 64 * EPS * size * slope.abs().amax(1, keepdim=True) + rounding * slope.abs() + 2.0**-24 * (kept == F16)
    assert (error <= bound + 1e-12).all(), (error - bound).max()
    assert n < 3 or out[-1, :V].eq(0).all()


@ARCHES
@pytest.mark.parametrize("beta", KIND)
def test_values_and_gradients_of_pairs_of_rows(launch: list[Run], beta: float) -> None:
    n, V, W = 4, 2051, 2112
    transforms = transform_of(n, V, None, None, False), transform_of(n, V, None, None, False)
    check(rows(n, V, W), rows(n, V, W), V, transforms, beta, BF16)
    check_launches(launch, "logits", "teacher_logits")


@slow
@ARCHES
@pytest.mark.parametrize("beta", KIND)
@pytest.mark.parametrize("kept", [BF16, F16, F32], ids=str)
def test_every_option_of_both_heads(launch: list[Run], beta: float, kept: torch.dtype) -> None:
    for n, V, W in ((1, 1, 1), (2, 7, 64), (4, 300, 300), (4, 4099, 4160)):
        both = (transform_of(n, V, BF16, 30.0, True), transform_of(n, V, F32, 4.0, True))
        for transforms in (both, both[::-1], (Transform(), both[1]), (both[0], Transform())):
            check(rows(n, V, W), rows(n, V, W), V, transforms, beta, kept, in_place=kept == F32)
    check_launches(launch, "logits", "teacher_logits", "dlogits")


@slow
@ARCHES
@pytest.mark.parametrize("block", [Block(1024, 4), Block(4096, 8)], ids=str)
def test_other_blocks_give_the_same_numbers(launch: list[Run], block: Block) -> None:
    logits, teacher = rows(3, 5000, 5056), rows(3, 5000, 5056)
    found = []
    for size in (kernels.ROWS, block):
        values = torch.empty(3, WIDTH.value)
        kernels.row_divergences(values, logits, teacher, 5000, Transform(), Transform(), 0.3, size)
        values[:, WEIGHT.value] = 1.0
        out = torch.empty(3, 5056)
        kernels.row_gradients(out, values, logits, teacher, 5000, Transform(), Transform(), 0.3, size)
        found.append((values, out[:, :5000]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    check_launches(launch, "logits", "teacher_logits")
