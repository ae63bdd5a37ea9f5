"""Asynchronous copies of single threads from global to shared memory: cp.async.

What is copied arrives when the thread waits for its group, as late as is allowed. Until then the bytes are pending: to
read them is reported. `cp.async.bulk` is in hopper.py and tile_stores.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import hopper, tile_stores
from .checked_memory import PENDING, UNSIGNED, Array
from .lanes import Mask
from .program import Statement, Unsupported

if TYPE_CHECKING:
    from .executor import Executor


class Flight:
    """One instruction's copies: by lanes, to `at`, of groups; a group of -1 is not committed."""

    def __init__(self, lanes: Array, at: Array, value: Array, width: int, group: Array | None = None) -> None:
        self.lanes, self.at, self.value, self.width = lanes, at, value, width
        self.group = np.full(len(lanes), -1, np.int32) if group is None else group

    def split(self, done: Array) -> "tuple[Flight, Flight]":
        one, other = (
            Flight(self.lanes[i], self.at[i], self.value[i], self.width, self.group[i]) for i in (done, ~done)
        )
        return one, other


class Copies:
    """The copies of a batch of blocks that are under way, and how many groups each lane has committed."""

    def __init__(self, lanes: int) -> None:
        self.flying: list[Flight] = []
        self.committed = np.zeros(lanes, np.int32)

    def any(self) -> bool:
        return bool(self.flying)


def copy(ex: "Executor", s: Statement) -> Callable[[Mask], None]:
    mods = s.opcode.split(".")[1:]
    if mods[:2] == ["async", "bulk"]:
        to_shared = mods[4:5] != ["global"] and "tensor" in mods
        return hopper.copy_tile(ex, s) if to_shared else tile_stores.store_tile(ex, s)
    if mods == ["async", "commit_group"]:
        return lambda m: _commit(ex, m)
    if mods == ["async", "wait_group"]:
        n = int(str(s.operands[0]), 0)
        return lambda m: _wait(ex, m, n)
    if mods[0] != "async" or mods[1] not in ("ca", "cg") or mods[2] not in ("shared", "shared::cta"):
        raise Unsupported("of another form")
    if mods[3:] != ["global"] or len(s.operands) > 4:
        raise Unsupported("of another form")
    width = int(str(s.operands[2]), 0)
    to, start = ex.pointer(s.operands[0], np.uint32), ex.pointer(s.operands[1], np.uint64)
    size = ex.source(s.operands[3] if len(s.operands) > 3 else str(width), np.uint32)

    def run(m: Mask) -> None:
        lanes = ex.lanes_of(m)
        at, source, n = to(m)[lanes], start(m)[lanes], ex.everywhere(size(m))[lanes]
        bad = (at < 0) | (at + width > ex.shared.size) | (at % width != 0)
        if bad.any():
            ex.find("out of bounds or misaligned: cp.async to shared memory")
            lanes, at, source, n = (x[~bad] for x in (lanes, at, source, n))
        at = at + ex.shared.window[lanes]
        _begin(ex, lanes, at, _read(ex, lanes, source, n, width), width)

    return run


def _read(ex: "Executor", lanes: Array, source: Array, n: Array, width: int) -> Array:
    """The words that will arrive: 0 where nothing is read."""
    shape = (len(lanes), 2) if width == 16 else (len(lanes),)
    value = np.zeros(shape, UNSIGNED[8 * min(width, 8)])
    some = np.flatnonzero(n != 0)
    if (n[some] != width).any():
        raise Unsupported(f"want {width} bytes to read, or 0; got {n[some][n[some] != width][0]}")
    if len(some):
        threads = ex.thread[lanes[some]]
        value[some] = ex.memory.load(source[some], width, threads, ex.epoch, ex.program.threads)
    return value


def _begin(ex: "Executor", lanes: Array, at: Array, value: Array, width: int) -> None:
    if ex.shared.region.any(at, width, PENDING):
        ex.find("cp.async to where a copy is under way")
    ex.shared.overwritten(at, lanes, "cp.async")
    memory, region = ex.shared.memory, ex.shared.region
    memory.copying(region, at, width, ex.thread[lanes], ex.epoch, ex.program.threads)
    ex.shared.copies.flying.append(Flight(lanes, at, value, width))


def _commit(ex: "Executor", m: Mask) -> None:
    copies = ex.shared.copies
    on = ex.everywhere(np.array([True])) if m is None else m
    for flight in copies.flying:
        flight.group = np.where((flight.group < 0) & on[flight.lanes], copies.committed[flight.lanes], flight.group)
    copies.committed = copies.committed + on


def _wait(ex: "Executor", m: Mask, n: int) -> None:
    """Deliver to the lanes all but their last n groups."""
    copies, left = ex.shared.copies, []
    on = ex.everywhere(np.array([True])) if m is None else m
    for flight in copies.flying:
        done = on[flight.lanes] & (flight.group >= 0) & (flight.group < copies.committed[flight.lanes] - n)
        arrived, rest = flight.split(done)
        if len(arrived.lanes):
            ex.shared.region.mark(arrived.at, arrived.width, off=PENDING)
            threads = ex.thread[arrived.lanes]
            ex.shared.memory.store(arrived.at, arrived.width, arrived.value, threads, ex.epoch, ex.program.threads)
        if len(rest.lanes):
            left.append(rest)
    copies.flying = left


HANDLERS = {"cp": copy}
