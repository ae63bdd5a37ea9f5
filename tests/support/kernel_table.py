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
from draw_launches import draw_launches
from kernel_estimate import Work, estimate, work_of
from operation_counts import operation_rows
from ptxcheck.launcher import NoDevice
from rich.console import Console
from rich.table import Table
from sass import MMA, after_mma, parse
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rlplus.kernels import divergence_rows, exponentials, linear_logprob, own_tokens, policy_loss, scale
from rlplus.kernels.row_values import WIDTH
from rlplus.kernels.tiling import FP32_TILE, TILES, Tile
from rlplus.loss.objective.objective import KL_ESTIMATORS
from rlplus.loss.objective.surrogates import EXTERNAL, INTERNAL

KB = 1024
SHARED_LIMIT = {80: 163 * KB, 90: 227 * KB, 100: 227 * KB, 120: 99 * KB}  # bytes a block may have
KERNEL_COLUMNS = (
    "arch", "kernel", "variant", "registers", "shared", "spills", "loads16", "stores16", "tensor_cores", "loops",
    "once", "end", "issue", "memory", "mma", "estimate", "faults",
)  # fmt: skip
OPERATION_COLUMNS = ("arch", "operation", "launches", "operations", "waits", "scratch")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Launch = tuple[str, bool, Callable[[], Any]]  # name, whether it moves rows that are aligned, and the launch
Transform = tuple[bool, float | None, torch.Tensor | None]  # whether a bias, softcap, temperatures of rows
NONE: Transform = (False, None, None)
TRANSFORMED: tuple[Transform, ...] = (
    (True, None, None), (False, 30.0, None), (False, None, torch.ones(200)), (True, 30.0, torch.ones(200)),
)  # fmt: skip


class Compiled(NamedTuple):
    """A kernel that was compiled in the place of its launch; its sizes of blocks by name."""

    name: str
    blocks: dict[str, int]
    warps: int
    kernel: Any


def row_launches() -> Iterator[Launch]:
    """Rows of 4097 logits in rows of 4160 columns, as in the backend; or without padding, for comparison."""
    sizes = ((4096, 4096), (4097, 4160), (4097, 4097))
    cases = [*product(sizes, (None, DTYPES[0])), *((sizes[1], dtype) for dtype in DTYPES[1:])]
    for (V, W), bias in cases:
        rest = (V, torch.zeros(2, dtype=torch.int64), None if bias is None else torch.empty(V, dtype=bias), 1.0)
        where, aligned = f"V {V} in {W}{'' if bias is None else f', bias {name(bias)}'}", W % 16 == 0
        yield from exponential_launches(where, W, rest, aligned)
        if bias is None:
            yield (
                f"{where}, parts",
                aligned,
                partial(exponentials.row_exponentials, sums(2, 3), None, *rows(2, W), *rest),
            )
        carried = partial(exponentials.row_exponentials, sums(2), None, *rows(2, W), *rest, carry=True)
        yield f"{where}, carried", aligned, carried
        for dtype in DTYPES if bias is None else (bias,):
            yield f"{where}, to {name(dtype)}", aligned, gradient(dtype, W, *rest)
    for softcap, own in ((30.0, None), (None, torch.ones(2)), (30.0, torch.ones(2))):
        rest = (4097, torch.zeros(2, dtype=torch.int64), None, 1.0, softcap, own)
        where = f"V 4097 in 4160{transforms(softcap, own)}"
        yield from exponential_launches(where, 4160, rest, True)
        yield f"{where}, to bfloat16", True, gradient(torch.bfloat16, 4160, *rest)
    one = (1, torch.zeros(1, dtype=torch.int64), None, 1.0)  # 1 is compiled in
    yield "one row, V 1", False, partial(exponentials.row_exponentials, sums(1), None, *rows(1, 1), *one)
    yield "one row, V 1", False, partial(exponentials.row_gradient, torch.empty(1, 1), *rows(1, 1), *one)


def exponential_launches(where: str, W: int, rest: tuple[Any, ...], aligned: bool) -> Iterator[Launch]:
    """Without exponentials, and with them stored."""
    for stored in (None, torch.empty(2, W, dtype=torch.bfloat16)):
        start = partial(exponentials.row_exponentials, sums(2), stored, *rows(2, W), *rest)
        yield f"{where}{', stores' * (stored is not None)}", aligned, start


def rows(n: int, W: int) -> tuple[torch.Tensor, torch.Tensor]:
    """values and logits."""
    return torch.empty(n, WIDTH.value), torch.empty(n, W)


def sums(n: int, parts: int = 1) -> torch.Tensor:
    return torch.empty(parts, linear_logprob.PARTIALS.value, n)


def gradient(dtype: torch.dtype, W: int, *rest: Any) -> Callable[[], None]:
    return partial(exponentials.row_gradient, torch.empty(2, W, dtype=dtype), *rows(2, W), *rest)


def close_launches() -> Iterator[Launch]:
    """Only an entropy bonus moves rows."""
    cases = (
        (DTYPES[0], 4160, None),
        (DTYPES[0], 4160, torch.ones(2)),
        (DTYPES[0], 4097, None),
        (DTYPES[2], 4160, None),
    )
    for dtype, W, own in cases:
        V = 4097
        stored, target = torch.empty(2, W, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        for bonus in (False, True):
            where = f"{name(dtype)}, V {V} in {W}{transforms(None, own)}{', entropy bonus' * bonus}"
            args = (*torch.empty(2, 2), torch.empty(2, WIDTH.value), stored, V, target, 1.0, own, bonus)
            yield where, bonus and W % 16 == 0, partial(exponentials.close_rows, *args)


def target_launches() -> Iterator[Launch]:
    cases = [*((dtype, 128, True) for dtype in DTYPES), (DTYPES[0], 72, True), (DTYPES[0], 128, False)]
    for dtype, H, contiguous in cases:
        hidden, weight = torch.empty(200, H, dtype=dtype), torch.empty(4097, H, dtype=dtype)
        if not contiguous:
            weight = weight.t().contiguous().t()
        rest = (hidden, weight, torch.zeros(200, dtype=torch.int64))
        where = f"{name(dtype)}, H {H}{'' if contiguous else ', weight (H, V)'}"
        start = partial(linear_logprob.target_logits, torch.empty(200, WIDTH.value), *rest)
        yield where, contiguous and H % 16 == 0, partial(start, None, 1.0)
        if contiguous and H == 128 and dtype == DTYPES[0]:
            for bias, softcap, own in TRANSFORMED:
                args = (torch.empty(4097, dtype=dtype) if bias else None, 1.0, softcap, own)
                yield f"{where}{transforms(softcap, own, bias)}", True, partial(start, *args)


def gemm_launches(arch: int) -> Iterator[Launch]:
    """The tiles, also the one for fp32; exponentials stored or not, all rows or listed ones. H = 72 leaves a tail
    and is not a multiple of 16."""
    (plain, transformed), bf16, usual = TILES[arch // 10], torch.bfloat16, (4096, 128)
    for stores, which in product((False, True), (False, True)):
        yield tile_launch(plain, bf16, usual, stores, which)
        yield tile_launch(plain, bf16, (4097, 72), stores, which)
        yield tile_launch(FP32_TILE, torch.float32, usual, stores, which)
    for stores, transform in product((False, True), TRANSFORMED):
        yield tile_launch(transformed, bf16, usual, stores, False, transform)
    for stores in (False, True):
        yield tile_launch(transformed, bf16, usual, stores, False)
    for dtype, tile in ((torch.float16, transformed), (torch.float32, FP32_TILE)):
        yield tile_launch(tile, dtype, (4097, 72), False, False, TRANSFORMED[0])
    yield tile_launch(transformed, bf16, usual, True, True, TRANSFORMED[-1])


def tile_launch(
    tile: Tile, dtype: torch.dtype, size: tuple[int, int], stores: bool, which: bool, transform: Transform = NONE
) -> Launch:
    (V, H), (bias, softcap, own) = size, transform
    hidden, weight = torch.empty(200, H, dtype=dtype), torch.empty(V, H, dtype=dtype)
    stored = torch.empty(200, -(-V // 64) * 64, dtype=dtype) if stores else None
    listed = (torch.empty(200, dtype=torch.int64), torch.zeros((), dtype=torch.int64)) if which else None
    shape = f"{tile.BLOCK_M}x{tile.BLOCK_V}x{tile.BLOCK_H} w{tile.num_warps} s{tile.num_stages}{', TMA' * tile.tma}"
    where = f"{name(dtype)}, V {V}, H {H}, {shape}{transforms(softcap, own, bias)}"
    rest = (torch.empty(V, dtype=dtype) if bias else None, 1.0, softcap, own, tile, listed)
    args = (sums(200, -(-V // tile.BLOCK_V)), stored, torch.empty(200, WIDTH.value), hidden, weight)
    start = partial(linear_logprob.linear_exponentials, *args, torch.zeros(200, dtype=torch.int64), *rest)
    return f"{where}{', listed' * which}{', stores' * stores}", H % 16 == 0, start


def token_launches() -> Iterator[Launch]:
    numbers = policy_loss.Coefficients(*(0.5 for _ in policy_loss.Coefficients._fields))
    names = [(internal, "mis", "k3", "truncate") for internal in INTERNAL]
    names += [("ratio", external, "k3", "truncate") for external in EXTERNAL if external != "mis"]
    names += [("ratio", "mis", kl, "truncate") for kl in KL_ESTIMATORS if kl != "k3"] + [("ratio", "mis", "k3", "mask")]
    for choices, all_given in product(names, (False, True)):
        given = policy_loss.Given(all_given, all_given, all_given)
        where = f"{', '.join(choices)}, optional inputs {'given' if all_given else 'absent'}"
        args = (torch.empty(200, WIDTH.value), torch.empty(200, 8), numbers, given, policy_loss.Choices(*choices))
        yield where, False, lambda args=args: policy_loss.token_loss(*args)


def other_launches() -> Iterator[Launch]:
    for dtype, (n, m) in product((torch.bfloat16, torch.float16, torch.float32, torch.float64), ((5, 4160), (1, 7))):
        factor = torch.ones((), dtype=torch.promote_types(dtype, torch.float32))
        yield f"{name(dtype)}, {n} x {m}", m % 16 == 0, partial(scale.scale_, torch.empty(n, m, dtype=dtype), factor)
    marked, target = torch.empty(200, dtype=torch.int32), torch.zeros(200, dtype=torch.int64)
    for given, again in ((None, False), (marked, False), (marked, True)):
        where = "all rows" if given is None else "marked, again" if again else "marked"
        args = (torch.empty(200, WIDTH.value), sums(200, 16), 4096, target, given, again)
        yield where, False, partial(linear_logprob.finish_rows, *args)


def own_launches() -> Iterator[Launch]:
    """Rows of whole blocks and of others; the gradient of the weight in the dtype of the inputs, or fp32."""
    for dtype, H in product((torch.bfloat16, torch.float32), (4096, 1001)):
        one, target = torch.empty(200), torch.zeros(200, dtype=torch.int64)
        hidden, weight, where = (
            torch.empty(200, H, dtype=dtype),
            torch.empty(4097, H, dtype=dtype),
            f"{name(dtype)}, H {H}",
        )
        yield where, H % 16 == 0, partial(own_tokens.finish_hidden, torch.empty(200, H), one, one, weight, target)
        totals = (weight, weight.float()) if dtype == torch.bfloat16 else (weight,)
        for total in totals:
            to = f", to {name(total.dtype)}" * (total.dtype != dtype)
            yield where + to, H % 16 == 0, partial(own_tokens.add_to_weight, total, one, hidden, target)


def divergence_launches() -> Iterator[Launch]:
    """Rows of 4097 logits in rows of 4160 columns: each kind, and the options of both heads."""
    n, V, W = 2, 4097, 4160
    plain, bias = divergence_rows.Transform(), torch.empty(V, dtype=torch.bfloat16)
    every = divergence_rows.Transform(bias, 1.0, 30.0, torch.ones(n))
    cases = [(beta, plain, plain, "", torch.bfloat16) for beta in (0.0, 0.5, 1.0)]
    cases += [(0.5, plain, plain, "", torch.float32), (0.5, every, every, ", every option", torch.bfloat16)]
    for beta, student, teacher, options, dtype in cases:
        where = f"V {V} in {W}, beta {beta}{options}"
        rest = (torch.empty(n, W), torch.empty(n, W), V, student, teacher, beta)
        values = torch.empty(n, divergence_rows.WIDTH.value)
        if dtype == torch.bfloat16:
            yield where, True, partial(divergence_rows.row_divergences, values, *rest)
        out = torch.empty(n, W, dtype=dtype)
        yield f"{where}, to {name(dtype)}", True, partial(divergence_rows.row_gradients, out, values, *rest)


def transforms(softcap: float | None, row_temperature: torch.Tensor | None, bias: bool = False) -> str:
    given = {"bias": bias, "softcap": softcap is not None, "temperatures": row_temperature is not None}
    return "".join(f", {name}" for name, there in given.items() if there)


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
        launches = (row_launches(), close_launches(), target_launches(), gemm_launches(arch))
        for variant, aligned, start in chain(
            *launches, draw_launches(), divergence_launches(), token_launches(), other_launches(), own_launches()
        ):
            if only is None or variant in only:
                start()
            while compiled:
                kernel_name, blocks, warps, kernel = compiled.pop()
                row = {"arch": arch, "kernel": kernel_name, "variant": variant, "aligned": aligned}
                sizes = [size for name, size in blocks.items() if name != "BLOCK_H"] or [*blocks.values()]
                measured, work = resources(kernel, math.prod(sizes) / (32 * warps))
                yield row | measured | estimate(arch, kernel_name, aligned, work, blocks, measured["end"])


def resources(kernel: Any, elements: float) -> tuple[Row, Work]:
    """Registers per thread, shared memory in bytes, instructions that spill, widths of loads from global memory, and
    instructions per element of a block in each loop, outside, and after a GEMM; what the time is estimated from.

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
    once, end = round(work.instructions.once, 2), after_mma(instructions)
    row = {
        "registers": int(registers[1]),
        "shared": kernel.metadata.shared,
        "spills": sum(i.name in ("LDL", "STL") for i in instructions),
        # LDGSTS copies to shared memory past the registers; UTMALDG is a load by TMA, of a whole tile.
        "loads16": sum((o.startswith(("LDG", "LDGSTS")) and ".128" in o) or o.startswith("UTMALDG") for o in opcodes),
        "stores16": sum(o.startswith("STG") and ".128" in o for o in opcodes),
        "tensor_cores": sum(i.name in MMA for i in instructions),
        "loops": loops,
        "once": once,
        "end": None if end is None else round(end / elements, 2),
        "instructions": max(loops, default=once),
    }
    return row, work


def faults(row: Row, table: budgets.Table) -> list[str]:
    most = budgets.limits(row, table)
    checks = (
        (row["shared"] <= SHARED_LIMIT[row["arch"]], f"{row['shared']} bytes of shared memory"),
        (row["loads16"] > 0 or not row["aligned"] or row["kernel"] == "_finish_kernel", "no loads of 16 bytes"),
        (row["tensor_cores"] > 0 or row["kernel"] != "_tile_kernel" or "float32" in row["variant"], "no tensor cores"),
        *(((row[name] or 0) <= limit, f"{row[name]} {name}, at most {limit}") for name, limit in most.items()),
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
