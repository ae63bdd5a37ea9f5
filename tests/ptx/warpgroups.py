"""wgmma: products of a warpgroup, 128 threads, of matrices in shared memory."""

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
    if not shape or mods[4] != "f32" or mods[5] != mods[6] or s.operands[4:] != ("1", "1", "0", "0"):
        raise Unsupported("another form of wgmma")
    return _start(ex, s, int(shape[1]), mods[5])


def _wait(ex: "Executor", n: int) -> None:
    """Compute all but the last n groups."""
    region = ex.shared.region
    while len(ex.shared.products) - 1 > n:
        for compute, at in ex.shared.products.pop(0):
            compute()
            grains = region.grains(at, 16)
            region.reader[grains], region.r_epoch[grains] = -2, ex.epoch


def _start(ex: "Executor", s: Statement, N: int, kind: str) -> Run:
    out, half = s.operands[0], FROM_HALF[kind]
    a, b = ex.source(s.operands[1], np.uint64), ex.source(s.operands[2], np.uint64)
    add = ex.source(s.operands[3], bool)

    def run(m: Mask) -> None:
        ex.require(registers_in(*s.operands[1:4]), m)
        on = np.ones(ex.size, bool) if m is None else m
        if not (on.reshape(-1, GROUP).all(1) == on.reshape(-1, GROUP).any(1)).all():
            ex.find("wgmma by a part of a warpgroup")
        first = np.flatnonzero(on.reshape(-1, GROUP).any(1)) * GROUP  # lane of each group
        whole = [ex.everywhere(get(m)) for get in (a, b)]
        if any((x.reshape(-1, GROUP) != x[::GROUP, None]).any() for x in whole):
            ex.find("wgmma with several descriptors in a warpgroup")
        windows = ex.shared.window[first]
        at_a, at_b = _places(whole[0][first], 64, windows), _places(whole[1][first], N, windows)
        adds = ex.everywhere(add(m))[first]
        read = np.unique(np.concatenate([at_a.ravel(), at_b.ravel()]))
        if ex.shared.region.any_pending(read, 16):
            ex.find("wgmma of what a copy has not delivered")

        def compute() -> None:
            ex.memory.where = ex.shared.memory.where = s
            x, y = (half(_halves(ex, at, first)).astype(np.float64) for at in (at_a, at_b))
            _add(ex, out, first, adds, x @ y.swapaxes(1, 2))

        ex.shared.products[-1].append(Product(compute, read))

    return run


def _places(descriptor: Array, rows: int, windows: Array) -> Array:
    """Where the 16 columns of `rows` rows are: (groups, rows, 2 pieces of 16 bytes)."""
    d = descriptor.astype(np.int64)
    start, by, mode = (d & 0x3FFF) << 4, ((d >> 32) & 0x3FFF) << 4, (d >> 62) & 3
    span = {1: 128, 2: 64, 3: 32}.get(int(mode[0]), 0)
    if (mode != mode[0]).any() or not span or ((d >> 49) & 7).any():
        raise Unsupported(f"descriptor {d[0]:#x}")
    r = np.arange(rows)
    at = start[:, None, None] + ((r // 8)[None, :] * by[:, None] + (r % 8) * span)[:, :, None] + np.array([0, 16])
    return (at ^ (((at >> 7) & (span // 16 - 1)) << 4)) + windows[:, None, None]


def _halves(ex: "Executor", at: Array, first: Array) -> Array:
    """The bits of the matrices (groups, rows, 16)."""
    who = np.broadcast_to(ex.thread[first][:, None, None], at.shape).ravel()
    raw = ex.shared.memory.load(at.ravel(), 16, who, ex.epoch, ex.program.threads)
    return np.ascontiguousarray(raw).view(np.uint16).reshape(len(first), -1, 16)


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
