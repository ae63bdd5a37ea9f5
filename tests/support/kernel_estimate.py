"""The time that a kernel's machine code suggests, without a GPU: the longest of issue slots, memory and tensor cores.

A processor issues four instructions of a warp per cycle. Memory and tensor cores have the speeds of the cost model
(rlplus/loss/head/cost.py), and the time is at the shape of `python -m bench --model`. What it leaves out: latency that
nothing hides, the start and end of a grid, conflicts, and caches: a row is read from memory, a tile of a GEMM from the
cache. Decision 069 has its errors where a time is published.
"""

from typing import Any, NamedTuple

from sass import Counts, Instruction, bytes_of, counts, flop_of

from bench.model import MACHINES, SHAPE
from rlplus.loss.head.cost import Machine

# The published peaks of dense bf16, 312 and 989.4 TFLOP/s, over 2048 and 4096 FLOP per cycle and processor.
CLOCK = {"A100": 312e12 / (108 * 2048), "H200": 989.4e12 / (132 * 4096)}
GPUS = {80: "A100", 90: "H200"}
ROWS = ("_row_kernel", "_gradient_kernel", "_close_kernel")
LANES = 4 * 32  # instructions of threads per cycle and processor


class Work(NamedTuple):
    """Per element of a block: instructions, bytes to and from global memory, operations of the tensor cores."""

    instructions: Counts
    bytes: Counts
    flop: Counts


class Seconds(NamedTuple):
    """Per element: issue slots, memory, tensor cores."""

    issue: float
    memory: float
    mma: float


def work_of(instructions: list[Instruction], elements: float) -> Work:
    """elements: of a block, per thread."""
    each = (counts(instructions), counts(instructions, bytes_of), counts(instructions, flop_of))
    return Work(*(Counts([x / elements for x in loops], *(x / elements for x in way)) for loops, *way in each))


def seconds_of(work: Work, machine: Machine, clock: float) -> tuple[Seconds, Seconds]:
    """Per iteration of the innermost loops on the longest way, and outside of them."""
    speeds = (machine.processors * LANES * clock, machine.bandwidth, machine.half)
    loops = Seconds(*((amount.both - amount.once) / speed for amount, speed in zip(work, speeds, strict=True)))
    return loops, Seconds(*(amount.once / speed for amount, speed in zip(work, speeds, strict=True)))


def row_seconds(work: Work, machine: Machine, clock: float, block: int, V: int) -> Seconds:
    """Per logit of a kernel of rows. A program has a row, or without loops a block."""
    loops, once = seconds_of(work, machine, clock)
    share = block / V if work.instructions.loops else 1.0
    return Seconds(*(x + share * y for x, y in zip(loops, once, strict=True)))


def tile_seconds(work: Work, machine: Machine, clock: float, columns: int, H: int) -> tuple[Seconds, Seconds]:
    """Per logit of a tile: all steps over its hidden columns, and its end, which overlaps with nothing."""
    loops, once = seconds_of(work, machine, clock)
    return Seconds(*(x * H / columns for x in loops)), once


def estimate(
    arch: int, kernel: str, aligned: bool, work: Work, blocks: dict[str, int], end_of_tile: float | None
) -> dict[str, Any]:
    """Milliseconds at the shape. Nothing for GPUs that the cost model does not know, kernels without logits,
    and rows that are not aligned, whose bytes the machine code does not tell. Rows are not read again, and
    tiles hold none of their targets, but few."""
    if arch not in GPUS or kernel not in (*ROWS, "_tile_kernel") or not aligned:
        return {}
    machine, clock = MACHINES[GPUS[arch]], CLOCK[GPUS[arch]]
    if kernel == "_row_kernel":  # the loops after the first read a row again
        work = Work(*(Counts(x.loops[:1], x.once, x.once + sum(x.loops[:1])) for x in work))
    if kernel in ROWS:
        parts = row_seconds(work, machine, clock, blocks["BLOCK_V"], SHAPE.V)
        total = max(parts)
    else:
        if end_of_tile is not None:
            once, both = work.instructions.once, work.instructions.both
            work = work._replace(
                instructions=work.instructions._replace(once=end_of_tile, both=both - once + end_of_tile)
            )
        steps, end = tile_seconds(work, machine, clock, blocks["BLOCK_H"], SHAPE.H)
        parts = Seconds(*(x + y for x, y in zip(steps, end, strict=True)))
        total = max(steps) + max(end)
    logits = 1e3 * SHAPE.N * SHAPE.V
    return {name: round(x * logits, 2) for name, x in (*parts._asdict().items(), ("estimate", total))}
