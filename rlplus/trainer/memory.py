"""Out of memory: one error that names the phase of the step."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlplus.rollout import RunFailed


class OutOfMemory(RunFailed):
    """A GPU's memory was not enough, on this rank. phase: of the step, as in time/<phase>, or "start"."""

    def __init__(self, message: str, phase: str) -> None:
        super().__init__(message)
        self.phase = phase


@contextmanager
def naming_phase(phase: str) -> Iterator[None]:
    """OutOfMemory in place of torch's error; of nested phases the innermost is named."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the activations, and a checkpoint comes next
        text = str(error).partition("\n")[0]  # what follows is a stack of C++
        raise OutOfMemory(f"out of memory in {phase}: {text}", phase) from error


def phase_out_of_memory(failure: BaseException | None) -> str | None:
    """The phase in which this rank was out of memory, if that is what led to the failure."""
    while failure is not None:
        if isinstance(failure, OutOfMemory):
            return failure.phase
        if isinstance(failure, torch.OutOfMemoryError):
            return "generate"  # the engine's, which became an EngineFailed of all ranks
        failure = failure.__cause__
    return None
