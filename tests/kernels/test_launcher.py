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
FINISH = ("_finish_kernel", [13, 1, 1], [128, 1, 1], ["values", "partial", "target", "marked", 200, 4097, 33])
AFTER = [  # the sums of our GEMM, the rows that are computed again, by pointers on every GPU, and their sums
    FINISH,
    ("_tile_kernel", [8, 1, 1], [256, 1, 1],
     ["partial", "values", "hidden", "weight", "target", "listed", "count", 200, 4097, 144, 4097, 144, 288, 0,
      INVERSE]),
    FINISH,
]  # fmt: skip


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
    own, rows, blocks = ["values", "hidden", "weight", "target"], ["values", "logits", "target"], [5, 3, 1]
    numbers = [1.0 + 0.5 * i for i in range(len(Coefficients._fields))]
    want = [
        ("_target_kernel", [5, 1, 1], [128, 1, 1], [*own, 9000, 100, 200, 300, 3, INVERSE]),
        ("_target_kernel", [5, 1, 1], [128, 1, 1],
         [*own, "bias", 9000, 100, 200, 300, 3, INVERSE, 3.0, "row_temperature"]),
        ("_row_kernel", blocks, [256, 1, 1], ["partial", *rows, 9024, 0, 9000, 9024, 4096, INVERSE]),
        ("_finish_kernel", [1, 1, 1], [128, 1, 1], ["values", "partial", "target", 5, 9000, 3]),
        ("_row_kernel", [5, 1, 1], [256, 1, 1],
         ["partial", "exponentials", *rows, "bias", 9024, 9024, 9000, 9024, 3 * 4096, INVERSE, 3.0, "row_temperature"]),
        ("_row_kernel", [5, 1, 1], [256, 1, 1], ["partial", *rows, 9024, 0, 9000, 9024, 3 * 4096, INVERSE]),
        *(("_close_kernel", grid, [256, 1, 1],
           ["factor", "own", "values", "exponentials", "target", 9024, 9000, 9024, INVERSE])
          for grid in ([5, 1, 1], blocks)),
        ("_gradient_kernel", blocks, [256, 1, 1], ["dlogits", *rows, 9024, 9024, 9000, 9024, INVERSE]),
        ("_token_loss_kernel", [1, 1, 1], [128, 1, 1], ["values", "sums", "constants", *numbers, 5]),
        ("_scale_kernel", [5, 1, 1], [256, 1, 1], ["x", "by", 5, 9024, 18048]),
        ("_own_hidden_kernel", [5, 2, 1], [128, 1, 1], ["product", "factor", "own", "weight", "target", 1500, 1500]),
        ("_own_weight_kernel", [5, 3, 1], [128, 1, 1],
         ["dweight", "own", "hidden", "token", "order", 5, 9000, 1500, 1500, 3000, 2]),
        # 66 tiles of 128 x 128, eight programs where there is no GPU
        ("_tile_kernel", [8, 1, 1], [256, 1, 1],
         ["partial", "exponentials", *own, 200, 4097, 144, 4160, 144, 288, 4160, INVERSE]),
        *AFTER,
    ]  # fmt: skip
    found = launches(stub, 80, "rows", "gemm")
    assert [seen(launch) for launch in found] == [(*rest, arguments + SCRATCH) for *rest, arguments in want]


def test_tensor_maps_have_the_intended_sizes(stub: Path) -> None:
    """bf16 is type 9; sizes and box start with the columns; Triton passes sizes and strides as well."""
    gemm, *after = launches(stub, 90, "gemm")
    hidden = [["hidden", 9, 144, 200, 288, 64, 128], 200, 144, 144, 1]
    weight = [["weight", 9, 144, 4097, 576, 64, 128], 4097, 144, 288, 1]
    stored = [["exponentials", 9, 4160, 200, 8320, 64, 128], 200, 4160, 4160, 1]
    sizes = [200, 4097, 144, 4160, 0, 0, 0]
    arguments = ["partial", *stored, "values", *hidden, *weight, "target", *sizes, INVERSE, *SCRATCH]
    assert seen(gemm) == ("_tile_kernel", [8, 1, 1], [256, 1, 1], arguments)
    assert [seen(launch) for launch in after] == [(*rest, arguments + SCRATCH) for *rest, arguments in AFTER]
