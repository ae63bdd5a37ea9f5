"""A second evaluator: one thread after another, on Python's numbers, with the column `exact` of the table.

It shares the reading of the text and the table's names with the executor, and nothing of how it computes: no arrays,
no masks, no wrapping by types of numpy. It knows what random programs need: arithmetic, branches, and loads and stores
of single numbers of global memory.
"""

import ctypes
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from ptxcheck.opcodes import Opcode, lookup
from ptxcheck.program import Program, Statement, Unsupported

WORD = {16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}


def bits_of(kind: str) -> int:
    return {"pred": 1, "bf16": 16, "bf16x2": 32, "f16x2": 32, "f32x2": 64}.get(kind) or int(kind[1:])


def from_bits(bits: int, kind: str) -> Any:
    """bool, int, or np.float64."""
    n = bits_of(kind)
    bits &= (1 << n) - 1
    if kind == "pred":
        return bool(bits)
    if kind == "f32":
        return np.float64(np.array(bits, np.uint32).view(np.float32))
    if kind == "f64":
        return np.array(bits, np.uint64).view(np.float64)[()]
    return bits - (1 << n) if kind[0] == "s" and bits >> (n - 1) else bits


def to_bits(value: Any, kind: str, width: int) -> int:
    """The number wrapped or rounded to the type, extended to the register's width."""
    if kind == "pred":
        return int(bool(value))
    if kind in ("f32", "f64"):
        if value != value:
            return 0x7FFFFFFF if kind == "f32" else 0x7FF8000000000000
        if kind == "f64":
            return int(np.float64(value).view(np.uint64))
        return int(nearest32(value).view(np.uint32))
    n = bits_of(kind)
    value = int(value) & ((1 << n) - 1)
    if kind[0] == "s" and value >> (n - 1):
        value -= 1 << n
    return value & ((1 << width) - 1)


def nearest32(value: Any) -> np.float32:
    """fp32, rounded once, ties to even."""
    with np.errstate(all="ignore"):
        near = np.float32(float(value))
    if not isinstance(value, Fraction) or not np.isfinite(near):
        return near
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    finite = [x for x in candidates if np.isfinite(x)]
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


def flush(value: Any) -> Any:
    return math.copysign(0.0, value) * np.float64(1) if abs(value) < 2.0**-126 else value


def evaluate(row: Opcode, types: tuple[str, ...], options: set[str], operands: Sequence[int], width: int) -> int:
    """The bits of the result, from those of the operands; an immediate is itself."""
    if len(types) == 1 and types[0].endswith("x2"):
        one, n = (types[0].removesuffix("x2"),), bits_of(types[0]) // 2
        low, high = (evaluate(row, one, options, [o >> i & (1 << n) - 1 for o in operands], n) for i in (0, n))
        return high << n | low
    result, wanted = row.operands.split("=")
    kinds = {"t": types[0], "d": types[0], "s": types[-1], "p": "pred", "u": "u32"}
    kinds["w"] = f"{types[0][0]}{2 * bits_of(types[0])}"
    values = [o if k == "i" else from_bits(o, kinds[k]) for o, k in zip(operands, wanted, strict=True)]
    if row.name in ("mov", "selp"):  # also of NaN, bit by bit
        chosen = operands[0] if row.name == "mov" or operands[2] else operands[1]
        return chosen & ((1 << width) - 1)
    floating = types[0] == "f32" or (result == "p" and types[0] == "f32")
    if "ftz" in options:
        values = [flush(value) if isinstance(value, float) else value for value in values]
    with np.errstate(all="ignore"):
        out = row.exact(*values)
        if "ftz" in options and floating and result != "p":
            out = flush(np.float64(nearest32(out)))
    return to_bits(out, kinds[result], width)


class Thread:
    """Registers and place of one thread; `run` executes the program to its end."""

    def __init__(self, program: Program, arguments: Sequence[int], block: int, thread: int) -> None:
        self.program, self.registers = program, {"%tid.x": thread, "%ctaid.x": block}
        self.arguments = dict(zip((p.name for p in program.parameters), arguments, strict=True))

    def run(self) -> None:
        i = 0
        while i < len(self.program.statements):
            s = self.program.statements[i]
            i += 1
            if s.guard is not None and bool(self.registers[s.guard]) == s.negated:
                continue
            if s.kind == "ret":
                return
            if s.kind == "bra":
                i = self.program.starts[self.program.labels[str(s.operands[0])]]
            elif s.kind in ("ld", "st"):
                self._access(s)
            else:
                self._compute(s)

    def _operand(self, token: str) -> int:
        if token in self.registers:
            return self.registers[token]
        return int(token[2:], 16) if token[:2] in ("0f", "0F", "0d", "0D") else int(token, 0)

    def _compute(self, s: Statement) -> None:
        found = lookup(s.opcode)
        if found is None:
            raise Unsupported(str(s))
        to, *operands = map(str, s.operands)
        self.registers[to] = evaluate(*found, [self._operand(o) for o in operands], self.program.width(to))

    def _access(self, s: Statement) -> None:
        parts = s.opcode.split(".")
        place, data = (s.operands[1], s.operands[0]) if s.kind == "ld" else s.operands
        base, _, offset = str(place).strip("[] ").partition("+")
        if parts[1] == "param":
            self.registers[str(data)] = self.arguments[base.strip()]
            return
        word = WORD[bits_of(parts[-1])].from_address(self.registers[base.strip()] + int(offset or "0", 0))
        if s.kind == "ld":
            self.registers[str(data)] = word.value
        else:
            word.value = self.registers[str(data)]
