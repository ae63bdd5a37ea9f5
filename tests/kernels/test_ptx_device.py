"""Tests for a GPU, on the simulated device of ptxcheck; each in a process of its own."""

from pathlib import Path

import processes
import pytest
from ptxcheck import nested

HERE = Path(__file__).parent
PATHS = (HERE.parent, HERE.parents[1])  # a plugin of tests/support, and rlplus
# Not those of large shapes, which take hours, nor those that start a process, which sees no device.
TOO_LARGE = "2_to_the_31 or stays_within or little_memory or as_exact_as_fp32_logits or give_the_same_bits"
ELSEWHERE = "child_process or device_of_its_inputs"


def run(cache: Path, *arguments: str | Path, **more: str) -> int:
    command = nested.command(*arguments, plugin="ptxcheck.device_plugin")
    return nested.passed(processes.run(command, processes.LONG_S, env=nested.environment(cache, *PATHS, **more)))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
def test_what_is_tested_on_a_gpu_holds_on_the_simulated_one(arch: str, tmp_path: Path) -> None:
    path = HERE / "test_gpu.py"
    assert run(tmp_path, path, "-k", f"not ({TOO_LARGE} or {ELSEWHERE})", PTX_ARCH=arch) >= 90


@pytest.mark.slow
def test_mistakes_planted_in_the_losses_are_seen_on_the_device(tmp_path: Path) -> None:
    assert run(tmp_path, HERE / "compiled_device.py") > 10
