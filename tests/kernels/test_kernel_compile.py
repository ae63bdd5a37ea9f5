"""Every Triton kernel compiles for every supported GPU, by every supported Triton, within its limits, and takes what
the table of budgets says, as every operation does; without a GPU."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import tritons
from kernel_names import KERNELS
from sass import after_mma, bytes_of, counts, flop_of, parse

ROOT = Path(__file__).parents[2]


def compiled(folder: Path, *options: str, triton: str | None = None) -> list[dict[str, Any]]:
    """The table of kernels, from a process of its own, since the kernels are interpreted here.

    triton: one of `tritons.PINNED`; None = the installed one.
    """
    folders = [*([tritons.folder(triton)] if triton else []), ROOT, ROOT / "tests", ROOT / "packages/ptxcheck"]
    path = os.pathsep.join(map(str, folders))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, processes.SUPPORT / "kernel_table.py", *options, "--json", folder / "rows"]
    done = processes.run(command, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    assert triton is None or f"Triton {triton}" in done.stdout
    return json.loads((folder / "rows").read_text())


def kernels(rows: list[dict[str, Any]]) -> set[str]:
    return {row["kernel"] for row in rows if "kernel" in row}


USUAL = (  # a bf16 model's: one of every kernel
    "bfloat16, H 128",
    "bfloat16, V 4096, H 128, 128x256x32 w8 s3, stores",
    "marked",
    "V 4097 in 4160, stores",
    "V 4097 in 4160, to bfloat16",
    "bfloat16, V 4097 in 4160, entropy bonus",
    "exponentials, tiles of 256",
    "V 4097 in 4160, beta 0.5",
    "V 4097 in 4160, beta 0.5, to bfloat16",
    "ratio, mis, k3, truncate, optional inputs given",
    "bfloat16, 5 x 4160",
    "bfloat16, H 4096",
)


def test_a_usual_call_takes_what_the_table_says(tmp_path: Path) -> None:
    """On an A100: every kernel, and launches, waits and scratch of operations."""
    operations = ["logprobs", "loss and gradients, chunks"]
    rows = compiled(tmp_path, "--arch", "80", "--only", *USUAL, *operations)
    assert kernels(rows) == KERNELS
    assert [row["operation"] for row in rows if "operation" in row] == operations


def test_what_older_tritons_refuse_is_not_in_the_kernels(tmp_path: Path) -> None:
    """3.6.0 knows the least. These are the kernels that share functions or have a loop of unknown length."""
    rows = compiled(tmp_path, "--arch", "80", "--only", *USUAL[1:9], USUAL[-1], triton=min(tritons.PINNED))
    assert {row["kernel"] for row in rows} >= KERNELS - {"_target_kernel", "_token_loss_kernel", "_scale_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("triton", tritons.PINNED)
@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles_by_the_tritons_of_every_torch(arch: int, triton: str, tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--arch", str(arch), triton=triton)
    assert kernels(rows) == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("arches", [("80", "90"), ("100",), ("120",)], ids="-".join)
def test_every_kernel_compiles_within_the_limits_of_the_gpu(arches: tuple[str, ...], tmp_path: Path) -> None:
    """For sm_80 and sm_90 every number of the table is exact."""
    rows = compiled(tmp_path, "--arch", *arches)
    assert kernels(rows) == KERNELS
    rows = [row for row in rows if "kernel" in row]
    writing = ("_gradient_kernel", "_difference_kernel", "_close_kernel", "_scale_kernel")
    writes = [row for row in rows if row["kernel"] in writing or "stores" in row["variant"]]
    assert all(row["stores16"] > 0 for row in writes if row["aligned"])
    # The instruments see a difference: between rows that are aligned and not, and between precisions.
    assert any(row["loads16"] == 0 for row in rows if not row["aligned"])
    tiles = [row for row in rows if row["kernel"] == "_tile_kernel"]
    assert {row["tensor_cores"] > 0 for row in tiles} == {True, False}


LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
.L_x_2:
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_3:
        /*0060*/                   BRA `(.L_x_3) ;
"""
OUTER = """
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0001*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR20], R24 ;
.L_x_4:
        /*0002*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11], R6 ;
        /*0003*/              @!P0 BRA `(.L_x_4) ;
{loop}
.L_x_5:
        /*0050*/                   FADD R1, R1, R1 ;
        /*0051*/               @P2 BRA `(.L_x_5) ;
        /*0052*/               @P3 BRA `(.L_x_0) ;
        /*0053*/                   EXIT ;
"""


def test_instructions_are_counted_along_the_longest_way() -> None:
    assert counts(parse(LOOP)) == ([4], 2, 6)
    assert counts(parse(LOOP.replace("@!P0 BRA", "BRA"))) == ([3], 2, 5)
    straight = LOOP.replace("@P1 BRA `(.L_x_1)", "MUFU.EX2 R1, R1")
    assert counts(parse(straight)) == ([], 6, 6)
    assert counts(parse(straight.replace("@!P0 BRA", "BRA"))) == ([], 5, 5)
    assert counts(parse(straight.replace("@!P0 BRA", "BRA.U !UP0,"))) == ([], 6, 6)
    assert counts(parse(straight.replace("LDG.E.128 R4, desc[UR4][R2.64]", "EXIT"))) == ([], 2, 2)
    assert [instruction.name for instruction in parse(straight)][4] == "MUFU"


def test_a_call_that_does_not_return_is_a_branch() -> None:
    far = LOOP.replace("@P1 BRA `(.L_x_1)", "@P1 CALL.REL.NOINC `(.L_x_1)")
    assert counts(parse(far)) == ([4], 2, 6)
    real = LOOP.replace("@P1 BRA `(.L_x_1)", "CALL.REL.NOINC `(.L_x_3)").replace(
        "BRA `(.L_x_3)", "RET.REL.NODEC R2 `(k)"
    )
    assert counts(parse(real)) == ([], 6, 6)


def test_innermost_loops_are_found_and_waiting_is_none() -> None:
    """A loop of instructions in an outer one, and before it a wait for a copy."""
    inner = LOOP[: LOOP.index("        /*0050*/")]
    nested = parse(OUTER.format(loop=inner))
    assert counts(nested) == ([4, 2], 7, 13)
    assert counts(nested, bytes_of) == ([16, 0], 0, 16)
    assert counts(nested, flop_of) == ([128, 0], 4096, 4224)  # 2 * 16 * 8 * 16 of 32 threads, 2 * 64 * 256 * 16 of 128
    with pytest.raises(ValueError, match="want loops with one entry"):
        counts(parse(OUTER.format(loop=inner.replace("MOV R1, c[0x0][0x28]", "@P4 BRA `(.L_x_2)"))))


END = """
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/               @P1 BRA `(.L_x_1) ;
        /*0020*/                   ISETP.NE.AND P0, PT, R1, R2, PT ;
        /*0030*/                   FSEL R1, R1, R2, P0 ;
        /*0040*/                   MUFU.EX2 R1, R1 ;
        /*0050*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0060*/                   MUFU.EX2 R1, R1 ;
        /*0070*/                   NOP ;
.L_x_2:
        /*0080*/              @!P0 EXIT ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00a0*/                   EXIT ;
"""


def test_the_end_of_a_gemm_is_counted_along_the_shortest_way_that_does_all_its_work() -> None:
    assert after_mma(parse(END)) == 6
    assert after_mma(parse(END.replace("NOP", "NOP ;\n /*0071*/ NOP ;\n /*0072*/ NOP ;\n /*0073*/ NOP"))) == 8
    assert after_mma(parse(END.replace("@P1 BRA `(.L_x_1)", "NOP"))) == 8
    assert after_mma(parse(END.replace("HMMA.16816.F32.BF16", "FFMA"))) is None
