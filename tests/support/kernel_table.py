"""Compile every Triton kernel as it is launched, for GPUs that need not be present, and print what it takes; then
count what operations take on a simulated device.

    python tests/support/kernel_table.py [--arch 80 90 100 120] [--only TEXT...] [--write REASON] [--json PATH]

The launches come from the public functions: they run with the compiler in the place of the launcher, on a driver
that only names a target. Exit status 1 if a kernel exceeds the shared memory of a block, loads aligned rows in pieces
of less than 16 bytes, multiplies half precision without the tensor cores, or if anything is not as the table of budgets
says (budgets.py). TRITON_INTERPRET must not be set.
"""

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import budgets
import torch
import triton
from budgets import Row
from kernel_estimate import Work, estimate, work_of
from operation_counts import operation_rows
from ptx.launcher import NoDevice
from rich.console import Console
from rich.table import Table
from sass import parse
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rlplus.kernels import active_rows, exponentials, linear_logprob, policy_loss, scale
from rlplus.kernels.tiling import DEFAULT, FP32_TILE, GRADIENT, STATISTICS, TILES, Tiling
from rlplus.loss.objective import KL_ESTIMATORS
from rlplus.loss.surrogates import EXTERNAL, INTERNAL

KB = 1024
SHARED_LIMIT = {80: 163 * KB, 90: 227 * KB, 100: 227 * KB, 120: 99 * KB}  # bytes a block may have
KERNEL_COLUMNS = (
    "arch", "kernel", "variant", "registers", "shared", "spills", "loads16", "stores16", "tensor_cores", "loops",
    "once", "issue", "memory", "mma", "estimate", "faults",
)  # fmt: skip
OPERATION_COLUMNS = ("arch", "operation", "launches", "operations", "waits", "scratch")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Launch = tuple[str, bool, Callable[[], Any]]  # name, whether its rows are aligned, and the launch


class Compiled(NamedTuple):
    """A kernel that was compiled in the place of its launch; its sizes of blocks by name."""

    name: str
    blocks: dict[str, int]
    warps: int
    kernel: Any


def row_launches() -> Iterator[Launch]:
    """Rows of 4097 logits in rows of 4160 columns, as in the backend; or without padding, for comparison."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for (V, W), dtype, with_bias in product(((4096, 4096), (4097, 4160), (4097, 4097)), dtypes, (False, True)):
        target = torch.zeros(2, dtype=torch.int64)
        bias = torch.empty(V, dtype=dtype) if with_bias else None
        rest = (torch.empty(2, 6), torch.empty(2, W), V, target, bias, 1.0)
        where = f"{name(dtype)}, V {V} in {W}{', bias' if with_bias else ''}"
        if with_bias or dtype == torch.float32:  # the statistics read fp32 alone without a bias
            n = DEFAULT.programs
            many = (torch.empty(n, 6), torch.empty(n, W), V, torch.zeros(n, dtype=torch.int64), bias, 1.0)
            yield where, W % 16 == 0, lambda many=many: linear_logprob.row_statistics(*many)
            if DEFAULT.statistics.BLOCK_V < V:
                yield f"{where}, parts of rows", W % 16 == 0, lambda rest=rest: linear_logprob.row_statistics(*rest)
            so_far = linear_logprob.begin_statistics(n, torch.device("cpu"))
            add = partial(linear_logprob.add_statistics, many[0], so_far, *many[1:])
            yield f"{where}, blocks of the vocabulary", W % 16 == 0, add
        out = torch.empty(2, W, dtype=dtype)
        yield where, W % 16 == 0, lambda out=out, rest=rest: linear_logprob.row_gradient(out, rest[3], *rest)
    out16 = torch.empty(2, 4160, dtype=torch.bfloat16)
    for softcap, own in ((30.0, None), (None, torch.ones(2)), (30.0, torch.ones(2))):
        rest = (torch.empty(2, 6), torch.empty(2, 4160), 4097, target, None, 1.0, softcap, own)
        where = f"V 4097 in 4160{transforms(softcap, own)}"
        yield f"float32, {where}", True, lambda rest=rest: linear_logprob.row_statistics(*rest)
        yield f"bfloat16, {where}", True, lambda rest=rest: linear_logprob.row_gradient(out16, target, *rest)
    one = (torch.empty(1, 6), torch.empty(1, 1), 1, torch.zeros(1, dtype=torch.int64), None, 1.0)  # 1 is compiled in
    yield "one row, V 1", False, lambda: linear_logprob.row_statistics(*one)
    yield "one row, V 1", False, lambda: linear_logprob.row_gradient(torch.empty(1, 1), one[3], *one)


def gemm_launches(arch: int) -> Iterator[Launch]:
    """Both shipped tiles; with bias, with logits to store. H = 72 leaves a tail and is not a multiple of 16."""
    half, fp32 = TILES[arch // 10], (FP32_TILE,) * 2
    sizes = ((4096, 128, True), (4096, 128, False), (4097, 72, False))
    cases = [(half, torch.bfloat16, size) for size in sizes]
    cases += [(half, torch.float16, sizes[0]), (fp32, torch.float32, sizes[0]), (fp32, torch.float32, sizes[2])]
    for (tiles, dtype, (V, H, with_bias)), stores in product(cases, (False, True)):
        tile, hidden, weight = (
            tiles[stores or with_bias],
            torch.empty(200, H, dtype=dtype),
            torch.empty(V, H, dtype=dtype),
        )
        logits, bias = torch.empty(200, -(-V // 64) * 64), torch.empty(V, dtype=dtype)
        size = f"{tile.BLOCK_M}x{tile.BLOCK_V}x{tile.BLOCK_H} w{tile.num_warps} s{tile.num_stages}"
        where = f"{name(dtype)}, V {V}, H {H}, {size}{', TMA' * tile.tma}{', stores' * stores}{', bias' * with_bias}"
        rest = (hidden, weight, torch.zeros(200, dtype=torch.int64), bias if with_bias else None, 1.0)
        outputs = (torch.empty(200, 6), logits if stores else None)
        yield where, H % 16 == 0, partial(linear_logprob.linear_statistics, *outputs, *rest, tile=tile)
    half_inputs = (torch.empty(200, 128, dtype=torch.bfloat16), torch.empty(4096, 128, dtype=torch.bfloat16))
    for softcap, own in ((30.0, None), (None, torch.ones(200)), (30.0, torch.ones(200))):
        rest = (*half_inputs, torch.zeros(200, dtype=torch.int64), None, 1.0, softcap, own, half[0])
        start = partial(linear_logprob.linear_statistics, torch.empty(200, 6), None, *rest)
        yield f"bfloat16{transforms(softcap, own)}", True, start


def candidate_launches(arch: int) -> Iterator[Launch]:
    """The other candidates of `rlplus-bench tune`."""
    target, V, W = torch.zeros(2, dtype=torch.int64), 40_001, 40_064
    rest = (torch.empty(2, 6), torch.empty(2, W), V, target, None, 1.0)
    for block in STATISTICS[1:]:
        where = f"float32, V {V} in {W}, {block.BLOCK_V} w{block.num_warps}"
        yield where, True, partial(linear_logprob.row_statistics, *rest, tiling=Tiling(statistics=block))
    out = torch.empty(2, W, dtype=torch.bfloat16)
    for block in GRADIENT[1:]:
        where = f"bfloat16, V {V} in {W}, {block.BLOCK_V} w{block.num_warps}"
        yield where, True, partial(linear_logprob.row_gradient, out, target, *rest, block=block)
    hidden, weight = (torch.empty(n, 128, dtype=torch.bfloat16) for n in (200, 4096))
    for tile, stores in product(TILES[arch // 10][2:], (False, True)):
        outputs = (torch.empty(200, 6), torch.empty(200, 4096) if stores else None)
        rest = (hidden, weight, torch.zeros(200, dtype=torch.int64), None, 1.0)
        where = f"bfloat16, {tile.BLOCK_M}x{tile.BLOCK_V}x{tile.BLOCK_H} w{tile.num_warps} s{tile.num_stages}"
        start = partial(linear_logprob.linear_statistics, *outputs, *rest, tile=tile)
        yield f"{where}, to try{', stores' * stores}", True, start


def exponential_launches(arch: int) -> Iterator[Launch]:
    """The tiles that `rlplus-bench tune` tries for exponentials; the gradient from them, with every block."""
    V, W = 4097, 4160
    hidden, weight = (torch.empty(n, 128, dtype=torch.bfloat16) for n in (200, V))
    values, target, stored = torch.empty(200, 6), torch.zeros(200, dtype=torch.int64), torch.empty(200, W).half()
    for tile in dict.fromkeys(TILES[arch // 10][1:]):
        rest = (hidden, weight, target, None, 1.0)
        where = f"bfloat16, {tile.BLOCK_M}x{tile.BLOCK_V}x{tile.BLOCK_H} w{tile.num_warps} s{tile.num_stages}"
        start = partial(linear_logprob.linear_statistics, values, stored, *rest, tile=tile)
        yield f"{where}, stores exponentials", True, start
    out = torch.empty(200, W, dtype=torch.bfloat16)
    for block, columns in product(GRADIENT, sorted({tile.BLOCK_V for tile in TILES[arch // 10]})):
        args = (stored, torch.empty(-(-V // columns), 200), columns, V, target, 1.0, block)
        where = f"bfloat16, exponentials of tiles of {columns}, {block.BLOCK_V} w{block.num_warps}"
        yield where, True, partial(exponentials.row_gradient, out, target, values, *args)


def token_launches() -> Iterator[Launch]:
    numbers = policy_loss.Coefficients(*(0.5 for _ in policy_loss.Coefficients._fields))
    names = [(internal, "mis", "k3", "truncate") for internal in INTERNAL]
    names += [("ratio", external, "k3", "truncate") for external in EXTERNAL if external != "mis"]
    names += [("ratio", "mis", kl, "truncate") for kl in KL_ESTIMATORS if kl != "k3"] + [("ratio", "mis", "k3", "mask")]
    for choices, all_given in product(names, (False, True)):
        given = policy_loss.Given(all_given, all_given, all_given)
        where = f"{', '.join(choices)}, optional inputs {'given' if all_given else 'absent'}"
        args = (torch.empty(200, 6), torch.empty(200, 8), numbers, given, policy_loss.Choices(*choices))
        yield where, False, lambda args=args: policy_loss.token_loss(*args)


def other_launches() -> Iterator[Launch]:
    for dtype, (n, m) in product((torch.bfloat16, torch.float16, torch.float32, torch.float64), ((5, 4160), (1, 7))):
        factor = torch.ones((), dtype=torch.promote_types(dtype, torch.float32))
        yield f"{name(dtype)}, {n} x {m}", m % 16 == 0, partial(scale.scale_, torch.empty(n, m, dtype=dtype), factor)
    slot, filled = torch.empty(300, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for factor, active in product((None, torch.ones(())), (None, torch.empty(300, dtype=torch.int32))):
        where = f"{'fp16, ' * (factor is not None)}{'every row' if active is not None else 'active rows'}"
        args = (slot, torch.empty(900, dtype=torch.int64), filled, torch.empty(300, 6), 0, factor, active)
        yield where, False, lambda args=args: active_rows.active_rows(*args)


def transforms(softcap: float | None, row_temperature: torch.Tensor | None) -> str:
    return ", softcap" * (softcap is not None) + ", temperatures" * (row_temperature is not None)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[list[Compiled]]:
    """Compile kernels in the place of their launch, and append them to the list."""
    launch, compiled = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bound = dict(zip(self.arg_names, args, strict=False)) | options
        blocks = {name: size for name, size in bound.items() if name.startswith("BLOCK")}
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.append(Compiled(self.__name__, blocks, options["num_warps"], kernel))

    driver.set_active(NoDevice(arch))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch


def compile_all(arch: int, only: list[str] | None) -> Iterator[Row]:
    """One row of the table for each launch, or each of these variants."""
    with compiling(arch) as compiled:
        launches = (row_launches(), gemm_launches(arch), candidate_launches(arch), exponential_launches(arch))
        for variant, aligned, start in chain(*launches, token_launches(), other_launches()):
            if only is None or variant in only:
                start()
            while compiled:
                kernel_name, blocks, warps, kernel = compiled.pop()
                row = {"arch": arch, "kernel": kernel_name, "variant": variant, "aligned": aligned}
                elements = math.prod(size for name, size in blocks.items() if name != "BLOCK_H") / (32 * warps)
                measured, work = resources(kernel, elements)
                yield row | measured | estimate(arch, kernel_name, aligned, work, blocks)


def resources(kernel: Any, elements: float) -> tuple[Row, Work]:
    """Registers per thread, shared memory in bytes, instructions that spill, widths of loads from global memory, and
    instructions per element of a block in each loop and outside; what the time is estimated from.

    elements: of a block, per thread.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    instructions = parse(sass)
    assert instructions, sass
    opcodes = [instruction.opcode for instruction in instructions]
    work = work_of(instructions, elements)
    loops = [round(x, 2) for x in work.instructions.loops]
    once = round(work.instructions.once, 2)
    row = {
        "registers": int(registers[1]),
        "shared": kernel.metadata.shared,
        "spills": sum(i.name in ("LDL", "STL") for i in instructions),
        # LDGSTS copies to shared memory past the registers; UTMALDG is a load by TMA, of a whole tile.
        "loads16": sum((o.startswith(("LDG", "LDGSTS")) and ".128" in o) or o.startswith("UTMALDG") for o in opcodes),
        "stores16": sum(o.startswith("STG") and ".128" in o for o in opcodes),
        "tensor_cores": sum(i.name in ("HMMA", "HGMMA", "UTCHMMA") for i in instructions),
        "loops": loops,
        "once": once,
        "instructions": max(loops, default=once),
    }
    return row, work


def faults(row: Row, table: budgets.Table) -> list[str]:
    most = budgets.limits(row, table)
    checks = (
        (row["shared"] <= SHARED_LIMIT[row["arch"]], f"{row['shared']} bytes of shared memory"),
        (row["loads16"] > 0 or not row["aligned"] or row["kernel"] == "_combine_kernel", "no loads of 16 bytes"),
        (row["tensor_cores"] > 0 or row["kernel"] != "_tile_kernel" or "float32" in row["variant"], "no tensor cores"),
        *((row[name] <= limit, f"{row[name]} {name}, at most {limit}") for name, limit in most.items()),
    )
    return [message for ok, message in checks if not ok]


def cell(row: Row, name: str, entry: Row | None) -> str:
    """A number, and the one that the table has if it is another."""
    now = row.get(name)
    text = "" if now is None else ", ".join(map(str, now)) if isinstance(now, list) else str(now)
    known = name in budgets.NUMBERS[budgets.place(row)[0]]
    return f"{text} (was {entry.get(name)})" if known and entry is not None and entry.get(name) != now else text


def show(title: str, columns: tuple[str, ...], rows: list[Row], table: budgets.Table) -> None:
    shown = Table(*columns, title=title)
    for row in rows:
        entry = budgets.committed(row, table) if budgets.exact(table, budgets.place(row)[0]) else None
        shown.add_row(*(cell(row, name, entry) for name in columns))
    Console(width=max(170, Console().width)).print(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel without a GPU and print what it takes.")
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED_LIMIT), choices=list(SHARED_LIMIT))
    parser.add_argument("--only", nargs="+", help="these variants of kernels and operations, as the table names them")
    parser.add_argument("--write", metavar="REASON", help=f"write the numbers to {budgets.PATH.name}, with the reason")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    table, whole = budgets.read(), options.only is None and {*options.arch} >= {*budgets.EXACT}
    if options.write is not None and not (whole and options.write.strip()):
        parser.error(f"--write: want a reason, every variant and the GPUs {budgets.EXACT}; got {sys.argv[1:]}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        rows = [row for arch in options.arch for row in compile_all(arch, options.only)]
        exact = [arch for arch in options.arch if arch in budgets.EXACT]
        counted = [row for arch in exact for row in operation_rows(arch, options.only)]
    for row in rows:
        row["faults"] = "; ".join(faults(row, table))
    title = f"Triton {triton.__version__}, torch {torch.__version__}"
    show(title, KERNEL_COLUMNS, rows, table)
    show(title, OPERATION_COLUMNS, counted, table)
    if options.json:
        options.json.write_text(json.dumps(rows + counted, indent=1))
    broken = [f"{budgets.place(row)[1]}, {row['variant']}: {row['faults']}" for row in rows if row["faults"]]
    found = budgets.differences(rows + counted, table, whole)
    print(*broken, *found, sep="\n")
    if options.write is not None:
        budgets.write(budgets.updated([row for row in rows + counted if row["arch"] in exact], table, options.write))
        found = []
    if found:
        print(f"{len(found)} differences from {budgets.PATH.name}; {budgets.COMMAND} writes it.")
    return int(bool(broken or found))


if __name__ == "__main__":
    sys.exit(main())
