"""Every Triton kernel compiles for every supported GPU, by every supported Triton, within its limits; without a GPU."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import tritons
from sass import hot_path, parse

ROOT = Path(__file__).parents[2]


def compiled(folder: Path, *options: str, triton: str | None = None) -> list[dict[str, Any]]:
    """The table of kernels, from a process of its own, since the kernels are interpreted here.

    triton: one of `tritons.PINNED`; None = the installed one.
    """
    folders = [*([tritons.folder(triton)] if triton else []), ROOT, ROOT / "tests"]
    path = os.pathsep.join(map(str, folders))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, processes.SUPPORT / "kernel_table.py", *options, "--json", folder / "rows"]
    done = processes.run(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert triton is None or f"Triton {triton}" in done.stdout
    rows = json.loads((folder / "rows").read_text())
    assert not any(row["faults"] for row in rows)
    return rows


NAMES = ("statistics", "gradient", "exponential_gradient", "token_loss", "tile", "combine", "scale", "active_rows")
KERNELS = {f"_{name}_kernel" for name in NAMES}
USUAL = (  # a bf16 model's: one of every kernel
    "float32, V 4097 in 4160",
    "bfloat16, V 4097 in 4160",
    "bfloat16, V 4096, H 128, 128x128x64 w8 s3, stores",
    "bfloat16, exponentials of tiles of 128, 4096 w8",
    "ratio, mis, k3, truncate, optional inputs given",
    "bfloat16, 5 x 4160",
    "active rows",
)


def test_the_kernels_of_a_usual_call_compile_for_the_a100(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--arch", "80", "--variants", *USUAL)
    assert {row["kernel"] for row in rows} == KERNELS


def test_what_older_tritons_refuse_is_not_in_the_kernels(tmp_path: Path) -> None:
    """3.6.0 knows the least. These are the kernels that share functions."""
    rows = compiled(tmp_path, "--arch", "80", "--variants", USUAL[0], USUAL[2], triton=min(tritons.PINNED))
    assert {row["kernel"] for row in rows} >= {"_statistics_kernel", "_gradient_kernel", "_tile_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("triton", tritons.PINNED)
@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles_by_the_tritons_of_every_torch(arch: int, triton: str, tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--arch", str(arch), triton=triton)
    assert {row["kernel"] for row in rows} == KERNELS
    assert all(row["registers"] <= 128 for row in rows if row["kernel"] != "_tile_kernel")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_every_kernel_compiles_within_the_limits_of_the_gpu(arch: int, tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--arch", str(arch))
    assert {row["kernel"] for row in rows} == KERNELS
    # More than 128 registers let fewer blocks run at once. A bias that is read number by number takes them on sm_120.
    slow = [
        row for row in rows if arch == 120 and row["variant"].endswith("V 4097 in 4097, bias, blocks of the vocabulary")
    ]
    assert all(row["registers"] <= 168 for row in slow)
    assert all(row["registers"] <= 128 for row in rows if row["kernel"] != "_tile_kernel" and row not in slow)
    writing = ("_gradient_kernel", "_exponential_gradient_kernel", "_scale_kernel")
    writes = [row for row in rows if row["kernel"] in writing or "stores" in row["variant"]]
    assert all(row["stores16"] > 0 for row in writes if row["aligned"] and row["kernel"] != "_combine_kernel")
    # The instruments see a difference: between rows that are aligned and not, and between precisions.
    assert any(row["loads16"] == 0 for row in rows if not row["aligned"])
    tiles = [row for row in rows if row["kernel"] == "_tile_kernel"]
    assert {row["tensor_cores"] > 0 for row in tiles} == {True, False}


def test_a_logit_takes_few_instructions_on_hopper(tmp_path: Path) -> None:
    """19 instructions per element, at the bandwidth of an H200, are 77 % of what it can issue."""
    rows = compiled(tmp_path, "--arch", "90", "--variants", "float32, V 4097 in 4160", "bfloat16, V 4097 in 4160")
    instructions = {(row["kernel"], row["variant"].split(",")[0]): row["instructions"] for row in rows}
    assert 7 < instructions["_statistics_kernel", "float32"] <= 13
    assert 10 < instructions["_gradient_kernel", "bfloat16"] <= 20


def test_instructions_are_counted_along_the_longest_way() -> None:
    loop = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R1 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   FMUL R1, R1, R1 ;
.L_x_2:
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_3:
        /*0060*/                   BRA `(.L_x_3) ;
"""
    assert hot_path(parse(loop)) == 4
    straight = loop.replace("@P1 BRA `(.L_x_1)", "MUFU.EX2 R1, R1")
    assert hot_path(parse(straight)) == 6
    assert hot_path(parse(straight.replace("@!P0 BRA", "BRA"))) == 5
    assert hot_path(parse(straight.replace("@!P0 BRA", "BRA.U !UP0,"))) == 6
    assert hot_path(parse(straight.replace("FADD R1, R1, R1", "EXIT"))) == 2
    assert [instruction.name for instruction in parse(straight)][4] == "MUFU"
