"""Out of memory: one error that names the phase of the step."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlplus.train.rollout import RunFailed


class OutOfMemory(RunFailed):
    """This rank's GPU ran out of memory. phase: the step's, as in time/<phase>, or "start"."""

    def __init__(self, message: str, phase: str) -> None:
        super().__init__(message)
        self.phase = phase


@contextmanager
def naming_phase(phase: str) -> Iterator[None]:
    """Raise OutOfMemory instead of torch's error; with nested phases it names the innermost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # its frames hold the activations, and a checkpoint comes next
        text = str(error).partition("\n")[0]  # the rest is a C++ stack
        raise OutOfMemory(f"out of memory in {phase}: {text}", phase) from error


def phase_out_of_memory(failure: BaseException | None) -> str | None:
    """The phase in which this rank ran out of memory, if that caused the failure."""
    while failure is not None:
        if isinstance(failure, OutOfMemory):
            return failure.phase
        if isinstance(failure, torch.OutOfMemoryError):
            return "generate"  # raised in the engine, it became an EngineFailed on all ranks
        failure = failure.__cause__
    return None
