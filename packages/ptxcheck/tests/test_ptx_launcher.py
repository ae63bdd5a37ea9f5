"""Kernels that Triton compiles, and the simulated device: each in a process of its own, since Triton may interpret in
this one."""

import subprocess
from pathlib import Path

import pytest
from ptxcheck import nested

HERE = Path(__file__).parent


def run(cache: Path, file: str, plugin: str) -> int:
    """How many tests passed; none may fail."""
    command, environment = nested.command(HERE / file, plugin=plugin), nested.environment(cache)
    return nested.passed(subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True))


def test_compiled_kernels_compute_what_is_known_and_their_mistakes_are_found(tmp_path: Path) -> None:
    assert run(tmp_path, "compiled.py", "ptxcheck") > 25


@pytest.mark.slow
def test_the_device_behaves_as_one_and_its_misuse_is_found(tmp_path: Path) -> None:
    assert run(tmp_path, "simulated_device.py", "ptxcheck.device_plugin") >= 20
