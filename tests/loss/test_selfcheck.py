"""The self-check of the triton backend: right kernels pass it, and each kind of mistake is refused with its name."""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import triton
import triton.language as tl
import tritons
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rlplus.common.errors import one_line
from rlplus.kernels import tiling
from rlplus.kernels.tiling import Block
from rlplus.loss import linear_policy_loss, selfcheck
from rlplus.loss.backends import PolicyCall, PolicyResult, chunked
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends.ways import Way, chunk_rows
from rlplus.loss.head import cost
from rlplus.loss.head.head import Head

CPU = torch.device("cpu")
H = 8
SMALL = [case._replace(N=14, V=70) for case in selfcheck.CASES]
SMALL = [case._replace(max_scratch_mb=0.005) if case.max_scratch_mb < 10 else case for case in SMALL]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_the_kernels_pass_in_the_interpreter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks and programs as small as the sizes: a row has five blocks, for two programs or one."""
    for name, small in {"STATISTICS": Block(16, 4), "GRADIENT": Block(16, 8), "PROGRAMS": 28}.items():
        monkeypatch.setattr(tiling, name, small)
    few, many = SMALL[1], SMALL[2]._replace(N=30)
    others = SMALL[3:] if dtype == torch.float32 else []
    assert selfcheck.check(CPU, dtype, [SMALL[0], few, many, *others], H) == ""


def test_triton_3_6_interprets_the_kernels_with_a_numpy_that_makes_no_number_of_an_array() -> None:
    """NumPy 2.5, which needs Python 3.12; older ones warn where it refuses."""
    refuses = ["-W", "error:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"]
    path = f"{tritons.folder('3.6.0')}{os.pathsep}{processes.ROOT}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = processes.run([sys.executable, *refuses, processes.SUPPORT / "selfcheck_child.py", "right"], env=environment)
    assert json.loads(done.stdout.splitlines()[-1]) == {"status": "passed", "reason": ""}, done.stderr


@pytest.mark.parametrize("case", selfcheck.CASES, ids=str)
def test_the_sample_has_every_kind_of_row(case: selfcheck.Case) -> None:
    inputs = selfcheck.sample(case, 136, torch.bfloat16)
    counts = inputs["token_weight"] != 0
    assert (inputs["bias"] is not None) == case.bias
    assert 0 < counts.sum() < case.N
    assert all(inputs[k][~counts].isnan().all() for k in ("hidden", "advantage", "old_logprob", "ref_logprob"))
    assert all(inputs[k][counts].isfinite().all() for k in ("hidden", "advantage", "old_logprob", "ref_logprob"))
    assert 0 < inputs["external"][counts].sum() < counts.sum()
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    out = linear_policy_loss(**wide, objective=selfcheck.OBJECTIVE, backend="torch")
    assert out.stats["clipped_high"] > 5
    assert all(out.stats[f"loss_{part}"].abs() > 1e-3 for part in ("internal", "external", "kl", "entropy"))


@pytest.mark.parametrize("machine", [cost.A100, cost.H200], ids=["A100", "H200"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_its_sizes_take_every_way(dtype: torch.dtype, machine: cost.Machine) -> None:
    """Chunks, and programs for a row's statistics."""
    found = []
    for case in selfcheck.CASES[:3]:
        inputs = selfcheck.sample(case, 136, dtype)
        head = Head(inputs["hidden"], inputs["weight"], None, inputs["target"], 1.0)
        rows = chunk_rows(head, Way(None, dlogits=dtype), 1e6 * case.max_scratch_mb, machine=machine)
        blocks = -(-case.V // tiling.STATISTICS.BLOCK_V)
        programs = min(blocks, -(-tiling.PROGRAMS // rows))
        found.append((min(-(-case.N // rows), 3), programs > 1, blocks > programs))
    assert found == [(3, True, False), (1, True, True), (1, False, True)]


# ---- mistakes


def planted(change: Callable[..., Any]) -> Callable[..., Any]:
    """The `torch` backend's policy loss, its results changed."""

    def policy_loss(call: PolicyCall) -> PolicyResult:
        result, names = chunked.policy_loss(call), ("dhidden", "dweight", "dbias")
        values = {name: getattr(result, name) for name in ("loss", "logprob", "entropy")}
        values |= dict(zip(names, result.gradients, strict=True))
        change(values)
        changed = {name: value for name, value in values.items() if name not in names}
        return result._replace(**changed, gradients=tuple(values[name] for name in names))

    return policy_loss


def one_row_of(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(values: dict[str, Tensor]) -> None:
        row = values[name].view(len(values[name]), -1)[3] if values[name].ndim else values[name]
        row.mul_(factor)

    return change


def other_bits_each_time() -> Callable[[dict[str, Tensor]], None]:
    calls = itertools.count(1)
    return lambda values: values["dhidden"][3].mul_(1 + next(calls) * 2**-7)  # the last bits of bf16


MISTAKES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "the loss": (one_row_of("loss", 1.01), "the error of loss is .*want at most"),
    "a logprob": (one_row_of("logprob", 1.0001), "the error of logprob is .*want at most"),
    "an entropy": (one_row_of("entropy", 1.0001), "the error of entropy is .*want at most"),
    "a row of dhidden": (one_row_of("dhidden", 0.0), "the error of dhidden is .*want at most"),
    "a row of dweight": (one_row_of("dweight", 0.0), "the error of dweight is .*want at most"),
    "a number of dbias": (one_row_of("dbias", 0.0), "the error of dbias is .*want at most"),
    "NaN in dweight": (one_row_of("dweight", torch.nan), "dweight is not finite"),
    "infinity in logprob": (one_row_of("logprob", torch.inf), "logprob is not finite"),
    "NaN from a row of weight 0": (lambda values: values["dhidden"][5].fill_(torch.nan), "dhidden is not finite"),
    "other bits": (other_bits_each_time(), "dhidden has other bits when the call is repeated"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_every_mistake_is_refused_by_name(
    mistake: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = MISTAKES[mistake] if mistake else (lambda values: None, "$")
    monkeypatch.setattr(backend, "policy_loss", planted(change))
    found = selfcheck.check(CPU, dtype, SMALL[:1], H)
    assert re.match(rf"Case\(N=14, .*\): {reason}" if mistake else reason, found), found


# ---- the child's side


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "out of memory", "OutOfMemoryError: CUDA out of"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of memory", "RuntimeError: Triton"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"), "out of memory", "RuntimeError: CUBLAS"),
        (RuntimeError("out of resource: shared memory, Required: 300000"), "refused", "RuntimeError: out of resource"),
        (KeyError(), "refused", "KeyError: without a message"),
    ],
)
def test_errors_are_verdicts_but_for_those_of_memory(
    error: Exception, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "check", mock.Mock(side_effect=error))
    verdict = selfcheck.judge("cpu", "float32")
    assert verdict.status == status
    assert verdict.reason.startswith(reason)
    assert "\n" not in verdict.reason


@JITFunction  # the same as `triton.jit` where nothing is interpreted
def _second(x):
    two = x + x
    return two[1]


@JITFunction
def _no_kernel(out, n, BLOCK: tl.constexpr):
    """A line, and another,

    so that an excerpt
    has some.
    """
    if n > 0:
        tl.store(out, _second(BLOCK))


@triton.jit
def _raising_kernel(out, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 17, "want a block of 17")


def does_not_compile(*_: Any) -> None:
    signature = {"out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    triton.compile(ASTSource(_no_kernel, signature, {"BLOCK": 16}), target=GPUTarget("cuda", 80, 32))


def raises(*_: Any) -> None:
    _raising_kernel[(1,)](torch.empty(1), BLOCK=16)


def test_a_refusal_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's first line is the place alone, and its last one a caret if a function that the kernel calls failed."""
    monkeypatch.setattr(selfcheck, "check", does_not_compile)
    verdict = selfcheck.judge("cpu", "float32")
    assert re.fullmatch(
        r"CompilationError: at 8:\d+: def _no_kernel\(out, n, BLOCK: tl.constexpr\): \.\.\. "
        r"tl.store\(out, _second\(BLOCK\)\) \^, "
        r"because of CompilationError: at 3:\d+: def _second\(x\): two = x \+ x return two\[1\] \^ \S.*\S",
        verdict.reason,
    ), verdict
    monkeypatch.setattr(selfcheck, "check", raises)
    status, reason = selfcheck.judge("cpu", "float32")
    assert status == "refused"
    assert "Error: " in reason
    assert "want a block of 17" in reason


def test_errors_in_one_line() -> None:
    both = RuntimeError("ptxas:\n  line 1\n\n\tline 2")
    both.__cause__ = OSError("no\nroom")
    assert one_line(both) == "RuntimeError: ptxas: line 1 line 2, because of OSError: no room"
    both.__cause__ = ValueError("line 2")  # quoted at the end
    assert one_line(both) == "RuntimeError: ptxas: line 1 line 2"
    both.__cause__ = both
    assert one_line(both) == "RuntimeError: ptxas: line 1 line 2"
    assert one_line(KeyError()) == "KeyError: without a message"
    assert one_line(OSError("a" * 600 + "b" * 600)) == f"OSError: {'a' * 500} ... {'b' * 500}"


def test_a_fault_is_a_refusal_and_none_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "check", lambda *_: "dweight is not finite")
    assert selfcheck.judge("cpu", "bfloat16") == ("refused", "dweight is not finite")
    monkeypatch.setattr(selfcheck, "check", lambda *_: "")
    assert selfcheck.judge("cpu", "bfloat16") == ("passed", "")


def test_the_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child may see devices in another order, or not at all: then nothing was checked."""
    uuids = [SimpleNamespace(uuid=name) for name in ("one", "two")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: uuids[index])
    assert selfcheck.find("two") == torch.device("cuda", 1)
    assert selfcheck.judge("three", "float32") == (
        "unchecked", "LookupError: want the CUDA device three visible; got 2 others"
    )  # fmt: skip
