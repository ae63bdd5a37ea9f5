"""For pytest, `-p ptxcheck.device_plugin`: tests as on a GPU of PTX_ARCH (90), on one simulated device for all of them.

So conftest and modules see CUDA when they are imported. PTX_COMPUTE=0: launches and GEMMs are counted, not computed. A
test fails on a finding of the executor.
"""

import os
from collections.abc import Iterator

import pytest

from .device import Device
from .plugin import arch, launch
from .simulate import simulated

__all__ = ["arch", "device", "launch"]
_context = simulated(int(os.environ.get("PTX_ARCH", "90")), os.environ.get("PTX_COMPUTE") != "0")
_gpu = _context.__enter__()


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    _gpu.findings.clear()
    _gpu.reset()
    yield _gpu
    _gpu.queue.clear()
    _gpu.failed = None
    assert not _gpu.findings


def pytest_unconfigure() -> None:
    _context.__exit__(None, None, None)
