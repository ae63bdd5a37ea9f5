"""For pytest, `-p ptx.plugin`: compiled kernels in the tests, whatever TRITON_INTERPRET says.

It must be loaded before anything imports Triton. The fixture `launches` executes what a test launches, for the
architecture `arch`, and fails the test on a finding.
"""

import os
from collections.abc import Iterator

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it was before Triton 3.10

import pytest
import triton
import triton.language

from .launcher import Run, executed, findings_of

triton.knobs.runtime.interpret = False  # from here on the variable does not count


@pytest.fixture
def arch() -> int:
    """The compute capability to compile for, 80 or 90; parametrize it."""
    return 80


@pytest.fixture
def launches(arch: int) -> Iterator[list[Run]]:
    with executed(arch) as runs:
        yield runs
    assert not findings_of(runs)
