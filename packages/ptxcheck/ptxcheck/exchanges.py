"""Instructions of whole warps: exchanges between lanes, matrices in shared memory, products of small matrices.

A sum of mma is the exact one, rounded once to fp32; the hardware's order and rounding are not documented.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .checked_memory import WARP, Array
from .lanes import Mask, registers_in
from .opcodes import DTYPES
from .program import Statement, Unsupported
from .rounding import FROM_HALF, NAN, towards_zero

if TYPE_CHECKING:
    from .executor import Executor

Run = Callable[[Mask], None]


def shuffle(ex: "Executor", s: Statement) -> Run:
    mods, to = s.opcode.split(".")[1:], str(s.operands[0])
    if mods[0] != "sync" or mods[2:] != ["b32"] or len(s.operands) != 5 or "|" in to:
        raise Unsupported("of another form")
    if str(s.operands[4]).lower() not in ("-1", "0xffffffff"):
        raise Unsupported(f"lanes {s.operands[4]}")
    names = registers_in(s.operands[1])
    value, by, clamp = (ex.source(operand, np.uint32) for operand in s.operands[1:4])
    partner = PARTNERS[mods[1]]

    def run(m: Mask) -> None:
        ex.require(registers_in(*s.operands[2:4]), m)
        ex.whole_warps(m, "shfl.sync")
        lane = ex.lane % WARP
        b, c = ex.everywhere(by(m)).astype(np.int64) & 31, ex.everywhere(clamp(m)).astype(np.int64)
        segment, limit = (c >> 8) & 31, c & 31
        top = (lane & segment) | (limit & ~segment)
        other, inside = partner(lane, b, segment, top)
        at = ex.lane - lane + np.where(inside, other, lane)
        ex.write(to, ex.everywhere(value(m))[at], m)
        taint = ex.taint(names) if ex.unwritten else None
        if taint is not None:
            ex.set_taint(to, taint[at], m)

    return run


PARTNERS: dict[str, Callable[..., tuple[Array, Array]]] = {  # the lane to read, and whether it is in the segment
    "bfly": lambda lane, b, segment, top: (lane ^ b, (lane ^ b) <= top),
    "down": lambda lane, b, segment, top: (lane + b, lane + b <= top),
    "up": lambda lane, b, segment, top: (lane - b, lane - b >= top),
    "idx": lambda lane, b, segment, top: (
        (lane & segment) | (b & ~segment),
        ((lane & segment) | (b & ~segment)) <= top,
    ),
}


def reduce(ex: "Executor", s: Statement) -> Run:
    names = {"add": np.add, "min": np.fmin, "max": np.fmax, "min.NaN": np.minimum, "max.NaN": np.maximum}
    kinds = {"add": ("s32", "u32"), "min": ("f32", "s32", "u32"), "max": ("f32", "s32", "u32")}
    (function, _, kind), (to, one, members) = s.opcode.removeprefix("redux.sync.").rpartition("."), map(str, s.operands)
    if function not in names or kind not in kinds.get(function, ("f32",)):
        raise Unsupported("of another form")
    value, mask = ex.source(one, DTYPES[kind]), ex.source(members, np.uint32)

    def run(m: Mask) -> None:
        ex.require(registers_in(one, members), m)
        ex.whole_warps(m, "redux.sync")
        each = ex.everywhere(value(m)).reshape(-1, WARP)
        on = np.ones(ex.size, bool) if m is None else m
        named = np.where(on, ex.everywhere(mask(m)), 0).reshape(-1, WARP, 1)
        member = (named >> np.arange(WARP, dtype=np.uint32) & 1).astype(bool)
        own = member[:, np.arange(WARP), np.arange(WARP)]
        if not own[on.reshape(-1, WARP)].all() or (member != member.transpose(0, 2, 1)).any():
            raise Unsupported("want lanes that name each other; some do not")
        others = 0 if function == "add" else each[:, :, None]  # in the place of those that are not named
        found = names[function].reduce(np.where(member, each[:, None, :], others), 2, dtype=each.dtype).ravel()
        if kind == "f32":
            found = np.where(np.isnan(found), NAN[np.float32], found)
        ex.write(to, np.ascontiguousarray(found).view(np.uint32), m)

    return run


def elect(ex: "Executor", s: Statement) -> Run:
    if s.opcode != "elect.sync" or s.operands[1] != "-1":
        raise Unsupported("of another form")
    to, predicate = str(s.operands[0]).split("|")

    def run(m: Mask) -> None:
        ex.whole_warps(m, "elect.sync")
        ex.write(to, np.zeros(ex.size, np.uint32), m)
        ex.write(predicate, ex.lane % WARP == 0, m)

    return run


def load_matrices(ex: "Executor", s: Statement) -> Run:
    count, transposed = _form(s)
    registers = s.operands[0] if isinstance(s.operands[0], tuple) else (s.operands[0],)
    pointer = ex.pointer(s.operands[1], np.uint32)

    def run(m: Mask) -> None:
        warps = ex.whole_warps(m, "ldmatrix")
        lanes, at = _rows(ex, warps, count, pointer(m), "ldmatrix")
        if at is None:
            return
        ex.shared.require_delivered(at, 16, lanes, "ldmatrix")
        rows = ex.shared.memory.load(at, 16, ex.thread[lanes], ex.epoch, ex.program.threads)
        words = _turned(rows, count, transposed).view(np.uint32).reshape(len(warps), count, WARP)
        for i, register in enumerate(registers):
            full = np.zeros((ex.size // WARP, WARP), np.uint32)
            full[warps] = words[:, i]
            ex.write(register, full.ravel(), m)

    return run


def store_matrices(ex: "Executor", s: Statement) -> Run:
    count, transposed = _form(s)
    registers = s.operands[1] if isinstance(s.operands[1], tuple) else (s.operands[1],)
    pointer, gets = ex.pointer(s.operands[0], np.uint32), [ex.source(r, np.uint32) for r in registers]

    def run(m: Mask) -> None:
        ex.require(registers_in(*registers), m)
        warps = ex.whole_warps(m, "stmatrix")
        lanes, at = _rows(ex, warps, count, pointer(m), "stmatrix")
        if at is None:
            return
        words = np.stack([ex.everywhere(get(m)).reshape(-1, WARP)[warps] for get in gets], 1)
        value = _turned(words, count, transposed).view(np.uint64).reshape(-1, 2)  # rows of 16 bytes
        ex.shared.overwritten(at, lanes, "stmatrix")
        ex.shared.memory.store(at, 16, value, ex.thread[lanes], ex.epoch, ex.program.threads)

    return run


def _form(s: Statement) -> tuple[int, bool]:
    """How many matrices of 8 x 8 halves, and whether they are transposed on the way."""
    mods = [mod.replace("shared::cta", "shared") for mod in s.opcode.split(".")[1:]]
    transposed = "trans" in mods[4:]
    if mods[:3] != ["sync", "aligned", "m8n8"] or mods[4:] != ["trans"] * transposed + ["shared", "b16"]:
        raise Unsupported("of another form")
    return int(mods[3][1]), transposed


def _turned(words: Array, count: int, transposed: bool) -> Array:
    """The matrices, halves; transposed if wanted."""
    matrices = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
    return np.ascontiguousarray(matrices.swapaxes(2, 3) if transposed else matrices)


def _rows(ex: "Executor", warps: Array, count: int, pointers: Array, what: str) -> tuple[Array, Array | None]:
    """Lanes that name the 8 rows of each matrix, and the places of these rows; None if one is wrong."""
    lanes = (warps[:, None] * WARP + np.arange(8 * count)).ravel()
    at = pointers[lanes]
    if ((at < 0) | (at + 16 > ex.shared.size) | (at % 16 != 0)).any():
        ex.find(f"out of bounds or misaligned {what}")
        return lanes, None
    return lanes, at + ex.shared.window[lanes]


def multiply(ex: "Executor", s: Statement) -> Run:
    mods = s.opcode.split(".")[1:]
    shape = ["sync", "aligned", "m16n8k16", "row", "col", "f32"]
    if mods[:6] != shape or mods[8] != "f32" or mods[6] != mods[7]:
        raise Unsupported("of another form")
    half = FROM_HALF[mods[6]]
    vectors = [operand if isinstance(operand, tuple) else (operand,) for operand in s.operands]
    A, B, C = ([ex.source(register, np.uint32) for register in vector] for vector in vectors[1:])

    def run(m: Mask) -> None:
        ex.whole_warps(m, "mma")
        ex.require(registers_in(*s.operands[1:]), m)
        W = ex.size // WARP

        def halves(gets: list) -> Array:
            words = np.stack([ex.everywhere(get(m)) for get in gets], 1)
            return half(np.ascontiguousarray(words).view(np.uint16)).reshape(W, 8, 4, len(gets), 2)

        # A lane is (group, thread of the group); its words hold two neighbours of a row, and rows 8 apart.
        a = halves(A).reshape(W, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(W, 16, 16).astype(np.float64)
        b = halves(B).transpose(0, 3, 2, 4, 1).reshape(W, 16, 8).astype(np.float64)
        c = np.stack([ex.everywhere(get(m)) for get in C], 1).view(np.float32).reshape(W, 8, 4, 2, 2)
        out = rounded(ex, c.transpose(0, 3, 1, 2, 4).reshape(W, 16, 8).astype(np.float64) + a @ b)
        out = out.reshape(W, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(ex.size, 4)
        for i, register in enumerate(vectors[0]):
            ex.write(register, np.ascontiguousarray(out[:, i]).view(np.uint32), m)

    return run


def rounded(ex: "Executor", exact: Array) -> Array:
    out = exact.astype(np.float32)
    return towards_zero(out, exact) if ex.options.truncate else out


HANDLERS = {
    "shfl": shuffle,
    "redux": reduce,
    "elect": elect,
    "ldmatrix": load_matrices,
    "stmatrix": store_matrices,
    "mma": multiply,
}
