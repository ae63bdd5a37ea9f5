"""Loads and stores of global and shared memory, and of parameters.

Hints to the caches (.ca, .cg, .cs, .wb, .wt, .L1::evict_...) may follow the space and change nothing here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .checked_memory import UNSIGNED, Array
from .lanes import Mask, registers_in
from .opcodes import DTYPES
from .program import Operand, Statement, Unsupported

if TYPE_CHECKING:
    from .executor import Executor

Run = Callable[[Mask], None]
CACHES = ("ca", "cg", "cs", "wb", "wt", "L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::no_allocate")


def load(ex: "Executor", s: Statement) -> Run:
    space, *rest = s.opcode.split(".")[1:]
    if space == "param":
        return _parameter(ex, s, rest)
    registers, dtype, width = _shape(s.operands[0], rest)
    wides = [UNSIGNED[ex.program.width(register)] for register in registers]
    if any(np.dtype(w).itemsize != np.dtype(dtype).itemsize for w in wides) and (
        rest[-1][0] not in "bu" or any(np.dtype(w).itemsize < np.dtype(dtype).itemsize for w in wides)
    ):
        raise Unsupported("registers of another width than the type")
    place = _place(ex, space, s.operands[1], width, "load")

    def run(m: Mask) -> None:
        memory, lanes, at = place(m)
        if memory is ex.shared.memory:
            ex.shared.require_delivered(at, width, lanes, "load")
        words = memory.load(at, width, ex.thread[lanes], ex.epoch, ex.program.threads)
        parts = np.ascontiguousarray(words).reshape(len(lanes), -1).view(dtype)
        for i, (register, wide) in enumerate(zip(registers, wides, strict=True)):
            if len(lanes) == ex.size:
                ex.write(register, np.ascontiguousarray(parts[:, i]).astype(wide, copy=False), m)
            else:
                full = np.zeros(ex.size, wide)
                full[lanes] = parts[:, i]
                ex.write(register, full, m)

    return run


def store(ex: "Executor", s: Statement) -> Run:
    space, *rest = s.opcode.split(".")[1:]
    registers, dtype, width = _shape(s.operands[1], rest)
    place = _place(ex, space, s.operands[0], width, "store")
    # A register may be wider than the type, as for loads: there is none of 8 bits.
    gets = [ex.source(register, dtype, exact_width=rest[-1][0] not in "bus") for register in registers]
    names = registers_in(*registers)

    def run(m: Mask) -> None:
        ex.require(names, m)
        memory, lanes, at = place(m)
        parts = np.stack([ex.everywhere(get(m))[lanes] for get in gets], 1)
        words = parts.view(np.uint64) if width == 16 else parts.view(UNSIGNED[8 * width])[:, 0]
        if memory is ex.shared.memory:
            ex.shared.overwritten(at, lanes, "store")
        memory.store(at, width, words, ex.thread[lanes], ex.epoch, ex.program.threads)

    return run


def _shape(data: Operand, rest: list[str]) -> tuple[tuple[str, ...], type, int]:
    """Registers, the type of each, and bytes in all."""
    registers = data if isinstance(data, tuple) else (data,)
    vector, kind = [mod for mod in rest[:-1] if mod not in CACHES], rest[-1]
    if vector != ([f"v{len(registers)}"] if len(registers) > 1 else []):
        raise Unsupported(f"modifiers {vector} for {len(registers)} registers")
    bits = 8 * np.dtype(DTYPES[kind]).itemsize
    if len(registers) * bits > 128:
        raise Unsupported(f"{len(registers) * bits // 8} bytes")
    return registers, UNSIGNED[bits], len(registers) * bits // 8


def _place(ex: "Executor", space: str, where: Operand, width: int, what: str) -> Callable[[Mask], tuple]:
    """The memory, the lanes, and their addresses there; outside shared memory is reported and left out."""
    if space not in ("global", "shared", "shared::cta"):
        raise Unsupported(f"memory .{space}")
    pointer = ex.pointer(where, np.uint64 if space == "global" else np.uint32)

    def place(m: Mask) -> tuple:
        lanes = ex.lanes_of(m)
        at = pointer(m)[lanes]
        if space == "global":
            return ex.memory, lanes, at
        return ex.shared.memory, *in_window(ex, lanes, at, width, what)

    return place


def in_window(ex: "Executor", lanes: Array, at: Array, width: int, what: str) -> tuple[Array, Array]:
    """Lanes and their places in the shared memory of all blocks."""
    bad = (at < 0) | (at + width > ex.shared.size)
    if bad.any():
        ex.find(f"out of bounds: {what} of shared memory")
        lanes, at = lanes[~bad], at[~bad]
    return lanes, at + ex.shared.window[lanes]


def _parameter(ex: "Executor", s: Statement, rest: list[str]) -> Run:
    to, (name, offset) = str(s.operands[0]), ex.address(s.operands[1])
    kind = next(kind for parameter, kind in ex.program.parameters if parameter == name)
    dtype, wide = DTYPES[rest[-1]], UNSIGNED[ex.program.width(to)]
    if offset or len(rest) != 1 or np.dtype(dtype).itemsize != np.dtype(DTYPES[kind]).itemsize:
        raise Unsupported("a part of a parameter, or of another type")

    def run(m: Mask) -> None:
        value = ex.parameters[name].view(dtype)
        same = value.itemsize == np.dtype(wide).itemsize
        ex.write(to, value.view(wide) if same else value.astype(wide), m)

    return run


HANDLERS = {"ld": load, "st": store}
