"""Errors that leave a CUDA device unusable in its process."""

from collections.abc import Iterator
from contextlib import contextmanager

STICKY = ("device-side assert", "illegal memory access", "illegal instruction", "misaligned address", "launch failure")
ADVICE = (
    "This came out of the head's Triton kernels, or of what ran on the device before them. Targets and weights are "
    "asserted there: if they are valid, RLPLUS_BACKEND=torch (or backend='torch') does without the kernels."
)


@contextmanager
def advising(backend: str) -> Iterator[None]:
    """Add a note to such an error of the `triton` backend. The error is re-raised: the process must end."""
    try:
        yield
    except RuntimeError as error:
        if backend == "triton" and any(text in str(error) for text in STICKY):
            error.add_note(ADVICE)
        raise
