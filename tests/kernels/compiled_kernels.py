"""Every kernel as Triton compiles it, executed by tests/ptx: values against float64, and nothing found.

test_ptx_kernels.py runs this with `-p ptx`, in a process in which Triton compiles. One small shape of each
kernel is quick; all shapes, options and tiles are slow.
"""

import itertools
import os

import pytest
import torch
from closed_form import FEATURES, all_objectives, sample_constants
from compiled_heads import (
    BF16,
    EPS,
    F16,
    F32,
    Transform,
    check_gradient,
    check_launches,
    check_statistics,
    gemm_inputs,
    given_values,
    gradient,
    new_values,
    product,
    rows,
    statistics,
    targets,
    width,
)
from ptx.launcher import Run

from rlplus import Objective
from rlplus.kernels import active_rows, exponentials, policy_loss, scale
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import FP32_TILE, GRADIENT, STATISTICS, TILES, Block, Tile, Tiling
from rlplus.loss import MISMATCH_STATS, STATS, TokenConstants, token_loss
from rlplus.loss.backends import token_arguments

ARCHES = pytest.mark.parametrize("arch", [int(arch) for arch in os.environ.get("PTX_ARCHES", "80 90").split()])
ONE, PARTS = Tiling(programs=1), Tiling()
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The launcher's: what was never written is known, and not only a NaN."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- rows of logits

ROWS = [  # n, V, W, offset, bias, softcap, temperatures of rows, dtype of the gradient
    pytest.param(3, 4099, 4160, 0, None, None, False, BF16, id="usual"),
    pytest.param(3, 300, 300, 0, BF16, 30.0, True, F32, id="every option", marks=slow),
    *(pytest.param(n, V, W, offset, bias, None, False, out, marks=slow)
      for (n, V, W, offset), out, bias in itertools.product(
          [(1, 1, 1, 0), (2, 7, 64, 0), (5, 4096, 4096, 0), (3, 4099, 4099, 0), (2, 4099, 4160, 1), (2, 8192, 8192, 0)],
          (BF16, F16, F32), (None, F32, F16, BF16))),
    *(pytest.param(3, V, W, 0, bias, softcap, own, F16, marks=slow)
      for (V, W), bias, softcap, own in itertools.product(
          [(4099, 4160), (9001, 9024)], (None, F32), (None, 0.5, 30.0), (False, True))),
    pytest.param(2, 50_257, 50_304, 0, BF16, None, False, BF16, marks=slow),
]  # fmt: skip


@ARCHES
@pytest.mark.parametrize(("n", "V", "W", "offset", "bias", "softcap", "own", "out"), ROWS)
def test_statistics_and_gradients_of_rows(
    launch: list[Run], n: int, V: int, W: int, offset: int, bias: torch.dtype | None, softcap: float | None,
    own: bool, out: torch.dtype,
) -> None:  # fmt: skip
    """The statistics by one program a row, by several, and in blocks of the vocabulary."""
    logits, target = rows(n, V, W, offset), targets(n, V)
    transform = Transform(
        None if bias is None else torch.randn(V).to(bias), 0.7, softcap, 0.5 + torch.rand(n) if own else None
    )
    exact = transform(logits[:, :V].double())
    for tiling in (ONE, PARTS) if V > 4096 else (ONE,):
        values = new_values(n)
        kernels.row_statistics(values, logits, V, target, *transform, tiling=tiling)
        check_statistics(values, logits[:, :V], exact.abs().amax(1), target, transform)
    running, so_far = new_values(n), kernels.begin_statistics(n, logits.device)
    for start in range(0, V, 4096):
        stop = min(V, start + 4096)
        block = transform._replace(bias=None if bias is None else transform.bias[start:stop].contiguous())
        kernels.add_statistics(running, so_far, logits[:, start:stop], stop - start, target - start, *block)
    kernels.finish_statistics(running, so_far, V, target)
    check_statistics(running, logits[:, :V], exact.abs().amax(1), target, transform)
    check_rows_gradient(logits, V, target.clamp(0, V - 1), transform, out)
    check_launches(launch, "logits")


def check_rows_gradient(
    logits: torch.Tensor, V: int, target: torch.Tensor, transform: Transform, dtype: torch.dtype,
    block: Block = GRADIENT[0],
) -> None:  # fmt: skip
    n = len(target)
    dlogprob, dentropy = torch.randn(n), torch.randn(n)
    slot = torch.randperm(n + 1)[:n]
    if n > 2:
        dlogprob[1] = dentropy[1] = 0.0
        slot[2] = -1
    values = given_values(statistics(transform(logits[:, :V].double()), target), dlogprob, dentropy)
    out = torch.full((n + 1, logits.shape[1]), 9.0, dtype=dtype)
    kernels.row_gradient(out, slot, values, logits, V, target, *transform, block=block)
    want, size = gradient(logits[:, :V], values, target, transform)
    written = slot >= 0
    check_gradient(out[slot[written], :V], want[written], size[written])
    others = sorted(set(range(n + 1)) - set(slot.tolist()))
    assert out[others].eq(9).all()


@slow
@ARCHES
@pytest.mark.parametrize("block", range(len(GRADIENT)))
def test_every_block_of_the_row_kernels(launch: list[Run], block: int) -> None:
    logits, target, transform = rows(2, 9001, 9024), torch.tensor([9000, 17]), Transform(torch.randn(9001).bfloat16())
    values = new_values(2)
    tiling = Tiling(statistics=STATISTICS[block % len(STATISTICS)], programs=1 + block % 2 * 511)
    kernels.row_statistics(values, logits, 9001, target, *transform, tiling=tiling)
    check_statistics(values, logits[:, :9001], logits[:, :9001].abs().amax(1).double() * 2, target, transform)
    check_rows_gradient(logits, 9001, target, transform, BF16, GRADIENT[block])
    check_launches(launch, "logits")


# ---- our GEMM

GEMMS = [  # dtype, n, V, H, bias, softcap, temperatures of rows, whether logits are stored
    pytest.param(BF16, 70, 300, 72, False, None, False, False, id="logprobs"),
    pytest.param(BF16, 5, 70, 40, True, 30.0, True, True, id="every option", marks=slow),
    *(pytest.param(dtype, n, V, H, bias, None, False, stores, marks=slow)
      for dtype, (n, V, H), bias, stores in itertools.product(
          (BF16, F16, F32), [(1, 1, 8), (129, 257, 200), (150, 300, 31), (200, 513, 64)], (False, True),
          (False, True))),
    *(pytest.param(dtype, 130, 300, 72, bias, softcap, own, True, marks=slow)
      for dtype, bias, softcap, own in itertools.product((F16, F32), (False, True), (None, 4.0), (False, True))),
]  # fmt: skip


@ARCHES
@pytest.mark.parametrize(("dtype", "n", "V", "H", "bias", "softcap", "own", "stores"), GEMMS)
def test_statistics_in_the_epilogue_of_the_gemm(
    launch: list[Run], arch: int, dtype: torch.dtype, n: int, V: int, H: int, bias: bool, softcap: float | None,
    own: bool, stores: bool,
) -> None:  # fmt: skip
    tile = FP32_TILE if dtype == F32 else TILES[arch // 10][stores or bias]
    hidden, weight = gemm_inputs(n, V, H, dtype)
    check_gemm(hidden, weight, tile, bias, softcap, own, stores)
    check_launches(launch)


def check_gemm(
    hidden: torch.Tensor, weight: torch.Tensor, tile: Tile, bias: bool, softcap: float | None, own: bool, stores: bool
) -> None:
    n, V = len(hidden), len(weight)
    transform = Transform(
        torch.randn(V).to(hidden.dtype) if bias else None, 0.7, softcap, 0.5 + torch.rand(n) if own else None
    )
    target, values, logits = targets(n, V), new_values(n), torch.empty(n, width(V)) if stores else None
    kernels.linear_statistics(values, logits, hidden, weight, target, *transform, tile=tile)
    exact, terms = product(hidden, weight)
    reach = (terms + (0 if transform.bias is None else transform.bias.double().abs())).amax(1) / 0.7
    if own:
        reach = reach / transform.row_temperature
    check_statistics(values, exact, reach, target, transform)
    if logits is not None:
        assert ((logits[:, :V] - exact).abs() <= hidden.shape[1] * EPS * terms).all()


@slow
@ARCHES
@pytest.mark.parametrize("number", range(4))
def test_every_tile_of_the_gemm(launch: list[Run], arch: int, number: int) -> None:
    hidden, weight = gemm_inputs(300, 600, 200, BF16)
    for stores in (False, True):
        check_gemm(hidden, weight, TILES[arch // 10][number], stores, None, False, stores)
    check_launches(launch)


@slow
@ARCHES
def test_rows_that_tma_cannot_read_are_read_by_pointers(launch: list[Run], arch: int) -> None:
    hidden, weight = gemm_inputs(70, 130, 71, BF16)
    assert not kernels._tma_reads(hidden)
    check_gemm(hidden, weight, TILES[arch // 10][0], False, None, False, False)
    check_launches(launch)


# ---- exponentials in the place of logits

EXPONENTIALS = [
    pytest.param(5, 300, 64, 1, id="usual"),
    *(pytest.param(n, V, H, number, marks=slow)
      for (n, V, H), number in itertools.product([(129, 257, 200), (70, 1001, 72), (3, 1, 7)], (0, 1, 2, 3))),
]  # fmt: skip


@ARCHES
@pytest.mark.parametrize(("n", "V", "H", "number"), EXPONENTIALS)
def test_exponentials_and_the_gradient_from_them(
    launch: list[Run], arch: int, n: int, V: int, H: int, number: int
) -> None:
    tile, transform, target = TILES[arch // 10][number], Transform(), torch.randint(V, (n,))
    hidden, weight = gemm_inputs(n, V, H, BF16)
    values, e = new_values(n), torch.empty(n, width(V), dtype=F16)
    tops = kernels.linear_statistics(values, e, hidden, weight, target, *transform, tile=tile)
    logits, terms = product(hidden, weight)
    reach = terms.amax(1) / 0.7
    check_statistics(values, logits, reach, target, transform)
    z = transform(logits)
    for i, top in enumerate(tops):
        columns = slice(i * tile.BLOCK_V, min(V, (i + 1) * tile.BLOCK_V))
        exact = (z[:, columns] - top[:, None].double()).exp()
        bound = exact * (2.0**-11 + 16 * EPS * reach[:, None]) + 2.0**-39
        assert ((e[:, columns].double() / 2**15 - exact).abs() <= bound).all()
    values[:, 4], values[:, 5] = torch.randn(n), 0.0
    slot, out = torch.randperm(n + 1)[:n], torch.empty(n + 1, width(V))
    exponentials.row_gradient(out, slot, values, e, tops, tile.BLOCK_V, V, target, 0.7)
    want, size = gradient(logits, given_values(statistics(z, target), values[:, 4], values[:, 5]), target, transform)
    p, slope = z.softmax(1), values[:, 4, None].double().abs() / 0.7
    bound = slope * (p * 2.0**-11 + 2.0**-39) + 32 * EPS * size * reach[:, None].clamp(min=1)
    assert ((out[slot, :V].double() - want).abs() <= bound).all()
    check_launches(launch, "exponentials")


# ---- the objective, and what belongs to tokens

OBJECTIVES = [
    ("clip", "mis", "all"),
    *(pytest.param(*names, marks=slow) for names in all_objectives(["plain", "asymmetric-dual", "all"])),
    *(pytest.param("clip", "mis", features, marks=slow) for features in ("kl", "kl-k2", "mask")),
]


@ARCHES
@pytest.mark.parametrize(("internal", "external", "features"), OBJECTIVES)
def test_the_objective(launch: list[Run], internal: str, external: str, features: str) -> None:
    o, n = Objective(internal, external, **FEATURES[features]), 150
    absent = [(), ("old_logprob", "entropy_weight"), ("behavior_logprob", "engine_logprob")]
    for without in absent[:2] if o.mismatch_cap else absent:
        given = {k: v for k, v in sample_constants((n,), n, F32).items() if k not in without}
        c, logprob, entropy = TokenConstants(**given), -5 * torch.rand(n), 3 * torch.rand(n)
        logprob[:3] = torch.tensor([-1e-6, 6e-8, 0.0])
        values = new_values(n)
        values[:, 0], values[:, 1] = logprob, entropy
        columns, present = token_arguments.columns(c)
        numbers, names = token_arguments.coefficients(o), token_arguments.choices(o)
        sums = policy_loss.token_loss(values, columns, numbers, present, names).sum(0)
        got = dict(zip(STATS + MISMATCH_STATS, sums, strict=True))
        got = {k: v for k, v in got.items() if k in STATS or c.engine_logprob is not None}
        got |= {"dlogprob": values[:, 4], "dentropy": values[:, 5]}
        exact, plain = (definition(logprob, entropy, c, o, dtype) for dtype in (torch.float64, F32))
        for name, value in got.items():
            size = exact[name].abs() if value.ndim else n * exact[name].abs().clamp(min=1)
            bound = 2 * (plain[name] - exact[name]).abs().max() + 8 * EPS * size
            assert ((value - exact[name]).abs() <= bound).all(), name
    check_launches(launch, "constants")


def definition(
    logprob: torch.Tensor, entropy: torch.Tensor, c: TokenConstants, o: Objective, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    wide = TokenConstants(*(x if x is None or x.dtype == torch.bool else x.to(dtype) for x in c))
    out = token_loss(logprob.to(dtype), entropy.to(dtype), wide, o)
    return out.stats | {"dlogprob": out.dlogprob, "dentropy": out.dentropy}


@ARCHES
@pytest.mark.parametrize("n", [70, *(pytest.param(n, marks=slow) for n in (1, 511, 512, 1300))])
@pytest.mark.parametrize("every", [False, True])
def test_rows_with_a_gradient_get_places(launch: list[Run], n: int, every: bool) -> None:
    values = torch.randn(n, 6)
    values[torch.rand(n) < 0.4, 4], values[torch.rand(n) < 0.7, 5] = 0.0, 0.0
    before, slot, token = values.clone(), torch.empty(n, dtype=torch.int64), torch.full((2 * n + 9,), -7)
    filled, marks = torch.tensor([5]), torch.empty(n, dtype=torch.int32) if every else None
    active_rows.active_rows(slot, token, filled, values, 3, torch.tensor(4.0) if every else None, marks)
    on = (before[:, 4] != 0) | (before[:, 5] != 0)
    taken = torch.ones_like(on) if every else on
    end = 5 + int(taken.sum())
    assert torch.equal(slot, torch.where(taken, 4 + taken.long().cumsum(0), -1))
    assert filled.item() == end
    assert torch.equal(token[5:end], 3 + taken.nonzero()[:, 0])
    assert token[:5].eq(-7).all()
    assert token[end:].eq(-7).all()
    assert torch.equal(values[:, 4:], before[:, 4:] * (4.0 if every else 1.0))
    assert marks is None or torch.equal(marks, on.int())
    check_launches(launch)


@ARCHES
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(BF16, (3, 130)), *(pytest.param(dtype, shape, marks=slow) for dtype, shape in itertools.product(
        (BF16, F16, F32, torch.float64), [(3, 5000), (2000, 70), (7,), (5, 64)]))],
)  # fmt: skip
def test_scaling_rounds_once(launch: list[Run], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for factor in (0.37, 1.0, 65536.0):
        x, by = torch.randn(shape).to(dtype), torch.tensor(factor, dtype=torch.promote_types(dtype, F32))
        want = (x.to(by.dtype) * by).to(dtype)
        assert torch.equal(scale.scale_(x, by), want)
    check_launches(launch)
