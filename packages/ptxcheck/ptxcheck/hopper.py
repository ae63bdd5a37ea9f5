"""Instructions of sm_90: barriers in shared memory, copies of tiles by TMA, products of warpgroups.

A tile arrives when a thread tries to wait for its barrier; a product is computed when its group is awaited. Both are as
late as is allowed, so that what is read too early, or overwritten too early, is seen. A tile is there for the threads
that have waited for its barrier, and behind the next barrier of the warp or block for all that meet them there.
"""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .checked_memory import PENDING, UNFENCED, VALID, WRITTEN, Array
from .lanes import Mask, registers_in
from .program import Statement, Unsupported
from .warpgroups import warpgroup

if TYPE_CHECKING:
    from .executor import Executor

Run = Callable[[Mask], None]
__all__ = ["HANDLERS", "Arrivals", "Barrier", "copy_tile"]
TRIES = 1000  # waits in a row that may fail before the program is taken to hang


class Arrivals:
    """Which lanes know of which tiles that they have arrived.

    Each address of an mbarrier has a row. `phases`: by row and block, how many phases are complete; `known`: by row and
    lane, how many of these the lane knows of. Of each piece of 16 bytes of shared memory, `row` (-1: no tile lies
    there) and `phase`, the number that a lane must know of to access it.
    """

    def __init__(self, size: int, blocks: int, threads: int) -> None:
        self.rows: dict[int, int] = {}
        self.phases, self.known = np.zeros((0, blocks), np.int32), np.zeros((0, blocks * threads), np.int32)
        self.row, self.phase = np.full(size // 16 + 1, -1, np.int32), np.zeros(size // 16 + 1, np.int32)

    def row_of(self, place: int) -> int:
        if place not in self.rows:
            self.rows[place] = len(self.rows)
            self.phases, self.known = (np.pad(x, ((0, 1), (0, 0))) for x in (self.phases, self.known))
        return self.rows[place]

    def unknown(self, at: Array, who: Array, size: int) -> bool:
        """Whether one of `who` accesses a tile at its place and does not know that it has arrived: lanes (size 1), or
        all together the lanes of groups of that size."""
        row = self.row[at // 16]
        some = np.flatnonzero(row >= 0)
        known = self.known if size == 1 else self._by(size).min(2)
        return bool((known[row[some], who[some]] < self.phase[at[some] // 16]).any())

    def _by(self, size: int) -> Array:
        return self.known.reshape(len(self.known), self.known.shape[1] // size, size)

    def meet(self, lanes: Array, size: int) -> None:
        """The warps or blocks of `size` lanes of which some are among these pass a barrier: all know what one knew."""
        groups = np.unique(lanes // size)
        known = self._by(size)
        known[:, groups] = known[:, groups].max(2, keepdims=True)


class Tile(NamedTuple):
    """A copy under way: where its pieces of 16 bytes go, what they are, and how many bytes it counts for."""

    at: Array
    value: Array
    size: int


class Barrier:
    """An mbarrier: `count` arrivals complete a phase, with all the bytes they announced."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.copies: list[Tile] = []


def swizzled(at: Array, span: int) -> Array:
    """Where a byte lies: pieces of 16 bytes change places within 1024 bytes."""
    return at ^ (((at >> 7) & (span // 16 - 1)) << 4)


def each(ex: "Executor", m: Mask, *gets: Callable[[Mask], Array]) -> Iterator[tuple[int, ...]]:
    """Block of the batch, lane, and the values of the operands, for each lane that takes part."""
    lanes = ex.lanes_of(m)
    values = [ex.everywhere(get(m))[lanes] for get in gets]
    for i, lane in enumerate(lanes):
        yield int(lane) // ex.program.threads, int(lane), *(int(value[i]) for value in values)


# ---- barriers


def barrier(ex: "Executor", s: Statement) -> Run:
    mods = [mod.replace("shared::cta", "shared") for mod in s.opcode.split(".")[1:]]  # Triton 3.6 writes "shared"
    if mods[-2:] != ["shared", "b64"] or ".".join(mods[:-2]) not in BARRIERS:
        raise Unsupported("of another form")
    return BARRIERS[".".join(mods[:-2])](ex, s)


def _barrier_at(ex: "Executor", block: int, place: int) -> Barrier:
    if (block, place) not in ex.shared.barriers:
        raise Unsupported(
            f"want an mbarrier at byte {place} of shared memory; got none, mbarrier.init has not run there"
        )
    return ex.shared.barriers[block, place]


def _initialise(ex: "Executor", s: Statement) -> Run:
    at, count = ex.pointer(s.operands[0], np.uint32), int(str(s.operands[1]), 0)

    def run(m: Mask) -> None:
        for block, _, place in each(ex, m, at):
            if place % 8 or place + 8 > ex.shared.size:
                ex.find("out of bounds or misaligned mbarrier")
            ex.shared.barriers[block, place] = Barrier(count)

    return run


def _invalidate(ex: "Executor", s: Statement) -> Run:
    at = ex.pointer(s.operands[0], np.uint32)

    def run(m: Mask) -> None:
        for block, _, place in each(ex, m, at):
            one = _barrier_at(ex, block, place)
            del ex.shared.barriers[block, place]
            if one.copies:
                ex.find("mbarrier.inval with copies under way")

    return run


def _arrive(ex: "Executor", s: Statement) -> Run:
    if s.operands[0] != "_":
        raise Unsupported("the state goes to a register")
    at, size = ex.pointer(s.operands[1], np.uint32), ex.source(s.operands[2], np.uint32)

    def run(m: Mask) -> None:
        for block, _, place, n in each(ex, m, at, size):
            one = _barrier_at(ex, block, place)
            if one.missing <= 0:
                ex.find("mbarrier: more arrivals than expected")
            one.missing -= 1
            one.bytes += n

    return run


def _try_wait(ex: "Executor", s: Statement) -> Run:
    to, at = str(s.operands[0]), ex.pointer(s.operands[1], np.uint32)
    parity, tries = ex.source(s.operands[2], np.uint32), 0

    def run(m: Mask) -> None:
        nonlocal tries
        ex.require(registers_in(s.operands[2]), m)
        lanes, done = ex.lanes_of(m), np.zeros(ex.size, bool)
        place, want = at(m)[lanes], ex.everywhere(parity(m))[lanes].astype(np.int64)
        block = lanes // ex.program.threads
        for b, p, w in np.unique(np.stack([block, place, want], 1), axis=0):
            one = _barrier_at(ex, int(b), int(p))
            row, here = ex.shared.arrivals.row_of(int(p)), lanes[(block == b) & (place == p) & (want == w)]
            _deliver(ex, one, row, int(b))
            if one.phase != w:
                done[here] = True
                ex.shared.arrivals.known[row, here] = ex.shared.arrivals.phases[row, b]
        tries = 0 if done[lanes].all() else tries + 1
        if tries > TRIES:
            raise Unsupported(f"waits forever: tried {TRIES} times")
        ex.write(to, done, m)

    return run


def _deliver(ex: "Executor", one: Barrier, row: int, block: int) -> None:
    region, arrivals = ex.shared.region, ex.shared.arrivals
    for at, value, size in one.copies:
        region.view(region.data, 16)[at // 16] = value
        region.mark(at, 16, on=VALID | WRITTEN, off=PENDING | UNFENCED)
        region.writer[region.grains(at, 16)] = -1
        arrivals.row[at // 16], arrivals.phase[at // 16] = row, arrivals.phases[row, block] + 1
        one.bytes -= size
    one.copies = []
    if one.missing == 0 and one.bytes == 0:
        one.missing, one.phase = one.count, one.phase ^ 1
        arrivals.phases[row, block] += 1
    if one.bytes < 0:
        ex.find("mbarrier: more bytes than expected")


BARRIERS: dict[str, Callable[["Executor", Statement], Run]] = {
    "init": _initialise, "inval": _invalidate, "arrive.expect_tx": _arrive, "try_wait.parity": _try_wait
}  # fmt: skip


# ---- TMA


def copy_tile(ex: "Executor", s: Statement) -> Run:
    """The tensor map is a dictionary: base, shape (rows, columns), stride of rows in bytes, box (rows, columns), size
    of an element, span of the swizzle in bytes. Columns and rows outside come as 0."""
    mods = [mod.replace("shared::cluster", "shared::cta") for mod in s.opcode.split(".")[1:]]  # a cluster of one block
    if mods != ["async", "bulk", "tensor", "2d", "shared::cta", "global", "mbarrier::complete_tx::bytes"]:
        raise Unsupported("of another form")
    to, bar = ex.pointer(s.operands[0], np.uint32), ex.pointer(s.operands[2], np.uint32)
    names = coordinates(str(s.operands[1]))
    handle, x, y = (ex.source(r, t) for r, t in zip(names, (np.uint64, np.int32, np.int32), strict=True))

    def run(m: Mask) -> None:
        ex.require(registers_in(*names), m)
        for block, lane, place, at_barrier, which, column, row in each(ex, m, to, bar, handle, x, y):
            tile = _tile(ex, ex.tensor_maps[which], lane, place, row, column)
            _barrier_at(ex, block, at_barrier).copies.append(tile)

    return run


def coordinates(operand: str) -> tuple[str, str, str]:
    """[map, {column, row}]"""
    match = re.match(r"^\[\s*(%\w+)\s*,\s*\{\s*(\S+)\s*,\s*(\S+)\s*\}\s*\]$", operand)
    if not match:
        raise Unsupported("of another form")
    return match[1], match[2], match[3]


def place_of_tile(ex: "Executor", of: dict, lane: int, place: int) -> Array:
    """Where the pieces of 16 bytes of a tile lie, (rows, pieces)."""
    rows, columns = of["box"]
    pitch = columns * of["size"]
    wrong = place % 128 or place + rows * pitch > ex.shared.size or pitch != of["span"]
    if wrong or (of["span"] > 16 and place % (8 * of["span"])):
        raise Unsupported(
            f"want a tile within the {ex.shared.size} bytes of shared memory, at a multiple of 128 and of 8 spans of "
            f"the swizzle, rows as long as a span; got {rows} rows of {pitch} bytes at {place}, spans of {of['span']}"
        )
    at = place + np.arange(rows)[:, None] * pitch + np.arange(0, pitch, 16)
    return swizzled(at, of["span"]) + ex.shared.window[lane]


def _tile(ex: "Executor", of: dict, lane: int, place: int, row: int, column: int) -> Tile:
    (rows, columns), size = of["box"], of["size"]
    at, pitch = place_of_tile(ex, of, lane, place).ravel(), columns * size
    value = np.zeros((rows, pitch), np.uint8)
    r0, r1 = max(row, 0), min(row + rows, of["shape"][0])
    c0, c1 = max(column, 0), min(column + columns, of["shape"][1])
    if r1 > r0 and c1 > c0:
        n = (c1 - c0) * size
        source = of["base"] + np.arange(r0, r1)[:, None] * of["stride"] + c0 * size + np.arange(0, n, 2)
        who = np.full(source.size, ex.thread[lane], np.int32)
        got = ex.memory.load(source.ravel(), 2, who, ex.epoch, ex.program.threads)
        first = (c0 - column) * size
        value[r0 - row : r1 - row, first : first + n] = got.view(np.uint8).reshape(r1 - r0, n)
    region, who = ex.shared.region, np.full(len(at), ex.thread[lane], np.int32)
    if region.any(at, 16, PENDING):
        ex.find("TMA to where a copy is under way")
    ex.shared.overwritten(at, np.full(len(at), lane), "TMA")
    ex.shared.memory.copying(region, at, 16, who, ex.epoch, ex.program.threads)
    return Tile(at, value.reshape(-1, 16).view(np.uint64), rows * pitch)


# ---- others


def fence(ex: "Executor", s: Statement) -> Run:
    """TMA sees what these threads have written."""
    if s.opcode not in ("fence.proxy.async.shared::cta", "fence.proxy.async"):
        raise Unsupported("of another form")
    return lambda m: ex.shared.region.fenced(ex.thread[ex.lanes_of(m)])


def address_of_parameter(ex: "Executor", s: Statement) -> Run:
    if s.opcode != "cvta.param.u64":
        raise Unsupported("of another form")
    get = ex.source(s.operands[1], np.uint64)
    return lambda m: ex.write(str(s.operands[0]), get(m), m)


HANDLERS = {"mbarrier": barrier, "fence": fence, "cvta": address_of_parameter, "wgmma": warpgroup}
