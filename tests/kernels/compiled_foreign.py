"""Kernels of others, compiled and executed by ptxcheck: values against float64, and nothing found.

The first three do what Triton's tutorials do (fused softmax, matrix multiplication, layer norm), in other words. The
rest are the kernels of installed packages. test_ptx_foreign.py runs this with `-p ptxcheck`.
"""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ptxcheck.device import Device
from ptxcheck.launcher import Run, executed, findings_of
from ptxcheck.program import Unsupported
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

ARCHES = pytest.mark.parametrize("arch", [80, 90])
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The launcher's: what was never written is known, and not only a NaN."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- as in Triton's tutorials


@triton.jit
def softmax_of_rows(out, x, rows, columns, stride, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """A program takes every num_programs-th row; the next rows are loaded ahead."""
    j = tl.arange(0, WIDTH)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        v = tl.load(x + row * stride + j, j < columns, -float("inf"))
        e = tl.exp(v - tl.max(v, 0))
        tl.store(out + row * columns + j, e / tl.sum(e, 0), j < columns)


@triton.jit
def matmul(c, a, b, M, N, K, lda, ldb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):
    """c = leaky_relu(a @ b), all row-major. Programs that follow each other share a band of BAND tiles of rows."""
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = tl.program_id(0) // (BAND * across)
    height = min(down - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * across)
    i = (band * BAND + place % height) * BM + tl.arange(0, BM)
    j = place // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left, right = a + (i % M)[:, None] * lda + k[None, :], b + k[:, None] * ldb + (j % N)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        rest = K - step * BK
        total = tl.dot(tl.load(left, k[None, :] < rest, 0.0), tl.load(right, k[:, None] < rest, 0.0), total)
        left += BK
        right += BK * ldb
    total = tl.where(total >= 0, total, 0.01 * total)
    tl.store(c + i[:, None] * N + j[None, :], total.to(c.dtype.element_ty), (i < M)[:, None] & (j < N)[None, :])


@triton.jit
def layer_norm(out, x, weight, bias, mean, rstd, columns, eps, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        total += tl.load(x + row * columns + start + j, start + j < columns, 0.0).to(tl.float32)
    m = tl.sum(total, 0) / columns
    for start in range(0, columns, BLOCK):
        on = start + j < columns
        d = tl.where(on, tl.load(x + row * columns + start + j, on, 0.0).to(tl.float32) - m, 0.0)
        squares += d * d
    r = 1 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    for start in range(0, columns, BLOCK):
        on = start + j < columns
        d = tl.load(x + row * columns + start + j, on, 0.0).to(tl.float32) - m
        y = d * r * tl.load(weight + start + j, on) + tl.load(bias + start + j, on)
        tl.store(out + row * columns + start + j, y, on)


@triton.jit
def layer_norm_gradient(dx, parts, dy, x, weight, mean, rstd, rows, columns, WIDTH: tl.constexpr):
    """dx, and of each program's rows the sums for dweight and dbias. The tutorial adds these up under a lock."""
    j = tl.arange(0, WIDTH)
    on = j < columns
    w = tl.load(weight + j, on, 0.0).to(tl.float32)
    dweight, dbias = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.load(rstd + row)
        n = tl.where(on, (tl.load(x + row * columns + j, on, 0.0).to(tl.float32) - tl.load(mean + row)) * r, 0.0)
        g = tl.load(dy + row * columns + j, on, 0.0).to(tl.float32)
        along, average = tl.sum(n * g * w, 0) / columns, tl.sum(g * w, 0) / columns
        tl.store(dx + row * columns + j, (g * w - n * along - average) * r, on)
        dweight += g * n
        dbias += g
    tl.store(parts + 2 * tl.program_id(0) * columns + j, dweight, on)
    tl.store(parts + (2 * tl.program_id(0) + 1) * columns + j, dbias, on)


def check(got: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | float, last: int = 1) -> None:
    """Within eight roundings of the terms in fp32, and `last` of the result to its dtype."""
    error, bound = (got.double() - exact).abs(), 8 * EPS * terms + last * torch.finfo(got.dtype).eps / 2 * exact.abs()
    assert bool((error <= bound).all()), (error / bound).max()


@ARCHES
@pytest.mark.parametrize("stages", [2, 4])
def test_a_softmax_of_rows_by_persistent_programs(launch: list[Run], stages: int) -> None:
    x = torch.randn(7, 200)[:, :197]
    out = torch.empty(7, 197)
    softmax_of_rows[(3,)](out, x, 7, 197, x.stride(0), 256, stages)
    exact = x.double().softmax(1)
    check(out, exact, exact * (1 + x.abs().max()))


@ARCHES
def test_a_product_of_row_major_matrices(launch: list[Run]) -> None:
    """On sm_90 wgmma reads the second factor by columns."""
    M, N, K = 150, 136, 72
    a, b, c = torch.randn(M, K).half(), torch.randn(K, N).half(), torch.empty(M, N, dtype=torch.float16)
    matmul[(triton.cdiv(M, 64) * triton.cdiv(N, 64),)](c, a, b, M, N, K, K, N, 64, 64, 32, 2)
    exact = a.double() @ b.double()
    check(c, torch.where(exact >= 0, exact, 0.01 * exact), a.double().abs() @ b.double().abs())


@ARCHES
def test_layer_norm_and_its_gradient(launch: list[Run]) -> None:
    rows, columns, programs = 5, 300, 2
    x, dy = (torch.randn(rows, columns) * 2 + 1 for _ in range(2))
    weight, bias = torch.randn(columns), torch.randn(columns)
    out, dx, mean, rstd = torch.empty_like(x), torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    parts = torch.empty(programs, 2, columns)
    layer_norm[(rows,)](out, x, weight, bias, mean, rstd, columns, 1e-5, 128)
    layer_norm_gradient[(programs,)](dx, parts, dy, x, weight, mean, rstd, rows, columns, 512)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = torch.nn.functional.layer_norm(exact[0], (columns,), *exact[1:], 1e-5)
    y.backward(dy.double())
    check(out, y.detach(), 4 * (weight.abs() + bias.abs() + 1))
    check(dx, exact[0].grad, 4 * dy.abs().max() * weight.abs().max())
    for i, want in enumerate(exact[1:]):
        check(parts[:, i].sum(0), want.grad, 4 * dy.abs().sum(0))


# ---- other kernels: which run, and what is refused (docs/kernel-tests.md)


@triton.jit
def product(c, a, b, SPECIAL: tl.constexpr):
    i = tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for k in tl.range(0, 256, 64, warp_specialize=SPECIAL):
        total = tl.dot(a.load([0, k]), b.load([0, k]).T, total)
    tl.store(c + i[:, None] * 64 + i[None, :], total)


@triton.jit
def add_atomically(out, x):
    tl.atomic_add(out, tl.sum(tl.load(x + tl.arange(0, 128)), 0))


@triton.jit
def printing(out, x):
    tl.device_print("x", tl.load(x))


@gluon.jit
def through_shared_memory(out, x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    shared = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared.store(gl.load(x + i))
    gl.store(out + i, 2 * shared.load(layout))


def multiply(special: bool = False, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(64, 256).to(dtype) for _ in range(2))
    out = torch.empty(64, 64)
    product[(1,)](out, *(TensorDescriptor.from_tensor(x, [64, 64]) for x in (a, b)), special)
    return out, (a.double() @ b.double().T).float()


def double(kernel: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(128), torch.zeros(128)
    kernel[(1,)](out, x)
    return out, 2 * x


ASKED: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], dict[int, str]]] = {  # "": runs
    "half": (multiply, {80: "", 90: "", 100: "tcgen05.alloc", 120: ""}),
    "tf32": (
        lambda: multiply(dtype=torch.float32),
        {80: "mma", 90: "wgmma", 100: "tcgen05.alloc", 120: "mma"},
    ),
    "specialised": (lambda: multiply(True), {80: "", 90: "setmaxnreg", 100: ".branchtargets", 120: "setmaxnreg"}),
    "atomic": (lambda: double(add_atomically), dict.fromkeys((80, 90, 100, 120), "atom.global")),
    "print": (lambda: double(printing), dict.fromkeys((80, 90, 100, 120), ".local")),
    "gluon": (lambda: double(through_shared_memory), dict.fromkeys((80, 90, 100, 120), "")),
}


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("name", ASKED)
def test_a_kernel_that_was_asked_for(arch: int, name: str) -> None:
    call, refused = ASKED[name]
    with executed(arch) as runs:
        if refused[arch]:
            with pytest.raises(Unsupported, match=refused[arch]):
                call()
            return
        got, want = call()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert not findings_of(runs)


# ---- of installed packages


@ARCHES
def test_ligers_softmax(launch: list[Run]) -> None:
    softmax = pytest.importorskip("liger_kernel.ops.softmax")
    x, dy = torch.randn(2, 1100), torch.randn(2, 1100)
    y, *settings = softmax._softmax_forward(x)
    dx = softmax._softmax_backward(dy, y, *settings)
    exact = x.double().requires_grad_()
    exact.softmax(1).backward(dy.double())
    want = exact.detach().softmax(1)
    check(y, want, want * (1 + x.abs().max()))
    check(dx, exact.grad, want * (1 + x.abs().max()) * dy.abs().max())


@ARCHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [300, 1100])
def test_ligers_cross_entropy(device: Device, V: int, dtype: torch.dtype) -> None:
    """Its kernel overwrites the logits with their gradient. Below 1024 of them, two of its 1024 threads load one logit,
    and one of the two stores; what the other one loads, before the store or after it, is not used."""
    function = pytest.importorskip("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    x, target = torch.randn(3, V).to(dtype), torch.tensor([7, -100, V - 1])
    leaf = x.to("cuda").requires_grad_()
    loss, *_ = function.apply(leaf.clone(), target.to("cuda"), None)
    loss.backward()
    assert device.launches == {"liger_cross_entropy_kernel": 1}
    exact = x.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, target).backward()
    size = 2 * (1 + x.abs().max())
    want = torch.nn.functional.cross_entropy(exact.detach(), target)
    check(loss.detach().cpu(), want, size, last=2)  # each row's, then their sum: bf16 of bf16 logits
    check(leaf.grad.cpu(), exact.grad, size * exact.grad.abs())
    found = [text for _, text in device.findings]
    device.findings.clear()
    assert [text.split(" at ")[0] for text in found] == ["race between threads: store after load in X_ptr"] * (V < 1024)


@ARCHES
def test_trls_chunked_logprobs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs, entropies and gradients of a head, over chunks of its vocabulary, without ZeRO."""
    function = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    zero = SimpleNamespace(maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", zero)  # the module wants all that TRL requires
    n, V, H = 5, 300, 64
    hidden, weight, bias = torch.randn(n, H), torch.randn(V, H) / 8, torch.randn(V)
    target, dlogprob, dentropy = torch.randint(V, (n,)), torch.randn(n), torch.randn(n)
    leaves = [x.to("cuda").requires_grad_() for x in (hidden, weight, bias)]
    logprob, entropy, *_ = function.apply(*leaves, target.to("cuda"), 0.7, 128, 30.0)
    torch.autograd.backward([logprob, entropy], [dlogprob.to("cuda"), dentropy.to("cuda")])
    assert device.launches == {"_forward_kernel": 3, "_backward_kernel": 3}
    exact = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = 30 * torch.tanh((exact[0] @ exact[1].T + exact[2]) / 30) / 0.7
    logp = logits.log_softmax(1)
    want = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    torch.autograd.backward(want, [dlogprob.double(), dentropy.double()])
    size = 4 * (1 + logits.detach().abs().max())
    check(logprob.detach().cpu(), want[0].detach(), size)
    check(entropy.detach().cpu(), want[1].detach(), size)
    for leaf, other in zip(leaves, exact, strict=True):
        check(leaf.grad.cpu(), other.grad, size * other.grad.abs().max())
