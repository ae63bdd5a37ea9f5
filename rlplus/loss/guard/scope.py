"""The scope of an operation: full precision of its products, and advice with errors that leave a device unusable."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):  # which has no setting _split_k
    raise ImportError(f"want torch 2.10 or later for the operations of rlplus; got {torch.__version__}")
STICKY = ("device-side assert", "illegal memory access", "illegal instruction", "misaligned address", "launch failure")
ADVICE = (
    "This came out of the head's Triton kernels, or of what ran on the device before them. Targets and weights are "
    "asserted there: if they are valid, RLPLUS_BACKEND=torch (or backend='torch') does without the kernels."
)
_SETTINGS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
FULL = ("none", "ieee")  # the default, and by choice
_SUMS = "allow_bf16_reduced_precision_reduction"  # and with _split_k; fields of torch.backends.cuda.matmul
_lock = Lock()
_before: list[str] = []  # the settings that the first operation under way found, to restore after the last one
_sums = (True, True)
_under_way = 0


@contextmanager
def guarded(device: torch.device, backend: str) -> Iterator[None]:
    """`full_precision`, and a note on errors of the `triton` backend after which the process must end."""
    with full_precision(device):
        try:
            yield
        except RuntimeError as error:
            if backend == "triton" and any(text in str(error) for text in STICKY):
                error.add_note(ADVICE)
            raise


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast off, no TF32 or bf16 in products of fp32 matrices, bf16 products summed in fp32 to the end.

    In torch these settings are process-wide: until the last such scope is left, they hold for other threads, too. A
    CUDA graph keeps the precision under which it was captured.
    """
    with torch.autocast(device.type, enabled=False):
        _enter()
        try:
            yield
        finally:
            _leave()


def _enter() -> None:
    global _under_way, _sums
    with _lock:
        if not _under_way:
            matmul = _SETTINGS[0]
            _sums = getattr(matmul, _SUMS), getattr(matmul, f"{_SUMS}_split_k")
            setattr(matmul, _SUMS, (False, _sums[1]))
            _before[:] = (setting.fp32_precision for setting in _SETTINGS)
            for setting, before in zip(_SETTINGS, _before, strict=True):
                if before not in FULL:
                    setting.fp32_precision = "ieee"
        _under_way += 1


def _leave() -> None:
    global _under_way
    with _lock:
        _under_way -= 1
        if _under_way:
            return
        setattr(_SETTINGS[0], _SUMS, _sums)
        for setting, before in zip(_SETTINGS, _before, strict=True):
            for value in ("none", before):  # "none" inherits from torch.backends.fp32_precision; it may have been that
                if setting.fp32_precision != before:
                    setting.fp32_precision = value
