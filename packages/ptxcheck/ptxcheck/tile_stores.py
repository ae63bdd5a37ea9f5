"""Stores of tiles by TMA, from shared to global memory.

A tile is read when its thread waits for its group, and written when that thread waits for more than the reading or the
block has exited. Both are as late as is allowed, so that what is overwritten too early is seen.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .checked_memory import PENDING, UNFENCED, Array
from .hopper import Run, coordinates, each, place_of_tile
from .lanes import Mask, registers_in
from .program import Statement, Unsupported

if TYPE_CHECKING:
    from .executor import Executor


class Store(NamedTuple):
    """A tile under way: its thread's lane, where its pieces of 16 bytes lie (rows, pieces), the tensor map, the row and
    column there, and which group of its thread's it belongs to, -1 before that is committed."""

    lane: int
    at: Array
    of: dict[str, Any]
    row: int
    column: int
    group: int


class Stores:
    """The stores of a batch of blocks: those that are still to read, and what was read but is not written yet."""

    def __init__(self, lanes: int) -> None:
        self.flying: list[Store] = []
        self.read: list[tuple[Store, Array]] = []
        self.committed = np.zeros(lanes, np.int32)

    def reads(self, at: Array) -> bool:
        """Whether one is still to read a piece of 16 bytes with these places."""
        return any(len(np.intersect1d(store.at, at // 16 * 16)) for store in self.flying)

    def finish(self, ex: "Executor") -> None:
        """The block has exited."""
        if self.flying:
            ex.find("a TMA store that still reads shared memory at exit")
        _write(ex, ex.everywhere(np.array([True])))


def store_tile(ex: "Executor", s: Statement) -> Run:
    """cp.async.bulk from shared memory, and its groups. The tensor map is as in hopper.py; what lies outside stays."""
    mods = s.opcode.split(".")[3:]
    if mods == ["commit_group"] or mods[:1] == ["wait_group"]:
        return _groups(ex, s, mods)
    if mods != ["tensor", "2d", "global", "shared::cta", "bulk_group"]:
        raise Unsupported("of another form")
    names = coordinates(str(s.operands[0]))
    handle, x, y = (ex.source(r, t) for r, t in zip(names, (np.uint64, np.int32, np.int32), strict=True))
    start = ex.pointer(s.operands[1], np.uint32)

    def run(m: Mask) -> None:
        ex.require(registers_in(*names), m)
        for _, lane, which, column, row, place in each(ex, m, handle, x, y, start):
            of = ex.tensor_maps[which]
            at = place_of_tile(ex, of, lane, place)
            pieces, region = at.ravel(), ex.shared.region
            if region.any(pieces, 16, PENDING):
                ex.find("TMA store of what a copy has not delivered")
            if region.any(pieces, 16, UNFENCED):
                ex.find("TMA store of what was written without fence.proxy.async behind it")
            who = np.full(len(pieces), ex.thread[lane], np.int32)
            ex.shared.memory.reading(region, pieces, 16, who, ex.epoch, ex.program.threads)
            ex.shared.stores.flying.append(Store(lane, at, of, row, column, -1))

    return run


def _groups(ex: "Executor", s: Statement, mods: list[str]) -> Run:
    if mods == ["commit_group"]:
        return lambda m: _commit(ex, m)
    if mods[1:] not in ([], ["read"]):
        raise Unsupported("of another form")
    n = int(str(s.operands[0]), 0)
    return lambda m: _wait(ex, m, n, entirely=mods[1:] == [])


def _commit(ex: "Executor", m: Mask) -> None:
    stores, on = ex.shared.stores, ex.everywhere(np.array([True])) if m is None else m
    new = [store.group < 0 and bool(on[store.lane]) for store in stores.flying]
    stores.flying = [
        store._replace(group=int(stores.committed[store.lane])) if is_new else store
        for store, is_new in zip(stores.flying, new, strict=True)
    ]
    stores.committed = stores.committed + on


def _wait(ex: "Executor", m: Mask, n: int, entirely: bool) -> None:
    """Read all but the last n groups of each thread; `entirely`: and write them."""
    stores, on, left = ex.shared.stores, ex.everywhere(np.array([True])) if m is None else m, []
    for store in stores.flying:
        if on[store.lane] and 0 <= store.group < stores.committed[store.lane] - n:
            who = np.full(store.at.size, ex.thread[store.lane], np.int32)
            value = ex.shared.memory.load(store.at.ravel(), 16, who, ex.epoch, ex.program.threads)
            stores.read.append((store, value.reshape(*store.at.shape, 2)))
        else:
            left.append(store)
    stores.flying = left
    if entirely:
        _write(ex, on)


def _write(ex: "Executor", on: Array) -> None:
    """Write what was read, of these lanes."""
    stores = ex.shared.stores
    mine, stores.read = ([x for x in stores.read if on[x[0].lane] == here] for here in (True, False))
    for (lane, _, of, row, column, _), value in mine:
        r0, r1 = max(row, 0), min(row + of["box"][0], of["shape"][0])
        c0, c1 = max(column, 0), min(column + of["box"][1], of["shape"][1])
        if r1 <= r0 or c1 <= c0:
            continue
        size = of["size"]
        rows = np.ascontiguousarray(value[r0 - row : r1 - row]).view(np.uint8).reshape(r1 - r0, -1)
        halves = np.ascontiguousarray(rows[:, (c0 - column) * size : (c1 - column) * size]).view(np.uint16)
        at = of["base"] + np.arange(r0, r1)[:, None] * of["stride"] + np.arange(c0 * size, c1 * size, 2)
        who = np.full(at.size, ex.thread[lane], np.int32)
        ex.memory.store(at.ravel(), 2, halves.ravel(), who, ex.epoch, ex.program.threads)
