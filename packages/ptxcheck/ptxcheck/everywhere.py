"""For pytest, `-p ptxcheck.everywhere`: whatever a test launch on CPU tensors is compiled for PTX_ARCH and executed.

So tests written for Triton's interpreter check the compiled code. A test fails on a finding of the executor.
"""

import os
from collections.abc import Iterator

import pytest

from .launcher import executed, findings_of
from .plugin import arch, launch

__all__ = ["arch", "execute_launches", "launch"]


@pytest.fixture(autouse=True)
def execute_launches() -> Iterator[None]:
    with executed(int(os.environ["PTX_ARCH"])) as runs:
        yield
    assert not findings_of(runs)
