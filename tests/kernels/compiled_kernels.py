"""Every kernel as Triton compiles it, executed by ptxcheck: values against float64, and nothing found.

test_ptx_kernels.py runs this with `-p ptxcheck`, in a process in which Triton compiles. One small shape of each
kernel is quick; all shapes, options and tiles are slow.
"""

import itertools
import math
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
    by_blocks,
    check_gradient,
    check_launches,
    check_statistics,
    closed,
    from_hidden,
    gemm_inputs,
    give_slopes,
    make_impossible,
    new_values,
    product,
    row_gradient,
    rows,
    targets,
)
from head_rows import DENTROPY, DLOGPROB, ENTROPY, LOGPROB, REFERENCE, statistics
from ptxcheck.launcher import Run

from rlplus import Objective
from rlplus.kernels import draws, own_tokens, policy_loss, scale
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import FP32_TILE, TILES, Tile
from rlplus.loss import MISMATCH_STATS, STATS, TokenConstants, token_loss
from rlplus.loss.backends.triton import choices, coefficients, token_columns

ARCHES = pytest.mark.parametrize("arch", [int(arch) for arch in os.environ.get("PTX_ARCHES", "80 90").split()])
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The launcher's: what was never written is known, and not only a NaN."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- rows of logits

ROWS = [  # n, V, W, offset, bias, softcap, temperatures of rows, dtype of what is kept
    pytest.param(4, 4099, 4160, 0, None, None, False, BF16, id="usual"),
    pytest.param(4, 300, 300, 0, BF16, 30.0, True, F32, id="every option", marks=slow),
    *(pytest.param(n, V, W, offset, bias, None, False, out, marks=slow)
      for (n, V, W, offset), out, bias in itertools.product(
          [(1, 1, 1, 0), (2, 7, 64, 0), (5, 4096, 4096, 0), (4, 4099, 4099, 0), (2, 4099, 4160, 1), (2, 8192, 8192, 0)],
          (BF16, F32), (None, F32, F16, BF16))),
    *(pytest.param(4, V, W, 0, bias, softcap, own, BF16, marks=slow)
      for (V, W), bias, softcap, own in itertools.product(
          [(4099, 4160), (9001, 9024)], (None, F32), (None, 0.5, 30.0), (False, True))),
    pytest.param(2, 50_257, 50_304, 0, BF16, None, False, BF16, marks=slow),
]  # fmt: skip


@ARCHES
@pytest.mark.parametrize(("n", "V", "W", "offset", "bias", "softcap", "own", "kept"), ROWS)
def test_statistics_and_gradients_of_rows(
    launch: list[Run], n: int, V: int, W: int, offset: int, bias: torch.dtype | None, softcap: float | None,
    own: bool, kept: torch.dtype,
) -> None:  # fmt: skip
    """The statistics by one program a row, by several, and in blocks of the vocabulary; a target 200 nats below."""
    logits, target = rows(n, V, W, offset), targets(n, V)
    logits[0, target[0]] -= 140
    transform = transform_of(n, V, bias, softcap, own)
    check_rows(logits, V, target, transform, kept, entropy=False)
    if V > 4096:
        values = statistics(logits, target, V, transform, parts=2)
        check_statistics(values, logits[:, :V], transform.reach(logits[:, :V].abs()), target, transform)
    values = by_blocks(logits, V, target, transform)
    check_statistics(values, logits[:, :V], transform.reach(logits[:, :V].abs()), target, transform)
    within = target.clamp(0, V - 1)
    if softcap is None:
        check_rows(logits, V, within, transform, kept, entropy=True)
    row_gradient(logits, V, within, transform, torch.empty_like(logits, dtype=kept))
    check_launches(launch, "logits", "exponentials")


def transform_of(n: int, V: int, bias: torch.dtype | None, softcap: float | None, own: bool) -> Transform:
    """A bias has an impossible token."""
    b = None if bias is None else torch.randn(V).to(bias)
    if b is not None and V > 2:
        b[V // 2] = -math.inf
    return Transform(b, 0.7, softcap, 0.5 + torch.rand(n) if own else None)


def check_rows(
    logits: torch.Tensor, V: int, target: torch.Tensor, transform: Transform, kept: torch.dtype, entropy: bool,
) -> None:  # fmt: skip
    """The statistics by one program a row, and the gradient from its exponentials."""
    e = torch.empty_like(logits, dtype=kept)
    values = statistics(logits, target, V, transform, kept=e)
    reach = transform.reach(logits[:, :V].abs())
    check_statistics(values, logits[:, :V], reach, target, transform)
    give_slopes(values, entropy)
    none = (target < 0) | (target >= V)
    values[none, DLOGPROB : DENTROPY + 1] = 0.0
    got = closed(values, e, V, target, transform, entropy)
    check_gradient(got, values, logits[:, :V], reach, target.where(~none, 0), transform, kept)


@slow
@ARCHES
def test_a_row_of_several_blocks_in_parts_and_in_place(launch: list[Run]) -> None:
    logits, target, transform = (
        rows(3, 9001, 9024),
        torch.tensor([9000, 17, 4500]),
        Transform(torch.randn(9001).to(BF16)),
    )
    check_rows(logits, 9001, target, transform, BF16, entropy=True)
    values = statistics(logits, target, 9001, transform, parts=2)
    check_statistics(values, logits[:, :9001], transform.reach(logits[:, :9001].abs()), target, transform)
    row_gradient(logits, 9001, target, transform, torch.empty_like(logits, dtype=BF16))
    row_gradient(logits, 9001, target, transform, logits)  # in place
    check_launches(launch, "logits", "dlogits", "exponentials")


# ---- our GEMM

GEMMS = [  # dtype, n, V, H, bias, softcap, temperatures of rows, whether exponentials are stored
    pytest.param(BF16, 6, 300, 72, False, None, False, False, id="logprobs"),
    pytest.param(BF16, 6, 300, 72, False, None, False, True, id="exponentials"),
    pytest.param(BF16, 6, 70, 40, True, 30.0, True, True, id="every option", marks=slow),
    *(pytest.param(dtype, n, V, H, bias, None, False, stores, marks=slow)
      for dtype, (n, V, H), bias, stores in itertools.product(
          (BF16, F16, F32), [(1, 1, 8), (129, 257, 200), (150, 300, 31), (200, 513, 64)], (False, True),
          (False, True))),
    *(pytest.param(dtype, 130, 300, 72, bias, softcap, own, True, marks=slow)
      for dtype, bias, softcap, own in itertools.product((BF16, F32), (False, True), (None, 4.0), (False, True))),
]  # fmt: skip


@ARCHES
@pytest.mark.parametrize(("dtype", "n", "V", "H", "bias", "softcap", "own", "stores"), GEMMS)
def test_exponentials_in_the_epilogue_of_the_gemm(
    launch: list[Run], arch: int, dtype: torch.dtype, n: int, V: int, H: int, bias: bool, softcap: float | None,
    own: bool, stores: bool,
) -> None:  # fmt: skip
    tile = FP32_TILE if dtype == F32 else TILES[arch // 10][bias or softcap is not None or own]
    kept = (F32 if dtype == F32 else BF16) if stores else None
    check_gemm(*gemm_inputs(n, V, H, dtype), tile, transform_of(n, V, dtype if bias else None, softcap, own), kept)
    check_launches(launch, "exponentials")


def check_gemm(
    hidden: torch.Tensor, weight: torch.Tensor, tile: Tile, transform: Transform, kept: torch.dtype | None,
    many: int = 2,
) -> None:  # fmt: skip
    """With rows whose targets are 200 nats below, the first that has one and the last of all; many: so many."""
    n, V = len(hidden), len(weight)
    target = targets(n, V)
    bad = sorted({0, *range(n - many + 1, n)}) if V > 1 else []
    make_impossible(hidden, weight, target, bad)
    values, e, marked = from_hidden(hidden, weight, target, transform, tile, kept)
    if transform.softcap is None or transform.softcap > 4:
        assert set(bad) <= set(marked.nonzero()[:, 0].tolist())
    logits, terms = product(hidden, weight)
    reach = transform.reach(terms)
    check_statistics(values, logits, reach, target, transform)
    if e is None:
        return
    none = (target < 0) | (target >= V)
    for entropy in (False, True)[: 1 + (transform.softcap is None)]:
        give_slopes(values, entropy)
        values[none, DLOGPROB : DENTROPY + 1] = 0.0
        got = closed(values, e.clone(), V, target, transform, entropy)
        check_gradient(got, values, logits, reach, target.where(~none, 0), transform, kept)


@slow
@ARCHES
@pytest.mark.parametrize("number", range(2))
def test_every_tile_of_the_gemm(launch: list[Run], arch: int, number: int) -> None:
    """More rows are computed again than a tile has."""
    hidden, weight = gemm_inputs(300, 600, 200, BF16)
    for kept, bias in ((None, None), (BF16, None), (BF16, BF16)):
        transform = transform_of(300, 600, bias, None, False)
        check_gemm(hidden, weight, TILES[arch // 10][number], transform, kept, many=140)
    check_launches(launch, "exponentials")


@slow
@ARCHES
def test_rows_that_tma_cannot_read_are_read_by_pointers(launch: list[Run], arch: int) -> None:
    hidden, weight = gemm_inputs(70, 130, 71, BF16)
    assert not kernels._tma_reaches(hidden)
    check_gemm(hidden, weight, TILES[arch // 10][0], Transform(), BF16)
    check_launches(launch, "exponentials")


@slow
@ARCHES
def test_a_nearly_sure_token_keeps_its_digits(launch: list[Run], arch: int) -> None:
    """1 - p = 4e-7 and 3e-12: `check_statistics` bounds the error by their size."""
    logits, target = torch.zeros(2, 4200), torch.tensor([9, 4101])
    logits[[0, 1], target] = torch.tensor([16.0, 24.0])
    check_rows(logits, 4200, target, Transform(), BF16, entropy=True)
    hidden, weight = torch.zeros(2, 16, dtype=BF16), torch.zeros(400, 16, dtype=BF16)
    hidden[0, 0], hidden[1, 1], weight[7, 0], weight[301, 1] = 16.0, 24.0, 1.0, 1.0
    found, _, marked = from_hidden(hidden, weight, torch.tensor([7, 301]), Transform(), TILES[arch // 10][0])
    assert not marked.any()
    check_statistics(found, *product(hidden, weight)[:1], torch.full((2,), 35.0), torch.tensor([7, 301]), Transform())
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
        values[:, LOGPROB], values[:, ENTROPY] = logprob, entropy
        columns, present = token_columns(c)
        numbers, names = coefficients(o), choices(o)
        sums = policy_loss.token_loss(values, columns, numbers, present, names).sum(0)
        got = dict(zip(STATS + MISMATCH_STATS, sums, strict=True))
        got = {k: v for k, v in got.items() if k in STATS or c.engine_logprob is not None}
        got |= {"dlogprob": values[:, DLOGPROB], "dentropy": values[:, DENTROPY]}
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


@ARCHES
@pytest.mark.parametrize(
    ("dtype", "n", "V", "H"),
    [(BF16, 20, 2, 1100), *(pytest.param(dtype, n, V, H, marks=slow) for dtype, (n, V, H) in itertools.product(
        (BF16, F16, F32), [(1, 1, 1), (40, 3, 513), (7, 200, 4096)]))],
)  # fmt: skip
def test_own_elements_are_added_in_fp32(launch: list[Run], dtype: torch.dtype, n: int, V: int, H: int) -> None:
    """To products with the weight, and to the gradient of the weight in the inputs' dtype, of one row without any."""
    hidden, weight = torch.randn(n, H).to(dtype), torch.randn(V, H).to(dtype)
    product, factor, own, target = torch.randn(n, H), torch.randn(n), torch.randn(n), torch.randint(V, (n,))
    if n > 1:
        hidden[0], own[0], target[0] = math.nan, 0.0, -100
    on = own != 0
    row = own[:, None].double() * weight[target.where(on, 0)].double()
    want, before = factor[:, None].double() * product.double() + row, weight.double()
    total, size = before.clone(), before.abs()
    own_tokens.finish_hidden(product, factor, own, weight, target)
    assert ((product - want).abs() <= 4 * EPS * (want.abs() + row.abs())).all()
    own_tokens.add_to_weight(weight, own, hidden, target)
    for out, a, x in ((total, own, hidden), (size, own.abs(), hidden.abs())):
        out.index_add_(0, target[on], a[on].double()[:, None] * x[on].double())
    rounding = 0.0 if dtype == F32 else torch.finfo(dtype).eps / 2
    tiny = 2.0**-25 if dtype == F16 else 0.0
    assert ((weight - total).abs() <= (n * EPS + rounding) * size + tiny).all()
    check_launches(launch)


# ---- a draw


@ARCHES
@pytest.mark.parametrize("exponentials", [False, True])
def test_a_draw_keeps_what_the_rule_says(launch: list[Run], exponentials: bool) -> None:
    """Against running sums in fp64, with a row that is off, one that is flat, and one that is nearly sure."""
    n, V, W, tile, most, threshold = 4, 300, 320, 32, 64, 2.0**-7
    logits, target = 3 * torch.randn(n, W), torch.tensor([0, 299, 7, 150])
    logits[1] *= 0.1
    logits[2, 7] += 30
    logits -= 120  # e^120 is infinite in fp32
    on, u = torch.tensor([1, 1, 1, 0], dtype=torch.int32), torch.rand(n)
    values = statistics(logits, target, V)
    partial = torch.zeros(-(-V // tile), kernels.PARTIALS.value, n)
    partial[:, 0] = values[:, REFERENCE]
    kept = (logits - values[:, REFERENCE, None]).exp().scatter(1, target[:, None], 0.0)
    partial[:, 1] = torch.stack([part.sum(1) for part in kept[:, :V].split(tile, 1)])
    token, sums = torch.full((n, most + 8), -1, dtype=torch.int32), torch.empty(n, draws.SUMS.value)
    w, logp = torch.zeros(n, most + 8), torch.zeros(n, most + 8)
    draws.draw_rows(
        token, w, logp, None, sums, partial, values, kept if exponentials else logits, V, tile, on, u, threshold, most,
        target, None, 1.0, exponentials=exponentials,
    )  # fmt: skip
    p = logits[:, :V].double().softmax(1)
    own = p.gather(1, target[:, None]).squeeze(1)
    p.scatter_(1, target[:, None], 0.0)
    for i in range(n):
        many = (p[i] >= threshold).sum() + p[i][p[i] < threshold].sum() / threshold
        level = 1 / most if many > most else threshold
        tail = p[i].where(p[i] < level, 0.0)
        steps = ((tail.cumsum(0) + u[i] * level) / level).floor()
        hit = torch.cat([steps[:1] > 0, steps[1:] > steps[:-1]]) | (p[i] >= level)
        want = hit.nonzero().squeeze(1) if on[i] else hit.nonzero().squeeze(1)[:0]
        count = int(sums[i, draws.COUNT.value])
        assert token[i, :count].tolist() == want.tolist()
        assert sums[i, draws.FLAT.value] == (bool(on[i]) and level > threshold)
        if on[i]:
            torch.testing.assert_close(w[i, :count].double(), p[i][want].clamp(min=level), rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(logp[i, :count].double(), p[i][want].log(), rtol=1e-4, atol=1e-4)
            counted = p[i][want].clamp(min=level) * p[i][want]  # in the mean the squares of all p
            spread = level * tail.sum() - counted[p[i][want] < level].sum()
            torch.testing.assert_close(sums[i, draws.VARIANCE.value].double(), spread, rtol=1e-3, atol=1e-6)
            square = counted.sum() + (1 - own[i]) ** 2
            torch.testing.assert_close(sums[i, draws.SQUARE.value].double(), square, rtol=1e-3, atol=1e-12)
    check_launches(launch)
