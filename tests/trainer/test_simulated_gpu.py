"""Runs on a simulated GPU: every preset, and settings that have a code path of their own.

What it cannot show: other bits of a sum whose order a GPU does not keep, time, more than one GPU.
"""

import sys
from pathlib import Path

import processes
import pytest
from trainer_runs import environment

from rlplus.train.algorithm import ALGORITHMS

PRESETS = list(ALGORITHMS)


def run(folder: Path, *cases: str) -> None:
    variables = environment() | {"TRITON_CACHE_DIR": str(folder / "cache")}
    variables.pop("DS_ACCELERATOR")
    command = [sys.executable, str(processes.SUPPORT / "simulated_runs.py"), str(folder), *cases]
    done = processes.run(command, processes.LONG_S, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as on a GPU") >= len(cases)


def test_a_run_with_the_compiled_kernels(tmp_path: Path) -> None:
    run(tmp_path, "kernels")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(PRESETS), 10))
def test_presets(tmp_path: Path, first: int) -> None:
    run(tmp_path, *PRESETS[first : first + 10])


@pytest.mark.slow
def test_settings(tmp_path: Path) -> None:
    run(tmp_path, "settings")


@pytest.mark.slow
def test_moments_of_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="train.optimizer adamw8bit needs bitsandbytes, which is not installed")
    run(tmp_path, "eight bits")
