"""Grids and arguments that reach the driver through Triton's launcher, with a stub of the driver's library."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import triton

from rlplus.kernels.policy_loss import Coefficients

pytestmark = pytest.mark.slow
COMPILER = shutil.which(os.environ.get("CC", "cc"))
SCRATCH = [0, 0]  # Triton's pointers to scratch memory, which no kernel here uses
INVERSE = pytest.approx(1 / 0.8)  # 1 / the temperature


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stub driver."""
    if COMPILER is None:
        pytest.skip("want a C compiler, CC or cc: Triton's launcher and the stub driver are compiled; got none")
    folder = tmp_path_factory.mktemp("stub driver")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    command = [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-I", include, "-o", folder / "libcuda.so.1"]
    done = processes.run([*command, processes.SUPPORT / "stub_driver.c"])
    assert done.returncode == 0, done.stderr
    return folder


def launches(stub: Path, arch: int, *parts: str) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(processes.ROOT)}
    program = processes.SUPPORT / "launcher_child.py"
    done = processes.run([sys.executable, program, stub, str(arch), *parts], env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(launch["stream"] == 4242 for launch in found)
    assert all(launch["shared"] == launch["declared shared"] for launch in found)
    return found


def seen(launch: dict[str, Any]) -> tuple[Any, ...]:
    return launch["kernel"], launch["grid"], launch["block"], launch["arguments"]


def test_every_launch_has_the_intended_arguments(stub: Path) -> None:
    """5 rows of 9000 logits in 9024 columns: three blocks. None, constants and a 1 are compiled in, not passed."""
    sizes = [9024, 9000, 9024]  # stride, V, W
    numbers = [1.0 + 0.5 * i for i in range(len(Coefficients._fields))]
    want = [
        ("_statistics_kernel", [5, 3, 1], [128, 1, 1],
         ["values", "partial", "logits", "target", *sizes, 4096, INVERSE]),
        ("_combine_kernel", [1, 1, 1], [128, 1, 1], ["values", "partial", "target", 5, 9000, 3]),
        ("_statistics_kernel", [5, 1, 1], [128, 1, 1],
         ["values", "logits", "target", "bias", *sizes, 3 * 4096, INVERSE, 3.0, "row_temperature"]),
        ("_gradient_kernel", [5, 3, 1], [256, 1, 1],
         ["dlogits", "slot", "values", "logits", "target", 9024, 9024, 9000, 9024, INVERSE]),
        ("_token_loss_kernel", [1, 1, 1], [128, 1, 1], ["values", "sums", "constants", *numbers, 5]),
        ("_scale_kernel", [5, 1, 1], [256, 1, 1], ["x", "by", 5, 9024, 18048]),
        ("_active_rows_kernel", [1, 1, 1], [512, 1, 1], ["slot", "token", "filled", "values", 16, 5]),
        ("_active_rows_kernel", [1, 1, 1], [512, 1, 1], ["slot", "token", "filled", "values", 1, "scale", 1]),
        # 2 tiles of 128 rows, 33 of 128 columns
        ("_tile_kernel", [66, 1, 1], [256, 1, 1],
         ["values", "partial", "logits", "hidden", "weight", "target", 200, 4097, 144, 4160, 144, 288, 4160, INVERSE]),
        ("_combine_kernel", [13, 1, 1], [128, 1, 1], ["values", "partial", "target", 200, 4097, 33]),
    ]  # fmt: skip
    found = launches(stub, 80, "rows", "gemm")
    assert [seen(launch) for launch in found] == [(*rest, arguments + SCRATCH) for *rest, arguments in want]


def test_tensor_maps_have_the_intended_sizes(stub: Path) -> None:
    """bf16 is type 9; sizes and box start with the columns; Triton passes sizes and strides as well."""
    gemm, _ = launches(stub, 90, "gemm")
    hidden = [["hidden", 9, 144, 200, 288, 64, 128], 200, 144, 144, 1]
    weight = [["weight", 9, 144, 4097, 576, 64, 128], 4097, 144, 288, 1]
    sizes = [200, 4097, 144, 4160, 0, 0, 4160]
    arguments = ["values", "partial", "logits", *hidden, *weight, "target", *sizes, INVERSE, *SCRATCH]
    assert seen(gemm) == ("_tile_kernel", [66, 1, 1], [256, 1, 1], arguments)
