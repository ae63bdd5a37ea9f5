"""Bits of compiled kernels: of a row with any rows beside it, in any number of rows; in any order of blocks.

Run as compiled_kernels.py is. The order of sums within an instruction of a tensor core is not documented, nor modelled.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from compiled_heads import BF16, F16, Transform, gemm_inputs, given_values, new_values, rows, statistics, width
from ptx.executor import Options
from ptx.launcher import Run, executed, findings_of
from torch import Tensor

from rlplus.kernels import exponentials
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import STATISTICS, TILES, Tiling

N, V, H = 20, 4099, 64
SMALL = 300  # vocabulary of the GEMMs


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The launcher's: what was never written is known, and not only a NaN."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Case:
    """Inputs of N rows; `take` makes those of some of them, and `spoil` fills all rows but one with other numbers."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.logits, self.target = rows(N, V, width(V)), torch.randint(V, (N,))
        self.values = given_values(statistics(self.logits[:, :V].double(), self.target), torch.randn(N), torch.randn(N))
        self.hidden, self.weight = gemm_inputs(N, SMALL, H, BF16)
        self.small = torch.randint(SMALL, (N,))

    def take(self, some: Tensor) -> "Case":
        one = Case.__new__(Case)
        one.arch, one.weight = self.arch, self.weight
        for name in ("logits", "target", "values", "hidden", "small"):
            setattr(one, name, getattr(self, name)[some].contiguous())
        return one

    def spoil(self, kept: int) -> "Case":
        one = self.take(torch.arange(N))
        others = torch.arange(N) != kept
        one.logits[others], one.hidden[others] = 1e30, float("nan")
        one.values[others] = 7.0
        one.target[others], one.small[others] = -1, SMALL
        return one


def rows_by_one_program(c: Case) -> Tensor:
    values = new_values(len(c.target))
    kernels.row_statistics(values, c.logits, V, c.target, *Transform(), tiling=Tiling(programs=1))
    return values[:, :4]


def rows_by_several_programs(c: Case) -> Tensor:
    values = new_values(len(c.target))
    kernels.row_statistics(values, c.logits, V, c.target, *Transform())
    return values[:, :4]


def rows_by_blocks(c: Case) -> Tensor:
    values, so_far = new_values(len(c.target)), kernels.begin_statistics(len(c.target), c.logits.device)
    for start in (0, 2048):
        stop = min(V, start + 2048) if start == 0 else V
        kernels.add_statistics(values, so_far, c.logits[:, start:stop], stop - start, c.target - start, *Transform())
    kernels.finish_statistics(values, so_far, V, c.target)
    return values[:, :4]


def gradient(c: Case) -> Tensor:
    n = len(c.target)
    out = torch.zeros(n, c.logits.shape[1], dtype=BF16)
    kernels.row_gradient(out, torch.arange(n), c.values, c.logits, V, c.target, *Transform())
    return out[:, :V]


def gemm(c: Case) -> Tensor:
    values, n = new_values(len(c.small)), len(c.small)
    logits = torch.zeros(n, width(SMALL))
    kernels.linear_statistics(values, logits, c.hidden, c.weight, c.small, *Transform(), tile=TILES[c.arch // 10][1])
    return torch.cat([values[:, :4], logits[:, :SMALL]], 1)


def gemm_of_exponentials(c: Case) -> Tensor:
    values, n, tile = new_values(len(c.small)), len(c.small), TILES[c.arch // 10][1]
    e, out = torch.zeros(n, width(SMALL), dtype=F16), torch.zeros(n, width(SMALL), dtype=BF16)
    tops = kernels.linear_statistics(values, e, c.hidden, c.weight, c.small, *Transform(), tile=tile)
    values[:, 4], values[:, 5] = c.values[:, 4], 0.0
    exponentials.row_gradient(out, torch.arange(n), values, e, tops, tile.BLOCK_V, SMALL, c.small, 0.7)
    return torch.cat([values[:, :4], out[:, :SMALL]], 1)


KERNELS = [rows_by_one_program, rows_by_several_programs, rows_by_blocks, gradient, gemm, gemm_of_exponentials]


def every(*quick: Callable[["Case"], Tensor]) -> pytest.MarkDecorator:
    """Each kernel for each architecture; these for sm_80 are quick."""
    params = [
        pytest.param(arch, kernel, marks=() if arch == 80 and kernel in quick else pytest.mark.slow)
        for arch, kernel in itertools.product((80, 90), KERNELS)
    ]
    return pytest.mark.parametrize(("arch", "kernel"), params, ids=lambda x: getattr(x, "__name__", str(x)))


def same(a: Tensor, b: Tensor) -> bool:
    """All bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@every(rows_by_one_program)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    launch: list[Run], arch: int, kernel: Callable[[Case], Tensor]
) -> None:
    case = Case(arch)
    want = kernel(case)
    assert want[:, 0].unique().numel() > N // 2
    for row in (0, 7):
        assert same(kernel(case.spoil(row))[row], want[row])
    order = torch.randperm(N)
    assert same(kernel(case.take(order)), want[order])


@every(gemm)
def test_a_row_does_not_depend_on_how_many_there_are(
    launch: list[Run], arch: int, kernel: Callable[[Case], Tensor]
) -> None:
    """Also where a number of 1, or a multiple of 16, is compiled in. A chunk is nothing but fewer rows."""
    case = Case(arch)
    want = kernel(case)
    for n in (1, 7, 16):
        assert same(kernel(case.take(torch.arange(n))), want[:n]), n
    assert same(kernel(case.take(torch.arange(13, N))), want[13:])


@every()
def test_the_order_of_blocks_changes_no_bit(arch: int, kernel: Callable[[Case], Tensor]) -> None:
    case = Case(arch)
    results = []
    for seed in (None, 1, 2):
        options = Options() if seed is None else Options(blocks="random", seed=seed, batch=512)
        with executed(arch, options) as runs:
            results.append(kernel(case))
        assert not findings_of(runs)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.slow
def test_rows_that_several_programs_share_depend_on_how_many_share_them() -> None:
    """docs/kernels.md says so. 300 rows have 2 programs a row, 250 have 3; so do 200."""
    V = 8 * 2048 + 3
    logits, target = rows(300, V, width(V)), torch.randint(V, (300,))
    values = []
    for n in (300, 250, 200):
        values.append(new_values(n))
        with executed(80) as runs:
            tiling = Tiling(statistics=STATISTICS[1])
            kernels.row_statistics(values[-1], logits[:n], V, target[:n], *Transform(), tiling=tiling)
        assert not findings_of(runs)
    assert same(values[1][:200, :4], values[2][:, :4])
    assert not same(values[0][:200, :4], values[2][:, :4])
    torch.testing.assert_close(values[0][:200, :4], values[2][:, :4], rtol=1e-6, atol=1e-5)
