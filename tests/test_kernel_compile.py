"""Every Triton kernel compiles for every supported GPU within its limits; no GPU is needed."""

import json
import os
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("arch", [80, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (90, 100, 120))])
def test_every_kernel_compiles_within_the_limits_of_the_gpu(arch: int, tmp_path: Path) -> None:
    """In a process of its own: here the kernels are interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tests" / "kernel_table.py", "--arch", str(arch), "--json", tmp_path / "rows"]
    done = processes.run(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows").read_text())
    names = ("statistics", "gradient", "token_loss", "tile", "combine", "scale", "active_rows")
    kernels = {f"_{name}_kernel" for name in names}
    assert {row["kernel"] for row in rows} == kernels
    assert not any(row["faults"] for row in rows)
    assert all(row["registers"] <= 128 for row in rows if row["kernel"] != "_tile_kernel")
    writing = ("_gradient_kernel", "_scale_kernel")
    writes = [row for row in rows if row["kernel"] in writing or "stores" in row["variant"]]
    assert all(row["stores16"] > 0 for row in writes if row["aligned"] and row["kernel"] != "_combine_kernel")
    # The instruments see a difference: between rows that are aligned and not, and between precisions.
    assert any(row["loads16"] == 0 for row in rows if not row["aligned"])
    tiles = [row for row in rows if row["kernel"] == "_tile_kernel"]
    assert {row["tensor_cores"] > 0 for row in tiles} == {True, False}
