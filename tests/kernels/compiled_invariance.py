"""Bits of compiled kernels: of a row with any rows beside it, in any number of rows; in any order of blocks.

Run as compiled_kernels.py is. The order of sums within an instruction of a tensor core is not documented, nor modelled.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from closed_form import sample_constants
from compiled_heads import (
    BF16,
    F32,
    Transform,
    by_blocks,
    closed,
    from_hidden,
    gemm_inputs,
    given_values,
    make_impossible,
    new_values,
    rows,
    width,
)
from head_rows import DENTROPY, DLOGPROB, ENTROPY, LOGPROB, statistics
from ptxcheck.executor import Options
from ptxcheck.launcher import Run, executed, findings_of
from torch import Tensor

from rlplus import Objective
from rlplus.kernels import divergence_rows, exponentials, policy_loss, scale, tiling
from rlplus.kernels.tiling import TILES, Block
from rlplus.loss import TokenConstants
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends.ways import Way
from rlplus.loss.head.head import Head

N, V, H = 20, 4099, 64
SMALL = 300  # vocabulary of the GEMMs
HALF = 2051  # vocabulary of a divergence: two blocks


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The launcher's: what was never written is known, and not only a NaN."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


LISTED = (0, 9, 16)  # rows whose targets are next to impossible: they are computed again


class Case:
    """Inputs of N rows; `take` makes those of some of them, and `spoil` fills all rows but one with other numbers."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.logits, self.target = rows(N, V, width(V)), torch.randint(V, (N,))
        self.logits[LISTED, self.target[[*LISTED]]] = -140.0
        self.slopes = torch.randn(N, 2)
        self.values = given_values(self.logits[:, :V], self.target, Transform(), *self.slopes.T)
        self.teacher = rows(N, HALF, width(HALF))
        self.constants, self.given = backend.token_columns(TokenConstants(**sample_constants((N,), 0, F32)))
        self.hidden, self.weight = gemm_inputs(N, SMALL, H, BF16)
        self.small = torch.randint(SMALL, (N,))
        make_impossible(self.hidden, self.weight, self.small, [*LISTED])

    def take(self, some: Tensor) -> "Case":
        one = Case.__new__(Case)
        one.arch, one.weight, one.given = self.arch, self.weight, self.given
        for name in ("logits", "teacher", "target", "slopes", "values", "constants", "hidden", "small"):
            setattr(one, name, getattr(self, name)[some].contiguous())
        return one

    def spoil(self, kept: int) -> "Case":
        one = self.take(torch.arange(N))
        others = torch.arange(N) != kept
        one.logits[others], one.hidden[others] = 1e30, float("nan")
        one.teacher[others] = one.constants[others] = float("nan")
        one.values[others] = one.slopes[others] = 7.0
        one.target[others], one.small[others] = -1, SMALL
        return one

    def close(self, values: Tensor, e: Tensor, V: int, target: Tensor, entropy: bool) -> Tensor:
        """The known columns of the rows, and the gradient."""
        values[:, DLOGPROB : DENTROPY + 1] = self.slopes if entropy else self.slopes * torch.tensor([1.0, 0.0])
        return torch.cat([values, closed(values, e, V, target, Transform(), entropy)], 1)


def rows_by_one_program(c: Case) -> Tensor:
    e = torch.zeros(len(c.target), c.logits.shape[1], dtype=BF16)
    values = statistics(c.logits, c.target, V, Transform(), kept=e)
    return c.close(values, e, V, c.target, entropy=True)


def rows_by_several_programs(c: Case) -> Tensor:
    return statistics(c.logits, c.target, V, Transform(), parts=2)[:, :DLOGPROB]


def rows_by_blocks(c: Case) -> Tensor:
    return by_blocks(c.logits, V, c.target, Transform(), 2048)[:, :DLOGPROB]


def gradient(c: Case) -> Tensor:
    out = torch.zeros(len(c.target), c.logits.shape[1], dtype=BF16)
    exponentials.row_gradient(out, c.values, c.logits, V, c.target, *Transform())
    return out[:, :V]


def gemm(c: Case) -> Tensor:
    return from_hidden(c.hidden, c.weight, c.small, Transform(), TILES[c.arch // 10][1])[0][:, :DLOGPROB]


def gemm_of_exponentials(c: Case) -> Tensor:
    values, e, marked = from_hidden(c.hidden, c.weight, c.small, Transform(), TILES[c.arch // 10][1], BF16)
    assert marked.any()
    assert e is not None
    return c.close(values, e, SMALL, c.small, entropy=False)


def divergence(c: Case) -> Tensor:
    """The divergence from a teacher, what its gradient needs, and the gradient."""
    values = torch.empty(len(c.target), divergence_rows.WIDTH.value)
    rest = (c.logits, c.teacher, HALF, divergence_rows.Transform(), divergence_rows.Transform(), 0.3)
    divergence_rows.row_divergences(values, *rest)
    values[:, divergence_rows.WEIGHT.value] = c.slopes[:, 0]
    out = torch.zeros(len(c.target), width(HALF), dtype=BF16)
    divergence_rows.row_gradients(out, values, *rest)
    return torch.cat([values, out[:, :HALF].float()], 1)


def objective(c: Case) -> Tensor:
    """The slopes of tokens in one block, and of seven times as many in two."""
    o, found = Objective("clip", "mis", entropy_coef=0.01, kl_coef=0.1), []
    for times in (1, 7):
        values = new_values(times * len(c.target))
        values[:, LOGPROB : ENTROPY + 1] = c.values[:, LOGPROB : ENTROPY + 1].repeat(times, 1)
        numbers, names = backend.coefficients(o), backend.choices(o)
        policy_loss.token_loss(values, c.constants.repeat(times, 1), numbers, c.given, names)
        found += values[:, : DENTROPY + 1].split(len(c.target))
    return torch.cat([x[:, [LOGPROB, DLOGPROB, DENTROPY]] for x in found], 1)


def scaled(c: Case) -> Tensor:
    return scale.scale_(c.logits[:, :V].to(BF16), torch.tensor(0.37))


KERNELS = [
    rows_by_one_program, rows_by_several_programs, rows_by_blocks, gradient, gemm, gemm_of_exponentials, divergence,
    objective, scaled,
]  # fmt: skip


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
    assert want[:, LOGPROB].unique().numel() > N // 2
    for row in (7, LISTED[1]):
        assert same(kernel(case.spoil(row))[row], want[row])
    order = torch.randperm(N)
    assert same(kernel(case.take(order)), want[order])


@every(gemm_of_exponentials)
def test_a_row_does_not_depend_on_how_many_there_are(
    launch: list[Run], arch: int, kernel: Callable[[Case], Tensor]
) -> None:
    """Also where a number of 1, or a multiple of 16, is compiled in. A chunk is nothing but fewer rows."""
    case = Case(arch)
    want = kernel(case)
    for n in (1, 7, 16):
        assert same(kernel(case.take(torch.arange(n))), want[:n]), n
    assert same(kernel(case.take(torch.arange(13, N))), want[13:])


@every(divergence, scaled)
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
def test_rows_that_several_programs_share_depend_on_how_many_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/kernels.md says so. 300 rows have 2 programs a row, 250 have 3; so do 200."""
    V = 8 * 2048 + 3
    monkeypatch.setattr(tiling, "STATISTICS", Block(2048, 4))
    hidden, weight, target = 3 * torch.randn(300, 4), torch.randn(V, 4), torch.randint(V, (300,))
    found = []
    for n in (300, 250, 200):
        head = Head(hidden[:n], weight, None, target[:n], 0.7)
        with executed(80) as runs:
            ((_, _, values),) = backend.Work(head, Way(None), None, 1e9).chunks()
        assert not findings_of(runs)
        found.append(values[:200, :DLOGPROB])
    assert same(found[1], found[2])
    assert not same(found[0], found[2])
    largest = (hidden @ weight.T).abs().max().item() / 0.7
    torch.testing.assert_close(found[0], found[2], rtol=1e-6, atol=4 * torch.finfo(torch.float32).eps * largest)
