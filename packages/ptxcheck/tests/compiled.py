"""Kernels with known answers, compiled and executed: test_ptx_launcher.py runs them with `-p ptxcheck`."""

import re

import picture
import pytest
import torch
import triton
import triton.language as tl
from ptxcheck.checked_memory import Memory
from ptxcheck.executor import Options
from ptxcheck.launcher import Run, executed, poison

ARCHES = pytest.mark.parametrize("arch", [80, 90])
SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65520.0, 3.4e38, -1e-45, 1e-40, 6e-8, 5.96e-8, 2.98e-8, torch.inf, -torch.inf,
           torch.nan, 1.00390625, 1.01171875]  # fmt: skip


@triton.jit
def copy(out, x, n, stride, BLOCK: tl.constexpr, MASK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASK:
        tl.store(out + i, tl.load(x + i * stride, i < n, 0.0), i < n)
    else:
        tl.store(out + i, tl.load(x + i * stride))


@triton.jit
def scan_and_sort(out, x, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.cumsum(v, 0))
    tl.store(out + N + i, tl.sort(v))
    tl.store(out + 2 * N, tl.argmax(v, 0).to(tl.float32))
    tl.store(out + 2 * N + 1, tl.max(tl.where(i == 3, float("nan"), v), 0))
    tl.store(out + 2 * N + 2, tl.min(v, 0))


@triton.jit
def transpose(out, x, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(out + j[:, None] * M + i[None, :], v.T)


@triton.jit
def loop_of_each_block(out, counts, x):
    p = tl.program_id(0)
    if p % 2 == 0:
        total = 0.0
        for k in range(0, tl.load(counts + p)):
            total += tl.sum(tl.load(x + k * 128 + tl.arange(0, 128)), 0)
        tl.store(out + p, total)


@triton.jit
def product(c, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), tl.float32)
    for s in range(0, K, BK):
        x = tl.load(a + i[:, None] * K + s + k[None, :])
        acc = tl.dot(x, tl.load(b + j[:, None] * K + s + k[None, :]).T, acc, input_precision="ieee")
    tl.store(c + i[:, None] * N + j[None, :], acc)


@triton.jit
def casts(out, x, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), v.to(out.dtype.element_ty))


@triton.jit
def integers(out, x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + N + i, a % b)
    tl.store(out + 2 * N + i, (a >> 3) ^ (b << 5) | (a & 0xFF))
    tl.store(out + 3 * N + i, (a.to(tl.int64) * b.to(tl.int64) >> 20).to(tl.int32))


@triton.jit
def halves(out, floors, x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    v, w = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, v + w)
    tl.store(out + N + i, v - w)
    tl.store(out + 2 * N + i, v * w)
    tl.store(floors + i, tl.floor(v.to(tl.float32) * 100).to(floors.dtype.element_ty))


@triton.jit
def neighbours(out, N: tl.constexpr):
    """Reads back what other blocks write: a race."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, 1.0)
    tl.store(out + 1024 + i, tl.load(out + (i + N) % 1024))


# ---- right results, and no findings


@ARCHES
def test_a_copy_under_a_mask(launch: list[Run]) -> None:
    x, out = torch.randn(1000), torch.empty(1000)
    copy[(8,)](out, x, 1000, 1, 128, True)
    assert torch.equal(out, x)
    assert launch[0].grid == (8,)
    assert launch[0].lanes.sum() > 0
    assert not launch[0].unwritten()


@ARCHES
def test_scans_sorts_and_reductions(launch: list[Run]) -> None:
    v, out = torch.randn(64), torch.empty(131)
    scan_and_sort[(1,)](out, v, 64)
    assert torch.allclose(out[:64], v.cumsum(0), atol=1e-5)
    assert torch.equal(out[64:128], v.sort()[0])
    rest = v.clone()
    rest[3] = -9e9
    assert out[128:].tolist() == [v.argmax(), rest.max(), v.min()]


@ARCHES
def test_a_transpose_through_shared_memory(launch: list[Run]) -> None:
    m, out = torch.randn(64, 32), torch.empty(32, 64)
    transpose[(1,)](out, m, 64, 32)
    assert torch.equal(out, m.T)


@ARCHES
def test_blocks_leave_their_loops_one_by_one(launch: list[Run]) -> None:
    counts, data, out = torch.tensor([3, 9, 0, 1, 7, 2, 5, 5]), torch.randn(9 * 128), torch.zeros(8)
    loop_of_each_block[(8,)](out, counts, data)
    want = torch.tensor([data[: 128 * c].sum() if i % 2 == 0 else 0.0 for i, c in enumerate(counts.tolist())])
    assert torch.allclose(out, want, atol=1e-4)


@ARCHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_product_of_tiles(launch: list[Run], dtype: torch.dtype) -> None:
    """A kernel of several stages: cp.async, ldmatrix and mma, or wgmma."""
    n, K = (64, 128) if dtype.itemsize == 2 else (16, 64)
    a, b, c = torch.randn(n, K).to(dtype), torch.randn(n, K).to(dtype), torch.empty(n, n)
    product[(1,)](c, a, b, n, n, K, 32)
    assert (c.double() - a.double() @ b.double().T).abs().max() < 1e-4


@ARCHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_round_as_torch_rounds(launch: list[Run], dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(496) * 10.0 ** torch.randint(-40, 38, (496,))])
    out, back = torch.empty(512, dtype=dtype), torch.empty(512)
    casts[(1,)](out, x, 512)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    numbers = ~x.isnan()
    assert torch.equal(out.signbit()[numbers], x.to(dtype).signbit()[numbers])
    casts[(1,)](back, out, 512)
    torch.testing.assert_close(back, out.float(), rtol=0, atol=0, equal_nan=True)


@ARCHES
def test_integers_divide_towards_zero_and_wrap(launch: list[Run]) -> None:
    a, b = torch.randint(-(2**31), 2**31 - 1, (256,)), torch.randint(1, 1000, (256,))
    b[::2] *= -1
    out = torch.empty(4, 256, dtype=torch.int32)
    integers[(1,)](out, a.int(), b.int(), 256)
    q = torch.div(a, b, rounding_mode="trunc")
    want = [q, a - q * b, (a >> 3) ^ (b << 5) | (a & 0xFF), a * b >> 20]
    assert torch.equal(out, torch.stack([w.to(torch.int32) for w in want]))


@ARCHES
@pytest.mark.parametrize(("dtype", "integer"), [(torch.float16, torch.int32), (torch.bfloat16, torch.int64)], ids=str)
def test_halves_are_added_and_floors_are_integers(launch: list[Run], dtype: torch.dtype, integer: torch.dtype) -> None:
    x, y = torch.randn(2, 256).to(dtype)
    a, b = x.double(), y.double()
    out, floors = torch.empty(3, 256, dtype=dtype), torch.empty(256, dtype=integer)
    halves[(1,)](out, floors, x, y, 256)
    assert torch.equal(out, torch.stack([a + b, a - b, a * b]).to(dtype))
    assert torch.equal(floors, (x.float() * 100).floor().to(integer))


# ---- mistakes


def findings(call, arch: int = 80, edit=lambda name, ptx: ptx) -> str:
    with executed(arch, edit=edit) as runs:
        call()
    memory: Memory = runs[-1].memory
    return " | ".join([*memory.findings, *(f"unwritten {region}" for region, _ in memory.unwritten)])


X = torch.arange(1000, dtype=torch.float32)
WRONG = {
    "a load without a mask": (lambda: copy[(8,)](torch.zeros(1000), X, 1000, 1, 128, False), "out of bounds: load"),
    "a wrong stride": (lambda: copy[(8,)](torch.zeros(1000), X, 1000, 3, 128, True), "out of bounds: load"),
    "a mask that lets one too many pass": (
        lambda: copy[(8,)](torch.zeros(1001), X, 1001, 1, 128, True), "out of bounds: load of 4 bytes near x"),
    "gaps between elements": (
        lambda: copy[(8,)](torch.zeros(1024), torch.zeros(1024, 4)[:, 0], 1000, 1, 128, True), "out of bounds: load"),
    "memory that was never written": (
        lambda: copy[(8,)](torch.zeros(1000), poison(torch.empty(1000)), 1000, 1, 128, True), "unwritten x"),
    "blocks that read what others write": (lambda: neighbours[(8,)](torch.zeros(2048), 128), "race across blocks"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_in_a_kernel_is_found(name: str) -> None:
    call, words = WRONG[name]
    assert words in findings(call)


def test_a_finding_names_the_line_of_the_kernel() -> None:
    line = copy.fn.__code__.co_firstlineno
    found = findings(WRONG["a load without a mask"][0])
    assert re.search(rf"out of bounds: load [^|]*\(compiled.py:{line + 6}\)", found)


EDITS = {
    "a barrier left out": (transpose, lambda ptx: re.sub(r"bar.sync\s+0;", "", ptx), "race"),
    "a misaligned access": (transpose, lambda ptx: ptx.replace("+ 0 ]", "+ 4 ]", 1), "misaligned"),
    "no wait for cp.async": (
        product, lambda ptx: re.sub(r"(cp.async.wait_group)\s+\d+", r"\1 7", ptx), "a copy has not delivered"),
    "a pipeline without barriers": (product, lambda ptx: re.sub(r"bar.sync\s+0;", "", ptx), "race"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_mistake_in_the_compiled_code_is_found(name: str) -> None:
    kernel, change, words = EDITS[name]

    def edit(_: str, ptx: str) -> str:
        changed = change(ptx)
        assert changed != ptx
        return changed

    def call() -> None:
        if kernel is transpose:
            transpose[(1,)](torch.zeros(32, 64), torch.randn(64, 32), 64, 32)
        else:
            product[(1,)](
                torch.zeros(64, 64), torch.randn(64, 128).half(), torch.randn(64, 128).half(), 64, 64, 128, 32
            )

    assert words in findings(call, edit=edit)
    assert findings(call) == ""


@pytest.mark.skipif(triton.__version__ != "3.9.0", reason="another Triton's code differs")
def test_the_picture_is_that_of_the_report() -> None:
    assert picture.PICTURE.read_text() == picture.draw(), "want `python tests/picture.py`"


def test_approximations_err_as_asked() -> None:
    """By one part in 2^22, up or down, or by chance."""
    results = []
    for approximation in (-1.0, 1.0, "random"):
        x, out = torch.linspace(-3, 3, 128), torch.empty(128)
        with executed(80, Options(approximation)):
            exponentials[(1,)](out, x, 128)
        results.append((out.double() / x.double().exp() - 1).mean().item())
    assert results[0] < -1e-7 < 1e-7 < results[1]
    assert results[0] < results[2] < results[1]


@triton.jit
def exponentials(out, x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.exp(tl.load(x + i)))


@triton.jit
def shifted(out, x, by=0.25, N: tl.constexpr = 64):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + by)


def test_arguments_that_are_left_out_have_their_defaults(launch: list[Run]) -> None:
    x, out, other = torch.randn(64), torch.empty(64), torch.empty(64)
    shifted[(1,)](out, x)
    shifted[lambda meta: (meta["N"] // 64,)](other, x, by=3)
    assert torch.equal(out, x + 0.25)
    assert torch.equal(other, x + 3)
