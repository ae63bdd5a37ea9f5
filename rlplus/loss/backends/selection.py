"""The choice of the backend: the one requested, RLPLUS_BACKEND's, or for "auto" the best for this machine.

On a CPU that is `cpp` where it is built, else `torch`. On CUDA it is `triton` for bf16, fp16 and fp32 where its
self-check passed (`verdicts`), and where the first call of each size agrees with plain products; else `torch`.
"""

import logging
import os
import re
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss.backends import MODULES, implementation, native
from rlplus.loss.guard import verdicts
from rlplus.loss.guard.scope import guarded
from rlplus.loss.head.head import Head

BACKENDS = ("reference", *MODULES)
CAPABILITY = (8, 0)  # the oldest GPUs for which the kernels are compiled and tested
TRITON = (3, 6)  # the oldest that the kernels are tested with; 3.4 and older cannot compile them
COMPARED_ROWS = 8
TOLERANCE = 1e-3  # absolute and relative error of a logprob: what is wrong is wrong by more

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A backend, and the reason for choosing it."""

    backend: str
    reason: str


_Kind = tuple[torch.device, torch.dtype]
_on_cuda: dict[_Kind, Choice] = {}
_agreeing: set[tuple[_Kind, torch.Size, bool, bool]] = set()  # whose first call agreed, see `_agrees`
_lock = Lock()


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend for tensors of that device and dtype; ValueError if the requested one cannot compute them.

    "auto" may start a process to check a CUDA device, once. A device without an index is one that `rlplus plan`
    assumes: there it is `torch`, which needs the larger scratch.
    """
    if is_automatic(name):
        return _automatic(device, dtype)
    reason = "chosen by name"
    if name == "auto":
        name = os.environ["RLPLUS_BACKEND"]
        reason = f"RLPLUS_BACKEND={name}"
    if name not in BACKENDS:
        raise ValueError(f"want backend 'auto' or one of {', '.join(BACKENDS)}; got {name!r}")
    if name == "cpp":
        native.check(device.type, dtype)
    if name == "triton":
        _check_triton(device.type, dtype)
    return Choice(name, reason)


def is_automatic(name: str) -> bool:
    """Whether neither the caller nor RLPLUS_BACKEND chose a backend."""
    return name == "auto" and os.environ.get("RLPLUS_BACKEND", "") in ("", "auto")


@torch.compiler.assume_constant_result
def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """`choose` without the reason."""
    return choose(name, device, dtype).backend


def backend_for(name: str, head: Head, scratch_bytes: float) -> str:
    """The backend of a call. If "auto" selected `triton`, the first call of a size is checked against plain products.

    While torch.compile traces there are no numbers to compare.
    """
    backend = resolve_backend(name, head.hidden.device, head.hidden.dtype)
    if backend != "triton" or torch.compiler.is_compiling() or not is_automatic(name):
        return backend
    return backend if _agrees(head, scratch_bytes) else "torch"


def _check_triton(device: str, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    if find_spec("triton") is None:
        raise ValueError("backend 'triton' needs the package triton, which is not installed")
    if too_old := _too_old():
        raise ValueError(too_old)
    if device != "cuda" and not _interpreted():
        got = f"{kind} on {device}"
        raise ValueError(f"backend 'triton' needs CUDA tensors, or TRITON_INTERPRET=1 for tests; got {got}")
    if dtype == torch.float64:
        raise ValueError(f"backend 'triton' needs bf16, fp16 or fp32; got {kind} on {device}")


def _too_old() -> str:
    """The refusal of the installed Triton; empty if it is new enough."""
    version = verdicts.versions()["triton"]
    known = re.match(r"(\d+)\.(\d+)", version)
    if known is None or tuple(map(int, known.groups())) >= TRITON:  # none is installed, or it has no number
        return ""
    return f"backend 'triton' wants Triton {_dotted(TRITON)} or later; got {version}"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _automatic(device: torch.device, dtype: torch.dtype) -> Choice:
    if device.type == "cuda" and device.index is not None:
        return _automatic_on_cuda(device, dtype)
    if device.type == "cpu" and dtype in native.DTYPES:
        return (
            Choice("cpp", "it is built") if native.load() else Choice("torch", "'cpp' is not built, or does not load")
        )
    return Choice("torch", f"no other takes {dtype} on {device.type}")


def _automatic_on_cuda(device: torch.device, dtype: torch.dtype) -> Choice:
    kind = (device, dtype)
    if kind in _on_cuda:
        return _on_cuda[kind]
    with _lock:
        if kind in _on_cuda:
            return _on_cuda[kind]
        if reason := _unsuitable(device, dtype):
            if dtype != torch.float64:
                _warn_once(
                    f"{reason}; 'auto' is 'torch' in this process, with RLPLUS_BACKEND=torch without this warning"
                )
            _on_cuda[kind] = Choice("torch", reason)
        elif torch.cuda.is_current_stream_capturing():
            _warn_once(_captured(f"on {_named(kind)}"))
            return Choice("torch", "backend 'triton' has no verdict, and while a CUDA graph is captured it gets none")
        elif (verdict := verdicts.verdict_on(device, dtype)).status == "passed":
            _on_cuda[kind] = Choice("triton", f"its self-check passed on {_named(kind)}")
        else:
            _refuse(kind, f"the self-check of backend 'triton' on {_named(kind)}: {verdict.reason}")
    return _on_cuda[kind]


def _unsuitable(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why `triton` cannot be used there; empty if it can."""
    if dtype == torch.float64:
        return "backend 'triton' takes no fp64"
    if verdicts.versions()["triton"] == verdicts.MISSING:
        return "triton is not installed, or cannot be imported (`python -c 'import triton'` says why)"
    if too_old := _too_old():
        return too_old
    if torch.version.hip is not None:
        return "backend 'triton' is not tested on ROCm"
    if (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"backend 'triton' wants compute capability {_dotted(CAPABILITY)}; got {_dotted(capability)}"
    if _interpreted():
        return "TRITON_INTERPRET is set, which is for tests without a GPU"
    return ""


def _agrees(head: Head, scratch_bytes: float) -> bool:
    """Whether `triton` may compute this call: the first of each size is checked, and a mismatch disables `triton`."""
    kind = (head.hidden.device, head.hidden.dtype)
    compiled_in = (head.softcap is not None, head.row_temperature is not None)
    size = (kind, head.weight.shape, *compiled_in)
    N = len(head.target)
    # A tracer's stand-in has no numbers; a rank may have no rows of a head that is split.
    if size in _agreeing or not N or type(head.hidden) is not Tensor or not len(head.weight):
        return True
    if torch.cuda.is_current_stream_capturing():
        _warn_once(_captured(f"with a weight {tuple(head.weight.shape)} on {_named(kind)}"))
        return False
    head = head.rounded()
    if head.group:  # targets of its own
        head = head._replace(target=head.target % len(head.weight), group="")
    rows = torch.linspace(0, N - 1, COMPARED_ROWS, device=head.hidden.device).round().long()
    with torch.no_grad(), guarded(head.hidden.device, "triton"):
        got = implementation("triton").logprob(head, scratch_bytes)[0][rows]
        want = implementation("torch").logprob(head.rows(rows), scratch_bytes)[0]
        agrees = torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if agrees:
        _agreeing.add(size)
    else:
        shape = tuple(head.weight.shape)
        error = (got - want).abs().nan_to_num(torch.inf).max().item()
        _refuse(
            kind,
            f"the first call of backend 'triton' with a weight {shape} on {_named(kind)}: "
            f"a logprob is off by {error:.1e}",
        )
    return bool(agrees)


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _captured(call: str) -> str:
    return (
        f"a CUDA graph is captured before the first call {call}, which checks backend 'triton': the graph has 'torch' "
        "instead; call the operation once with these sizes before the capture"
    )


def _refuse(kind: _Kind, reason: str) -> None:
    logger.warning("%s; 'auto' is 'torch' in this process", reason)
    _on_cuda[kind] = Choice("torch", reason)


def _named(kind: _Kind) -> str:
    device, dtype = kind
    return f"{torch.cuda.get_device_name(device)} for {str(dtype).removeprefix('torch.')}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
