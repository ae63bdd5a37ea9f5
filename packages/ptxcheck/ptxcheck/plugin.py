"""For pytest, `-p ptxcheck`: compiled kernels in the tests, whatever TRITON_INTERPRET says.

It must be loaded before anything imports Triton. A test asks for one of two fixtures, and fails on a finding:

    launch   launches on CPU tensors are compiled for the architecture `arch` and executed; the list of these
    device   tensors can be on a simulated device, "cuda"; what happened there
"""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET"):
    raise pytest.UsageError("ptxcheck: want to be loaded before Triton, by -p ptxcheck; Triton interprets already")
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it was before Triton 3.10

import triton
import triton.language

from .launcher import Run, executed, findings_of

if TYPE_CHECKING:
    from .device import Device

triton.knobs.runtime.interpret = False  # from here on the variable does not count


@pytest.fixture
def arch() -> int:
    """The compute capability to compile for, 80 or 90; parametrize it."""
    return 80


@pytest.fixture
def launch(arch: int) -> Iterator[list[Run]]:
    with executed(arch) as runs:
        yield runs
    assert not findings_of(runs)


@pytest.fixture
def device(arch: int) -> "Iterator[Device]":
    from .simulate import simulated  # imports torch._dynamo, which takes long

    with simulated(arch) as gpu:
        yield gpu
    assert not gpu.findings
