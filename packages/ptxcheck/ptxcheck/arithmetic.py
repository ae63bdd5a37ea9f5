"""The rows of the table of opcodes as instructions of the executor; `mov` of vectors beside them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .checked_memory import UNSIGNED
from .lanes import Array, Mask, Source, registers_in
from .opcodes import DTYPES, Opcode, lookup
from .program import Operand, Statement, Unsupported
from .rounding import NAN, flush

if TYPE_CHECKING:
    from .executor import Executor


def arithmetic(ex: "Executor", s: Statement) -> Callable[[Mask], None]:
    found = lookup(s.opcode)
    if found is None:
        raise Unsupported("no row of the table has it")
    row, types, options = found
    if s.kind == "mov" and any(isinstance(operand, tuple) for operand in s.operands):
        return _move_vector(ex, s.operands, DTYPES[types[0]])
    result, wanted = row.operands.split("=")
    three = row.name in ("min", "max", "min.NaN", "max.NaN") and types == ("f32",) and len(s.operands) == 4  # sm_100
    wanted += "t" * three
    to, operands = s.operands[0], s.operands[1:]
    if isinstance(to, tuple) or "|" in to or len(operands) != len(wanted):
        raise Unsupported(f"{len(operands)} operands, or a vector among them; want {len(wanted)} registers or numbers")
    kinds = _kinds(types)
    cut = s.kind == "cvt"
    immediate = [int(str(o), 0) for o, k in zip(operands, wanted, strict=True) if k == "i"]
    gets = [ex.source(o, kinds[k], not cut) for o, k in zip(operands, wanted, strict=True) if k != "i"]
    pairs = types[0] if len(types) == 1 and types[0].endswith("x2") else None
    function = _rounded(ex, row, DTYPES[pairs.removesuffix("x2")] if pairs else kinds[result], options)
    function = _of_pairs(function, pairs) if pairs else _of_three(function) if three else function
    out = _written(ex, to, kinds[result], cut)
    sources = registers_in(*operands)
    if row.name == "selp":
        return _select(ex, to, gets, out, operands)
    return lambda m: ex.write(to, out(function(*(get(m) for get in gets), *immediate)), m, sources)


def _kinds(types: tuple[str, ...]) -> dict[str, Any]:
    """numpy's types by the letters of `Opcode.operands`."""
    kinds: dict[str, Any] = {"t": DTYPES[types[0]], "d": DTYPES[types[0]], "s": DTYPES[types[-1]]}
    kinds |= {"p": bool, "u": np.uint32}
    if types[0][0] in "su" and types[0] != "s64" and types[0] != "u64":
        one = np.dtype(DTYPES[types[0]])
        kinds["w"] = np.dtype(f"{one.kind}{2 * one.itemsize}").type
    return kinds


def _rounded(ex: "Executor", row: Opcode, dtype: Any, options: set[str]) -> Callable[..., Array]:
    """The row's function with its approximation's error, flushes, and one NaN for all, as the hardware has it."""
    run, bound = row.run, row.bound
    moves = row.name in ("mov", "selp")

    def function(*operands: Array) -> Array:
        if "ftz" in options:
            operands = tuple(flush(x) for x in operands)
        out = run(*operands)
        if bound is not None:
            out = out + np.where(np.isfinite(out), ex.error(out.shape) * bound(out, *operands), 0.0)
        out = np.asarray(out, dtype)
        if dtype in NAN and not moves:
            nan = np.isnan(out)
            if nan.any():
                out = np.where(nan, NAN[dtype], out)
            if "ftz" in options:
                out = flush(out)
        return out

    return function


def _of_pairs(function: Callable[..., Array], kind: str) -> Callable[..., Array]:
    """The function of both numbers of each register."""
    one, two = DTYPES[kind.removesuffix("x2")], DTYPES[kind]

    def both(*operands: Array) -> Array:
        return np.asarray(function(*(np.ascontiguousarray(x).view(one) for x in operands))).view(two)

    return both


def _of_three(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b, c: function(function(a, b), c)


def _written(ex: "Executor", to: str, dtype: Any, extend: bool) -> Callable[[Array], Array]:
    """From the type of the result to the register's bits; `extend`: the register may be wider."""
    if to == "_":
        return lambda x: x
    width = ex.program.width(to)
    if dtype is bool:
        if width != 1:
            raise Unsupported(f"{to} is no predicate")
        return lambda x: x
    bits = 8 * np.dtype(dtype).itemsize
    if width == bits:
        return lambda x: np.ascontiguousarray(x).view(UNSIGNED[bits])
    if not extend or width < bits:
        raise Unsupported(f"{to} has {width} bits; want a register of {bits}")
    wide = np.dtype(f"{np.dtype(dtype).kind}{width // 8}")
    return lambda x: np.ascontiguousarray(x.astype(wide)).view(UNSIGNED[width])


def _select(
    ex: "Executor", to: str, gets: list[Source], out: Callable[[Array], Array], operands: tuple[Operand, ...]
) -> Callable[[Mask], None]:
    """Only what is selected must have been written."""
    first, second, predicate = gets
    names = [registers_in(operand) for operand in operands]

    def run(m: Mask) -> None:
        p = predicate(m)
        ex.write(to, out(np.where(p, first(m), second(m))), m)
        if ex.unwritten:
            none = np.zeros(ex.size, bool)
            taints = [none if (t := ex.taint(name)) is None else t for name in names]
            ex.set_taint(to, np.where(p, taints[0], taints[1]) | taints[2], m)

    return run


def _move_vector(ex: "Executor", operands: tuple[Operand, ...], dtype: Any) -> Callable[[Mask], None]:
    to, what = operands
    if isinstance(to, tuple):
        get, n = ex.source(what, dtype), len(to)
        part = UNSIGNED[8 * np.dtype(dtype).itemsize // n]

        def unpack(m: Mask) -> None:
            parts, unwritten = (
                np.ascontiguousarray(ex.everywhere(get(m))).view(part).reshape(ex.size, n),
                ex.parts.get(what),
            )
            for i, register in enumerate(to):
                ex.write(register, np.ascontiguousarray(parts[:, i]), m, registers_in(what))
                if unwritten is not None and register != "_":
                    ex.set_taint(register, unwritten[i], m)

        return unpack
    part = UNSIGNED[8 * np.dtype(dtype).itemsize // len(what)]
    gets = [ex.source(one, part) for one in what]

    def pack(m: Mask) -> None:
        parts = np.stack([ex.everywhere(get(m)) for get in gets], 1)
        taints = [ex.taint(registers_in(one)) for one in what] if ex.unwritten and m is None else []
        ex.write(str(to), np.ascontiguousarray(parts).view(dtype)[:, 0], m, registers_in(what))
        if any(taint is not None for taint in taints):
            ex.parts[str(to)] = [np.zeros(ex.size, bool) if taint is None else taint for taint in taints]

    return pack
