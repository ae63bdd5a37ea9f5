"""wgmma: products of a warpgroup, 128 threads, of matrices in shared memory.

A factor has rows of the inner dimension ("0"), or is transposed ("1"); the first one may also be held in registers.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .checked_memory import Array
from .exchanges import rounded
from .lanes import Mask, registers_in
from .program import Statement, Unsupported
from .rounding import FROM_HALF

if TYPE_CHECKING:
    from .executor import Executor

Run = Callable[[Mask], None]
Selection = Array  # which warpgroups of a product are meant
# Reads the bits, (groups, rows, 16), when the product is computed; from where, (groups, pieces of 16 bytes).
Factor = tuple[Callable[[Selection], Array], Array]
GROUP = 128


class Product(NamedTuple):
    """A product that some warpgroups have started: what computes it for a selection of them; the registers that it adds
    to, and those that hold its first factor. For each warpgroup: the places of shared memory that it reads, and which
    group of its products it belongs to, -1 before that is committed."""

    compute: Callable[[Selection], None]
    sums: tuple[str, ...]
    held: tuple[str, ...]
    warpgroups: Array
    at: Array
    group: Array

    def of(self, some: Selection) -> "Product":
        compute, chosen = self.compute, np.flatnonzero(some)
        parts = (array[some] for array in (self.warpgroups, self.at, self.group))
        return Product(lambda which: compute(chosen[which]), self.sums, self.held, *parts)


class Products:
    """The products of a batch of blocks that are under way, and how many groups each warpgroup has committed."""

    def __init__(self, lanes: int) -> None:
        self.flying: list[Product] = []
        self.committed = np.zeros(-(-lanes // GROUP), np.int32)

    def read(self, at: Array) -> bool:
        """Whether one reads a piece of 16 bytes with these places."""
        return any(len(np.intersect1d(product.at, at // 16 * 16)) for product in self.flying)

    def registers(self, lanes: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """By register, the lanes in which it is still to be added to, and in which it holds a factor."""
        sums: dict[str, Array] = {}
        held: dict[str, Array] = {}
        for product in self.flying:
            on = np.zeros((lanes // GROUP, GROUP), bool)
            on[product.warpgroups] = True
            for found, names in ((sums, product.sums), (held, product.held)):
                found |= {name: found[name] | on.ravel() if name in found else on.ravel() for name in names}
        return sums, held


def warpgroup(ex: "Executor", s: Statement) -> Run:
    mods = s.opcode.split(".")[1:]
    if mods == ["fence", "sync", "aligned"]:
        return lambda m: None
    if mods == ["commit_group", "sync", "aligned"]:
        return lambda m: _commit(ex, m)
    if mods == ["wait_group", "sync", "aligned"]:
        n = int(str(s.operands[0]), 0)
        return lambda m: _wait(ex, m, n)
    shape = re.match(r"^m64n(\d+)k16$", mods[3]) if mods[:3] == ["mma_async", "sync", "aligned"] else None
    transposed, held = s.operands[6:], isinstance(s.operands[1], tuple)
    if not shape or mods[4] != "f32" or mods[5] != mods[6] or s.operands[4:6] != ("1", "1"):
        raise Unsupported("of another form")
    if len(transposed) != 2 - held or {*transposed} - {"0", "1"}:
        raise Unsupported("of another form")
    return _start(ex, s, int(shape[1]), mods[5])


def _whole(ex: "Executor", m: Mask) -> Array:
    """The warpgroups that take part; those must take part as a whole."""
    on = (np.ones(ex.size, bool) if m is None else m).reshape(-1, GROUP)
    if (on.all(1) != on.any(1)).any():
        ex.find("wgmma by a part of a warpgroup")
    return on.any(1)


def _commit(ex: "Executor", m: Mask) -> None:
    products, on = ex.shared.products, _whole(ex, m)
    for product in products.flying:
        new = on[product.warpgroups] & (product.group < 0)
        product.group[new] = products.committed[product.warpgroups[new]]
    products.committed += on


def _wait(ex: "Executor", m: Mask, n: int) -> None:
    """Compute all but the last n groups of each warpgroup."""
    products, region, on, left = ex.shared.products, ex.shared.region, _whole(ex, m), []
    ex.sums, ex.held = {}, {}
    for product in products.flying:
        done = on[product.warpgroups] & (product.group >= 0)
        done &= product.group < products.committed[product.warpgroups] - n
        if done.any():
            product.compute(np.flatnonzero(done))
            grains = region.grains(np.unique(product.at[done]), 16)
            region.reader[grains] = region.readers[grains] = -2
            region.r_epoch[grains] = ex.epoch
        if not done.all():
            left.append(product.of(~done))
    products.flying = left
    ex.sums, ex.held = products.registers(ex.size)


def _start(ex: "Executor", s: Statement, N: int, kind: str) -> Run:
    out, half, add = s.operands[0], FROM_HALF[kind], ex.source(s.operands[3], bool)
    a, b = (_factor(ex, s, which, n) for which, n in ((1, 64), (2, N)))
    held = s.operands[1] if isinstance(s.operands[1], tuple) else ()

    def run(m: Mask) -> None:
        ex.require(registers_in(*s.operands[1:4]), m)
        warpgroups = np.flatnonzero(_whole(ex, m))
        first = warpgroups * GROUP  # lane of each
        (read_a, at_a), (read_b, at_b) = a(m, first), b(m, first)
        adds = ex.everywhere(add(m))[first]
        at = np.concatenate([at_a, at_b], 1)
        ex.shared.require_delivered(at.ravel(), 16, np.repeat(warpgroups, at.shape[1]), "wgmma", GROUP)

        def compute(which: Selection) -> None:
            ex.memory.where = ex.shared.memory.where = s
            x, y = (half(np.ascontiguousarray(get(which))).astype(np.float64) for get in (read_a, read_b))
            _add(ex, out, first[which], adds[which], x @ y.swapaxes(1, 2))

        products, uncommitted = ex.shared.products, np.full(len(first), -1, np.int32)
        products.flying.append(Product(compute, tuple(out), held, warpgroups, at, uncommitted))
        ex.sums, ex.held = products.registers(ex.size)

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
        return lambda which: _halves(ex, at[which], first[which], transposed), at.reshape(len(first), -1)

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
        return lambda which: value[which], np.zeros((len(first), 0), np.int64)

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
        raise Unsupported(f"want one descriptor, swizzled by 32, 64 or 128 bytes, without a base offset; got {d[0]:#x}")
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
