"""Registers and operands: the threads of a batch of blocks are the lanes of arrays.

A mask is a boolean array of the lanes that take part, or None: all of them.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .checked_memory import POISON, UNSIGNED, WARP, Array, Memory
from .program import Operand, Program, Unsupported

Mask = Array  # or None
Source = Callable[[Mask], Array]
MAP = 0x7000  # from here on are the addresses of parameters that are tensor maps
_NARROW = ("%laneid", "%warpid", "%cluster_ctarank", "global_smem")


class Lanes:
    """The registers of the lanes: raw bits by name, and in which lanes they were never written.

    A register that was not written may be copied, computed with and exchanged: the results count as unwritten. It must
    not decide a branch, be an address, or be stored (`require`).
    """

    def __init__(self, program: Program, memory: Memory) -> None:
        self.program, self.memory = program, memory
        self.maps = {p.name: MAP + i for i, p in enumerate(program.parameters) if p.kind == "map"}
        self.size = 0
        self.lane: Array = np.arange(0)
        self.registers: dict[str, Array] = {}
        self.special: dict[str, Array] = {}
        self.unwritten: dict[str, Array] = {}
        self.sums: dict[str, Array] = {}  # lanes in which wgmma is still to add to a register
        self.held: dict[str, Array] = {}  # and in which it still takes a factor from it
        self.parts: dict[str, list[Array]] = {}  # lanes in which each part of a packed register was not written

    def begin(self, blocks: Array, grid: tuple[int, int, int]) -> None:
        """Forget all registers; the lanes are the threads of these blocks."""
        T = self.program.threads
        self.size = len(blocks) * T
        self.lane = np.arange(self.size)
        self.registers, self.unwritten, self.parts = {}, {}, {}
        self.sums, self.held = {}, {}
        block, thread = np.repeat(blocks, T), np.tile(np.arange(T, dtype=np.uint32), len(blocks))
        self.thread = (block * T + thread).astype(np.int32)  # number in the grid
        place = {"x": block % grid[0], "y": block // grid[0] % grid[1], "z": block // (grid[0] * grid[1])}
        sizes = dict(zip("xyz", grid, strict=True))
        constants = {f"%nctaid.{axis}": n for axis, n in sizes.items()}
        constants |= {"%tid.y": 0, "%tid.z": 0, "%ntid.x": T, "%ntid.y": 1, "%ntid.z": 1}
        constants |= {"%cluster_ctarank": 0, "global_smem": 0}
        self.special = {name: np.full(self.size, value, np.uint32) for name, value in constants.items()}
        self.special |= {f"%ctaid.{axis}": at.astype(np.uint32) for axis, at in place.items()}
        self.special |= {"%tid.x": thread, "%laneid": thread % np.uint32(WARP), "%warpid": thread // np.uint32(WARP)}
        self.special["%clusterid.x"] = self.special["%ctaid.x"]

    # ---- registers

    def read(self, name: str) -> Array:
        if name in self.registers:
            return self.registers[name]
        if name in self.special:
            return self.special[name]
        bits = self.program.width(name)
        poison = np.full(self.size, POISON * 0x0001000100010001 & (1 << bits) - 1, UNSIGNED[max(bits, 8)])
        self.registers[name] = poison if bits > 1 else poison.astype(bool)
        self.unwritten[name] = np.ones(self.size, bool)
        return self.registers[name]

    def write(self, name: str, value: Array, m: Mask, sources: tuple[str, ...] = ()) -> None:
        """`sources`: the registers that the value was computed from."""
        if name == "_":
            return
        if self.sums:
            self._touch(self.sums, name, m, "written before the sum of wgmma is there")
            self._touch(self.held, name, m, "written before wgmma has taken its factor from it")
        if value.shape != (self.size,):
            value = np.broadcast_to(value, (self.size,)).copy()
        taint = self.taint(sources) if self.unwritten else None
        self.parts.pop(name, None)
        if m is not None:
            value = np.where(m, value, self.read(name))
        self.registers[name] = value
        if taint is not None or self.unwritten:
            self._set_unwritten(name, taint, m)

    def _touch(self, busy: dict[str, Array], name: str, m: Mask, what: str) -> None:
        if name in busy and (busy[name] if m is None else busy[name] & m).any():
            self.memory.find(f"register {name} is {what}")

    def _operand(self, name: str, m: Mask) -> Array:
        if self.sums:
            self._touch(self.sums, name, m, "read before the sum of wgmma is there")
        return self.read(name)

    def taint(self, names: tuple[str, ...]) -> Array | None:
        """The lanes in which one of the registers was not written."""
        found = [self.unwritten[name] for name in names if name in self.unwritten]
        return np.logical_or.reduce(found) if found else None

    def set_taint(self, name: str, lanes: Array, m: Mask) -> None:
        self._set_unwritten(name, lanes, m)

    def _set_unwritten(self, name: str, taint: Array | None, m: Mask) -> None:
        before = self.unwritten.pop(name, None)
        now = np.zeros(self.size, bool) if taint is None else taint.copy()
        if m is not None:
            now &= m
            if before is not None:
                now |= before & ~m
        if now.any():
            self.unwritten[name] = now

    def require(self, names: tuple[str, ...], m: Mask) -> None:
        """Report a register that is about to matter in a lane where it was never written."""
        if not self.unwritten:
            return
        for name in names:
            if name in self.unwritten:
                bad = self.unwritten[name] if m is None else self.unwritten[name] & m
                if bad.any():
                    self.memory.find(f"register {name} is used where it was not written")

    # ---- operands

    def source(self, token: Operand, dtype: Any, exact_width: bool = True) -> Source:
        """The operand as an array of that type: of all lanes, or of length 1 if it is a number.

        exact_width: a register must have the type's width; else a wider one is cut.
        """
        bits = 1 if dtype is bool else 8 * np.dtype(dtype).itemsize
        if isinstance(token, tuple):
            raise Unsupported(f"want one register or number, got {{{', '.join(token)}}}")
        if not (token.startswith("%") or token in ("global_smem", *self.maps)):
            value = number(token, dtype)
            return lambda m: value
        if token in self.maps:
            place = np.array([self.maps[token]], dtype)
            return lambda m: place
        width = 32 if token in _NARROW or "." in token else self.program.width(token)
        if dtype is bool and width == 1:
            return lambda m: self._operand(token, m)
        if width == bits:
            return lambda m: self._operand(token, m).view(dtype)
        if dtype is bool or exact_width or width < bits:
            raise Unsupported(f"{token} has {width} bits; want a register of {bits}")
        return lambda m: self._operand(token, m).astype(UNSIGNED[bits]).view(dtype)

    def address(self, token: Operand) -> tuple[str, int]:
        """'[%rd1 + 16]' -> ('%rd1', 16)"""
        match = re.match(r"^\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]$", str(token))
        if not match:
            raise Unsupported(f"want an address [register + number], got {token}")
        return match[1], int(match[2], 0) if match[2] else 0

    def pointer(self, token: Operand, dtype: Any) -> Callable[[Mask], Array]:
        """The addresses of all lanes, int64."""
        base, offset = self.address(token)
        get = self.source(base, dtype)

        def at(m: Mask) -> Array:
            self.require((base,), m)
            return self.everywhere(get(m)).astype(np.int64) + offset

        return at

    def everywhere(self, x: Array) -> Array:
        return np.broadcast_to(x, (self.size,))

    def lanes_of(self, m: Mask) -> Array:
        return self.lane if m is None else np.flatnonzero(m)

    def whole_warps(self, m: Mask, what: str) -> Array:
        """The warps that take part; those must take part as a whole."""
        if m is None:
            return np.arange(self.size // WARP)
        warps = m.reshape(-1, WARP)
        if (warps.any(1) & ~warps.all(1)).any():
            self.memory.find(f"{what} by a part of a warp")
        return np.flatnonzero(warps.any(1))


def registers_in(*operands: Operand) -> tuple[str, ...]:
    """The names of registers among the operands."""
    flat = [name for operand in operands for name in (operand if isinstance(operand, tuple) else (operand,))]
    return tuple(name for name in flat if name.startswith("%") and "." not in name)


def number(token: str, dtype: Any) -> Array:
    """An immediate as an array of length 1."""
    if match := re.match(r"^0[fF]([0-9a-fA-F]{8})$|^0[dD]([0-9a-fA-F]{16})$", token):
        raw = np.uint32 if match[1] else np.uint64
        value = np.array([int(match[1] or match[2], 16)], raw).view(np.float32 if match[1] else np.float64)
        return value.view(dtype) if value.itemsize == np.dtype(dtype).itemsize else value.astype(dtype)
    if not re.match(r"^-?(0x[0-9a-fA-F]+|[0-9]+)U?$", token):
        raise Unsupported(f"want a register or a number, got {token}")
    value = int(token.rstrip("U"), 0)
    if dtype is bool:
        return np.array([bool(value)])
    bits = 8 * np.dtype(dtype).itemsize
    if np.dtype(dtype).kind == "f":
        return np.array([value], dtype)
    return np.array([value & ((1 << bits) - 1)], UNSIGNED[bits]).view(dtype)
