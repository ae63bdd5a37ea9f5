"""wgmma: products of a warpgroup, 128 threads, of matrices in shared memory.

A factor has rows of the inner dimension ("0"), or is transposed ("1"); the first one may also be held in registers.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .checked_memory import Array
from .exchanges import FROM_HALF, rounded
from .lanes import Mask, registers_in
from .program import Statement, Unsupported

if TYPE_CHECKING:
    from .executor import Executor

Run = Callable[[Mask], None]
Factor = tuple[
    Callable[[], Array], Array
]  # reads the bits, (groups, rows, 16), when the product is computed; from where
GROUP = 128


class Product(NamedTuple):
    """A product that was started: what computes it, and the places of shared memory that it reads."""

    compute: Callable[[], None]
    at: Array


def warpgroup(ex: "Executor", s: Statement) -> Run:
    mods = s.opcode.split(".")[1:]
    if mods == ["fence", "sync", "aligned"]:
        return lambda m: None
    if mods == ["commit_group", "sync", "aligned"]:
        return lambda m: ex.shared.products.append([])
    if mods == ["wait_group", "sync", "aligned"]:
        n = int(str(s.operands[0]), 0)
        return lambda m: _wait(ex, n)
    shape = re.match(r"^m64n(\d+)k16$", mods[3]) if mods[:3] == ["mma_async", "sync", "aligned"] else None
    transposed, held = s.operands[6:], isinstance(s.operands[1], tuple)
    if not shape or mods[4] != "f32" or mods[5] != mods[6] or s.operands[4:6] != ("1", "1"):
        raise Unsupported("another form of wgmma")
    if len(transposed) != 2 - held or {*transposed} - {"0", "1"}:
        raise Unsupported("another form of wgmma")
    return _start(ex, s, int(shape[1]), mods[5])


def _wait(ex: "Executor", n: int) -> None:
    """Compute all but the last n groups."""
    region = ex.shared.region
    while len(ex.shared.products) - 1 > n:
        for compute, at in ex.shared.products.pop(0):
            compute()
            grains = region.grains(at, 16)
            region.reader[grains] = region.readers[grains] = -2
            region.r_epoch[grains] = ex.epoch


def _start(ex: "Executor", s: Statement, N: int, kind: str) -> Run:
    out, half, add = s.operands[0], FROM_HALF[kind], ex.source(s.operands[3], bool)
    a, b = (_factor(ex, s, which, n) for which, n in ((1, 64), (2, N)))

    def run(m: Mask) -> None:
        ex.require(registers_in(*s.operands[1:4]), m)
        on = np.ones(ex.size, bool) if m is None else m
        if not (on.reshape(-1, GROUP).all(1) == on.reshape(-1, GROUP).any(1)).all():
            ex.find("wgmma by a part of a warpgroup")
        first = np.flatnonzero(on.reshape(-1, GROUP).any(1)) * GROUP  # lane of each group
        (read_a, at_a), (read_b, at_b) = a(m, first), b(m, first)
        adds = ex.everywhere(add(m))[first]
        read = np.unique(np.concatenate([at_a, at_b]))
        if ex.shared.region.any_pending(read, 16):
            ex.find("wgmma of what a copy has not delivered")

        def compute() -> None:
            ex.memory.where = ex.shared.memory.where = s
            x, y = (half(np.ascontiguousarray(get())).astype(np.float64) for get in (read_a, read_b))
            _add(ex, out, first, adds, x @ y.swapaxes(1, 2))

        ex.shared.products[-1].append(Product(compute, read))

    return run


def _factor(ex: "Executor", s: Statement, which: int, n: int) -> Callable[[Mask, Array], Factor]:
    """Operand 1 or 2, n rows of 16 halves: for a mask and the first lane of each group."""
    if isinstance(s.operands[which], tuple):
        return _held(ex, s.operands[which])
    get, transposed = ex.source(s.operands[which], np.uint64), s.operands[which - 3] == "1"

    def factor(m: Mask, first: Array) -> Factor:
        descriptor = ex.everywhere(get(m))
        if (descriptor.reshape(-1, GROUP) != descriptor[::GROUP, None]).any():
            ex.find("wgmma with several descriptors in a warpgroup")
        at = _places(descriptor[first], n, ex.shared.window[first], transposed)
        return lambda: _halves(ex, at, first, transposed), at.ravel()

    return factor


def _held(ex: "Executor", registers: tuple[str, ...]) -> Callable[[Mask, Array], Factor]:
    """The first factor in four registers: lane (warp, row of 8, thread) has pairs of columns of rows 8 apart."""
    gets = [ex.source(register, np.uint32) for register in registers]

    def factor(m: Mask, first: Array) -> Factor:
        words = np.stack([ex.everywhere(get(m)) for get in gets], 1).reshape(-1, GROUP, 4)[first // GROUP]
        pairs = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 4, 8, 4, 2, 2, 2)
        value = pairs.transpose(0, 1, 5, 2, 4, 3, 6).reshape(
            -1, 64, 16
        )  # warp, row // 8, row; column // 8, thread, pair
        return lambda: value, np.zeros(0, np.int64)

    return factor


def _places(descriptor: Array, n: int, windows: Array, transposed: bool) -> Array:
    """Where the factor lies, in pieces of 16 bytes: (groups, n, 2), or transposed (groups, 16, n / 8).

    A row within the swizzle has its `span` bytes, 8 rows follow each other, `by` bytes lead to the next 8, and if
    transposed `lead` bytes to the next `span` bytes of the same rows.
    """
    d = descriptor.astype(np.int64)
    start, lead, by, mode = (d & 0x3FFF) << 4, ((d >> 16) & 0x3FFF) << 4, ((d >> 32) & 0x3FFF) << 4, (d >> 62) & 3
    span = {1: 128, 2: 64, 3: 32}.get(int(mode[0]), 0)
    if (mode != mode[0]).any() or not span or ((d >> 49) & 7).any():
        raise Unsupported(f"descriptor {d[0]:#x}")
    row, piece = (np.arange(16), np.arange(n // 8)) if transposed else (np.arange(n), np.arange(2))
    at = start[:, None, None] + (row // 8)[:, None] * by[:, None, None] + (row % 8)[:, None] * span
    panel, within = (piece // (span // 16), piece % (span // 16)) if transposed else (0 * piece, piece)
    at = at + panel * lead[:, None, None] + 16 * within
    return (at ^ (((at >> 7) & (span // 16 - 1)) << 4)) + windows[:, None, None]


def _halves(ex: "Executor", at: Array, first: Array, transposed: bool) -> Array:
    """The bits of the factors (groups, n, 16)."""
    who = np.broadcast_to(ex.thread[first][:, None, None], at.shape).ravel()
    raw = ex.shared.memory.load(at.ravel(), 16, who, ex.epoch, ex.program.threads)
    out = np.ascontiguousarray(raw).view(np.uint16).reshape(*at.shape[:2], -1)
    return out.swapaxes(1, 2) if transposed else out


def _add(ex: "Executor", registers: tuple[str, ...], first: Array, adds: Array, product: Array) -> None:
    """Add (groups, 64, N) to the registers: lane (warp, group of 4, thread) has pairs of columns of rows 8 apart."""
    N = product.shape[2]
    shape = (-1, 4, 8, 4, N // 8, 2, 2)  # group, warp, row of 8, thread, columns / 8, row // 8, column of a pair
    old = np.stack([ex.read(r).view(np.float32) for r in registers], 1).reshape(shape)
    old = old[first // GROUP].transpose(0, 1, 5, 2, 4, 3, 6).reshape(len(first), 64, N)
    out = rounded(ex, np.where(adds[:, None, None], old.astype(np.float64), 0) + product)
    out = out.reshape(len(first), 4, 2, 8, N // 8, 4, 2).transpose(0, 1, 3, 5, 4, 2, 6).reshape(-1, N // 2)
    lanes = (first[:, None] + np.arange(GROUP)).ravel()
    on = np.zeros(ex.size, bool)
    on[lanes] = True
    for i, register in enumerate(registers):
        full = np.zeros(ex.size, np.uint32)
        full[lanes] = np.ascontiguousarray(out[:, i]).view(np.uint32)
        ex.write(register, full, None if on.all() else on)
