"""The choice of the backend: "auto" on a simulated CUDA device, and the first call of each size."""

import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from head_cases import EVERYTHING, run, sample, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplus import linear_logprob, linear_policy_loss
from rlplus.kernels import scale
from rlplus.loss.backends import chunked, selection
from rlplus.loss.backends import triton as triton_backend
from rlplus.loss.backends.selection import Choice, choose
from rlplus.loss.guard import verdicts
from rlplus.loss.guard.verdicts import Verdict

CUDA = torch.device("cuda", 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_on_cuda", {})
    monkeypatch.setattr(selection, "_agreeing", set())
    selection._warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Stands for `verdict_on`: passed. The device is one that `triton` suits."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = mock.Mock(return_value=Verdict("passed", ""))
    monkeypatch.setattr(verdicts, "verdict_on", found)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- a CUDA device


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_auto_is_triton_where_the_check_passed(dtype: torch.dtype, verdict: mock.Mock) -> None:
    name = str(dtype).removeprefix("torch.")
    for _ in range(3):
        assert choose("auto", CUDA, dtype) == ("triton", f"its self-check passed on NVIDIA Test for {name}")
    verdict.assert_called_once_with(CUDA, dtype)
    assert selection.resolve_backend("auto", CUDA, dtype) == "triton"


@pytest.mark.parametrize("found", [Verdict("refused", "dhidden is not finite"), Verdict("unchecked", "busy")])
def test_auto_is_torch_where_it_did_not_with_one_warning(
    found: Verdict, verdict: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    verdict.return_value = found
    reason = f"the self-check of backend 'triton' on NVIDIA Test for bfloat16: {found.reason}"
    for _ in range(3):
        assert choose("auto", CUDA, BF16) == ("torch", reason)
    verdict.assert_called_once()
    assert warnings(caplog) == [f"{reason}; 'auto' is 'torch' in this process"]


def test_out_of_memory_is_raised_and_decides_nothing(verdict: mock.Mock) -> None:
    verdict.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            choose("auto", CUDA, BF16)
    verdict.side_effect = None
    assert choose("auto", CUDA, BF16).backend == "triton"


UNSUITABLE: dict[str, Any] = {
    "fp64": (lambda patch: None, "backend 'triton' takes no fp64"),
    "old": (
        lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5)),
        "backend 'triton' wants compute capability 8.0; got 7.5",
    ),
    "ROCm": (lambda patch: patch.setattr(torch.version, "hip", "6.4"), "backend 'triton' is not tested on ROCm"),
    "interpreted": (
        lambda patch: patch.setenv("TRITON_INTERPRET", "1"),
        "TRITON_INTERPRET is set, which is for tests without a GPU",
    ),
    "missing": (
        lambda patch: patch.setattr(verdicts, "versions", lambda: {"triton": verdicts.MISSING}),
        "triton is not installed, or cannot be imported (`python -c 'import triton'` says why)",
    ),
    "old Triton": (
        lambda patch: patch.setattr(verdicts, "versions", lambda: {"triton": "3.5.1"}),
        "backend 'triton' wants Triton 3.6 or later; got 3.5.1",
    ),
}


@pytest.mark.parametrize("what", UNSUITABLE)
def test_where_triton_is_out_of_the_question_nothing_is_checked(
    what: str, verdict: mock.Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = UNSUITABLE[what]
    change(monkeypatch)
    for device in (CUDA, torch.device("cuda", 1), CUDA):
        assert choose("auto", device, FP64 if what == "fp64" else BF16) == ("torch", reason)
    verdict.assert_not_called()
    rest = "; 'auto' is 'torch' in this process, with RLPLUS_BACKEND=torch without this warning"
    assert warnings(caplog) == ([] if what == "fp64" else [reason + rest])  # the docstring says it of fp64


@pytest.mark.parametrize("version", ["3.5.1", "2.3.1"])
def test_a_triton_too_old_for_the_kernels_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "versions", lambda: {"triton": version})
    with pytest.raises(ValueError, match=f"^backend 'triton' wants Triton 3.6 or later; got {version}$"):
        choose("triton", CUDA, BF16)


@pytest.mark.parametrize("version", ["3.6.0", "3.6rc1", "3.6+git1234", "3.10.0+git1234", "4.0.0"])
def test_a_triton_of_the_bound_or_later_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "versions", lambda: {"triton": version})
    assert choose("triton", CUDA, BF16).backend == "triton"


CAPTURED = (
    "a CUDA graph is captured before the first call {} on NVIDIA Test for {}, which checks backend 'triton': the graph "
    "has 'torch' instead; call the operation once with these sizes before the capture"
)


def test_without_a_verdict_a_graph_is_captured_with_torch(
    verdict: mock.Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            assert choose("auto", CUDA, BF16).backend == "torch"
        verdict.assert_not_called()
    assert warnings(caplog) == [CAPTURED.format("", "bfloat16").replace("  ", " ")]
    assert choose("auto", CUDA, BF16).backend == "triton"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose("auto", CUDA, BF16).backend == "triton"


def test_a_choice_needs_no_check(verdict: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("triton", CUDA, BF16) == ("triton", "chosen by name")
    assert choose("torch", CUDA, BF16) == ("torch", "chosen by name")
    monkeypatch.setenv("RLPLUS_BACKEND", "torch")
    assert choose("auto", CUDA, BF16) == ("torch", "RLPLUS_BACKEND=torch")
    assert choose("triton", CUDA, BF16) == ("triton", "chosen by name")
    verdict.assert_not_called()
    monkeypatch.setenv("RLPLUS_BACKEND", "auto")
    assert choose("auto", CUDA, BF16).backend == "triton"


def test_nothing_is_checked_for_a_device_that_is_only_planned_for(verdict: mock.Mock) -> None:
    assert choose("auto", torch.device("cuda"), BF16).backend == "torch"
    verdict.assert_not_called()


# ---- the first call of each size, of CPU tensors in the interpreter

N, V, H = 12, 20, 5


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Counts comparisons: calls of `triton`'s logprobs. "auto" is triton until something refuses it."""
    known = selection._on_cuda
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(selection, "_automatic", lambda *kind: known.get(kind, Choice("triton", "passed")))
    with mock.patch.object(triton_backend, "logprob", wraps=triton_backend.logprob) as seen:
        yield seen


def off(by: float, logprob: Any = triton_backend.logprob) -> Any:
    def wrong(*arguments: Any) -> Any:
        result, entropy = logprob(*arguments)
        result[-1] += by
        return result, entropy

    return wrong


def call(n: int = N, V: int = V, dtype: torch.dtype = FP32, backend: str = "auto", **options: Any) -> Any:
    return tensors(run(*sample(n, V, dtype=dtype, H=H), EVERYTHING, backend=backend, **options))


def same(got: Any, want: Any) -> bool:
    return all(torch.equal(got[name], want[name]) for name in want)


def test_the_first_call_of_each_size_is_compared(compared: mock.Mock) -> None:
    for _ in range(2):
        assert same(call(), call(backend="triton"))
        call(n=3)
    assert compared.call_count == 1
    call(V=V + 1)
    assert compared.call_count == 2
    call(dtype=BF16)
    assert compared.call_count == 3
    linear_logprob(**sample(N, V, dtype=FP32, H=H)[0])
    assert compared.call_count == 4  # its own
    call(n=0, V=V + 2)
    assert compared.call_count == 4
    for number, options in enumerate(({"temperature": torch.ones(N)}, {"logit_softcap": 3.0}), 5):  # other code
        for _ in range(2):
            assert same(call(**options), call(backend="triton", **options))
        assert compared.call_count == number


@pytest.mark.parametrize("by", [0.1, torch.nan])
def test_where_it_differs_torch_computes_this_call_and_all_others(
    by: float, compared: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    compared.side_effect = off(by)
    want = call(backend="torch")
    for _ in range(2):
        assert same(call(), want)
    assert compared.call_count == 1
    (warning,) = warnings(caplog)
    assert warning.startswith(
        "the first call of backend 'triton' with a weight (20, 5) on NVIDIA Test for float32: a logprob is off by "
    )
    assert call(dtype=BF16).keys() == want.keys()
    assert compared.call_count == 2  # another dtype has a verdict of its own


def test_it_is_torch_that_adds_to_the_callers_gradient_then(compared: mock.Mock) -> None:
    compared.side_effect = off(0.1)
    head, constants = sample(N, V, dtype=FP32, H=H)
    sums = []
    for backend in ("auto", "torch"):
        total = torch.ones(V, H)
        linear_policy_loss(**head, **constants, objective=EVERYTHING, weight_grad=total, backend=backend)
        sums.append(total)
    assert torch.equal(*sums)


def test_rounding_is_no_difference(compared: mock.Mock) -> None:
    compared.side_effect = off(1e-4)
    assert same(call(), call(backend="triton"))


def test_rows_that_do_not_count_are_compared_as_they_are(compared: mock.Mock, caplog: pytest.LogCaptureFixture) -> None:
    """NaN in them, and targets that are none, are the same on both sides."""
    head, constants = sample(N, V, dtype=FP32, H=H)
    idle = torch.arange(N) % 3 == 0
    head["hidden"][idle], head["target"][idle] = torch.nan, V + 5
    constants["token_weight"][idle] = 0.0
    constants["entropy_weight"][idle] = 0.0
    linear_policy_loss(**head, **constants, objective=EVERYTHING)
    assert compared.call_count == 1
    temperature = torch.linspace(0.5, 2.0, N).masked_fill(idle, torch.nan)
    linear_policy_loss(**head, **constants, objective=EVERYTHING, temperature=temperature)
    assert compared.call_count == 2
    assert warnings(caplog) == []


def test_a_size_first_seen_in_a_captured_graph_is_left_to_torch(
    compared: mock.Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            assert same(call(), call(backend="torch"))
        assert compared.call_count == 0
    assert warnings(caplog) == [CAPTURED.format(f"with a weight {(V, H)}", "float32")]
    call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert same(call(), call(backend="triton"))


def test_explicit_triton_is_never_compared(compared: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    call(backend="triton")
    monkeypatch.setenv("RLPLUS_BACKEND", "triton")
    call()
    assert compared.call_count == 0


def test_tracing_compares_nothing(compared: mock.Mock) -> None:
    head, constants = sample(N, V, dtype=FP32, H=H)

    def loss(head: dict[str, Any]) -> torch.Tensor:
        return linear_policy_loss(**head, **constants, objective=EVERYTHING).loss

    torch._dynamo.reset()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(head)
    assert compared.call_count == 0
    torch.testing.assert_close(got, loss(head))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(value) for name, value in head.items()}
        assert linear_logprob(**fake | {"weight": torch.randn(V + 3, H), "bias": None})[0].shape == (N,)
    assert compared.call_count == 1


# ---- without the kernels


@pytest.mark.parametrize(("backend", "launches"), [("triton", 3), ("torch", 0)])
def test_the_backward_pass_of_torch_uses_no_kernel(
    backend: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tensors that claim to be on CUDA."""
    head, constants = sample(N, V, dtype=FP32, H=H)
    leaves = [head[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    out = linear_policy_loss(**head, **constants, objective=EVERYTHING, backend=backend)
    want = torch.autograd.grad(0.75 * out.loss, leaves, retain_graph=True)
    seen = mock.Mock(side_effect=lambda gradient, by: gradient.mul_(by))
    monkeypatch.setattr(scale, "scale_", seen)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    got = torch.autograd.grad(0.75 * out.loss, leaves)
    assert seen.call_count == launches
    assert all(map(torch.equal, got, want))


# ---- errors of the device


@pytest.mark.parametrize(
    ("backend", "message", "advised"),
    [
        ("triton", "CUDA error: device-side assert triggered", True),
        ("triton", "CUDA error: an illegal memory access was encountered", True),
        ("triton", "Triton Error [CUDA]: unspecified launch failure", True),
        ("triton", "mat1 and mat2 shapes cannot be multiplied", False),
        ("torch", "CUDA error: device-side assert triggered", False),
    ],
)
def test_errors_that_end_the_device_come_with_advice(
    backend: str, message: str, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"triton": triton_backend, "torch": chunked}[backend]
    head = sample(N, V, dtype=FP32, H=H)[0]
    head["hidden"].requires_grad_()
    calls = {
        "policy_loss": lambda: call(backend=backend),
        "logprob": lambda: linear_logprob(**head, backend=backend),
        "logprob_backward": lambda: linear_logprob(**head, backend=backend)[0].sum().backward(),
    }
    for name, run_it in calls.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, mock.Mock(side_effect=torch.AcceleratorError(message)))
            with pytest.raises(torch.AcceleratorError, match=re.escape(message)) as caught:
                run_it()
        notes = getattr(caught.value, "__notes__", [])
        assert ["RLPLUS_BACKEND=torch" in note for note in notes] == [True] * advised, name
