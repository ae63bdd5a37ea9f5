"""The arithmetic instructions, one row each: name, types, operands, what it does, and the same of Python's numbers.

`run` takes and gives arrays of all lanes. `exact` is its test and the semantics of the second evaluator (scalar.py): it
takes ints, bools and np.float64, and gives the number before it is wrapped or rounded to the type of the result.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from .rounding import fma16, fma32, from_bf16, from_f16, nan_as_integer, to_bf16, to_f16, to_integer

Array = Any
DTYPES: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "pred": bool,
    "bf16": np.uint16, "f16": np.uint16, "bf16x2": np.uint32, "f16x2": np.uint32, "f32x2": np.uint64,
    **{f"{kind}{bits}": getattr(np, f"{'int' if kind == 's' else 'uint'}{bits}")
       for kind in "sub" for bits in (8, 16, 32, 64)},
}  # fmt: skip


class Opcode(NamedTuple):
    """A row of the table.

    options: modifiers that may stand in the name: "rn" says how the hardware rounds anyway, "ftz" flushes subnormals.
    types: at the end of the name, "f32.s32" if there are two: of the result and of the operands. "f32x2" and the like:
    two numbers in one register; `run` and `exact` take each.
    operands: "result=operands": t the type, d and s the first and second of two, w an integer twice as wide, p a
    predicate, u a 32-bit number, i an immediate.
    bound: the largest error of an approximation, of its exact value and its operands; None: correctly rounded.
    """

    name: str
    options: str
    types: str
    operands: str
    run: Callable[..., Array]
    exact: Callable[..., Any]
    bound: Callable[..., Array] | None = None


INTEGERS, WORDS, BITS = "s16 u16 s32 u32 s64 u64", "s32 u32 s64 u64", "pred b16 b32 b64"
COMPARISONS: dict[str, tuple[Callable[..., Array], Callable[..., bool]]] = {
    "eq": (np.equal, lambda a, b: a == b), "ne": (np.not_equal, lambda a, b: a != b and a == a and b == b),
    "lt": (np.less, lambda a, b: a < b), "le": (np.less_equal, lambda a, b: a <= b),
    "gt": (np.greater, lambda a, b: a > b), "ge": (np.greater_equal, lambda a, b: a >= b),
}  # fmt: skip


def _unless_nan(compare: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))


def _or_nan(compare: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _fused(a: Any, b: Any, c: Any) -> Any:
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if exact:
            return exact
    return a * b + c  # the sign of 0, infinities, NaN


def _greater(greater: Callable[..., Array], sign: int) -> Callable[..., Array]:
    """The larger number, or with sign -1 the smaller; +0 is larger than -0."""

    def run(a: Array, b: Array) -> Array:
        out, zero = greater(a, b), (a == 0) & (b == 0)
        return np.where(zero, sign * (sign * a + sign * b), out) if zero.any() else out

    return run


def _exact_greater(a: Any, b: Any, sign: int, nan: bool) -> Any:
    if a != a or b != b:
        return math.nan if nan or (a != a and b != b) else a if b != b else b
    negative = math.copysign(1, a) < 0
    if a == b:
        return b if negative == (sign > 0) else a
    return a if (a > b) == (sign > 0) else b


def _quotient(a: Array, b: Array) -> Array:
    """Towards 0; the hardware's result for b = 0."""
    wide, by = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    q = np.abs(wide) // np.abs(by)
    return np.where(b == 0, -1, np.where((wide < 0) != (by < 0), -q, q)).astype(a.dtype)


def _exact_quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shift(shift: Callable[..., Array]) -> Callable[..., Array]:
    def run(a: Array, n: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        out = shift(a, np.minimum(n, bits - 1).astype(a.dtype))
        full = out if shift is np.right_shift and a.dtype.kind == "i" else a.dtype.type(0)
        return np.where(n >= bits, full, out)

    return run


def _field(x: Array, position: Array, length: Array) -> Array:
    """`length` bits from `position` on; past the end the sign, or 0."""
    wide, position, length = x.astype(np.int64), position.astype(np.int64) & 255, length.astype(np.int64) & 255
    out = (wide >> np.minimum(position, 63)) & ((1 << np.minimum(length, 32)) - 1)
    if x.dtype.kind == "i":
        top = np.minimum(position + length - 1, 31)
        negative = (length > 0) & (((wide >> np.maximum(top, 0)) & 1) != 0)
        out = np.where(negative & (length < 32), out | -(1 << np.minimum(length, 32)), out)
    return out.astype(x.dtype)


def _exact_field(x: int, position: int, length: int, signed: bool) -> int:
    position, length = position & 255, min(length & 255, 32)
    sign = (x >> min(position + length - 1, 31)) & 1 if signed and length else 0
    bits = [(x >> (position + i)) & 1 if position + i < 32 else sign for i in range(length)]
    return sum(bit << i for i, bit in enumerate(bits)) - (sign << length)


def _permute(a: Array, b: Array, pick: Array) -> Array:
    """Four bytes of eight; bit 3 of a pick: its sign, eight times."""
    both, out = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32)), np.uint64(0)
    for i in range(4):
        s = (pick >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (s & np.uint32(7)).astype(np.uint64))) & np.uint64(255)
        byte = np.where(s & np.uint32(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        out = out | (byte << np.uint64(8 * i))
    return out.astype(np.uint32)


def _exact_permute(a: int, b: int, pick: int) -> int:
    data = (a | b << 32).to_bytes(8, "little")
    chosen = [(pick >> 4 * i) & 15 for i in range(4)]
    return int.from_bytes([(255 * (data[s & 7] >> 7)) if s & 8 else data[s] for s in chosen], "little")


def _logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    out = np.zeros_like(a | b | c)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _exact_logic3(a: int, b: int, c: int, table: int) -> int:
    each = [table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1 for i in range(32)]
    return sum(bit << i for i, bit in enumerate(each))


def _relative(bits: float) -> Callable[..., Array]:
    return lambda value, *operands: np.abs(value) * 2.0**-bits


def _log_bound(value: Array, x: Array) -> Array:
    return 2.0**-22 * np.where((x > 0.5) & (x < 2), 1.0, np.abs(value))


def _f64(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: function(*(x.astype(np.float64) for x in operands))


def _mul_wide(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def _mul_high(a: Array, b: Array) -> Array:
    return (_mul_wide(a, b) >> np.array(8 * a.dtype.itemsize, _mul_wide(a, b).dtype)).astype(a.dtype)


def _exact_bf16(bits: int) -> np.float64:
    return np.float64(np.array(bits << 16, np.uint32).view(np.float32))


def _exact_f16(bits: int) -> np.float64:
    return np.float64(np.array(bits, np.uint16).view(np.float16))


def _halves(name: str, operands: str, order: Callable[..., tuple[Any, Any, Any]]) -> list[Opcode]:
    """Rows of fp16 and bf16: a product and a sum, rounded once, of what `order` makes of the operands and the bits of 1
    and of -0."""
    return [
        Opcode(name, "rn" * ("rn" not in name), f"{dtype} {dtype}x2", operands,
               lambda *x, dtype=dtype, one=one: fma16(dtype, *order(*x, np.uint16(one), np.uint16(0x8000))),
               lambda *x, one=one, number=number, digits=digits, bias=bias:
               half_bits(_fused(*map(number, order(*x, one, 0x8000))), digits, bias))
        for dtype, one, number, digits, bias in (
            ("f16", 0x3C00, _exact_f16, 11, 15), ("bf16", 0x3F80, _exact_bf16, 8, 127))
    ]  # fmt: skip


_INTEGRAL: dict[str, tuple[Callable[..., Array], Callable[..., Any]]] = {  # rounded towards 0, down, up, to nearest
    "rzi": (np.trunc, math.trunc), "rmi": (np.floor, math.floor), "rpi": (np.ceil, math.ceil), "rni": (np.rint, round),
}  # fmt: skip


def _exact_integral(exact: Callable[..., Any], x: Any) -> Any:
    """The integer as a number, with the sign of x if it is 0."""
    return np.float64(math.copysign(exact(x), x)) if math.isfinite(x) else x


def _exact_integer(exact: Callable[..., Any], dtype: str, source: str, x: Any) -> int:
    least, limit = (-(1 << int(dtype[1:]) - 1) if dtype[0] == "s" else 0), 1 << int(dtype[1:]) - (dtype[0] == "s")
    if math.isnan(x):
        return nan_as_integer(dtype, source)
    return min(max(exact(x) if math.isfinite(x) else limit if x > 0 else least, least), limit - 1)


TABLE = (
    Opcode("add", "", INTEGERS, "t=tt", np.add, lambda a, b: a + b),
    Opcode("sub", "", INTEGERS, "t=tt", np.subtract, lambda a, b: a - b),
    Opcode("mul.lo", "", INTEGERS, "t=tt", np.multiply, lambda a, b: a * b),
    Opcode("mul.hi", "", "s32 u32", "t=tt", _mul_high, lambda a, b: a * b >> 32),
    Opcode("mul.wide", "", "s16 u16 s32 u32", "w=tt", _mul_wide, lambda a, b: a * b),
    Opcode("mad.lo", "", INTEGERS, "t=ttt", lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
    Opcode("mad.wide", "", "s16 u16 s32 u32", "w=ttw", lambda a, b, c: _mul_wide(a, b) + c, lambda a, b, c: a * b + c),
    Opcode("div", "", "s32 u32", "t=tt", _quotient, _exact_quotient),
    Opcode("rem", "", "s32 u32", "t=tt", lambda a, b: np.where(b == 0, a, a - b * _quotient(a, b)),
           lambda a, b: a - b * _exact_quotient(a, b)),
    Opcode("neg", "", "s16 s32 s64", "t=t", np.negative, lambda a: -a),
    Opcode("abs", "", "s16 s32 s64", "t=t", np.abs, abs),
    Opcode("min", "", INTEGERS, "t=tt", np.minimum, min),
    Opcode("max", "", INTEGERS, "t=tt", np.maximum, max),
    Opcode("and", "", BITS, "t=tt", np.bitwise_and, lambda a, b: a & b),
    Opcode("or", "", BITS, "t=tt", np.bitwise_or, lambda a, b: a | b),
    Opcode("xor", "", BITS, "t=tt", np.bitwise_xor, lambda a, b: a ^ b),
    Opcode("not", "", BITS, "t=t", np.bitwise_not, lambda a: not a if isinstance(a, bool) else ~a),
    Opcode("shl", "", "b16 b32 b64", "t=tu", _shift(np.left_shift), lambda a, n: a << min(n, 64)),
    Opcode("shr", "", "b16 b32 b64 " + INTEGERS, "t=tu", _shift(np.right_shift), lambda a, n: a >> min(n, 64)),
    Opcode("bfe", "", "u32", "t=tuu", _field, lambda x, position, length: _exact_field(x, position, length, False)),
    Opcode("bfe", "", "s32", "t=tuu", _field, lambda x, position, length: _exact_field(x, position, length, True)),
    Opcode("prmt", "", "b32", "t=ttt", _permute, _exact_permute),
    Opcode("lop3", "", "b32", "t=ttti", _logic3, _exact_logic3),
    Opcode("popc", "", "b32", "t=t", lambda a: np.bitwise_count(a).astype(np.uint32), lambda a: a.bit_count()),
    Opcode("selp", "", "b16 b32 b64 s32 u32 s64 u64 f32 f64", "t=ttp", lambda a, b, p: np.where(p, a, b),
           lambda a, b, p: a if p else b),
    Opcode("mov", "", "pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64", "t=t", lambda a: a, lambda a: a),
    Opcode("add", "rn ftz", "f32 f64 f32x2", "t=tt", np.add, lambda a, b: a + b),
    Opcode("sub", "rn ftz", "f32 f64 f32x2", "t=tt", np.subtract, lambda a, b: a - b),
    Opcode("mul", "rn ftz", "f32 f64 f32x2", "t=tt", np.multiply, lambda a, b: a * b),
    Opcode("fma", "rn ftz", "f32 f32x2", "t=ttt", fma32, _fused),
    *_halves("add", "t=tt", lambda a, b, one, zero: (a, one, b)),
    *_halves("sub", "t=tt", lambda a, b, one, zero: (a, one, b ^ zero)),
    *_halves("mul", "t=tt", lambda a, b, one, zero: (a, b, zero)),
    *_halves("fma.rn", "t=ttt", lambda a, b, c, one, zero: (a, b, c)),
    Opcode("neg", "", "f16 bf16 f16x2 bf16x2", "t=t", lambda a: a ^ np.uint16(0x8000), lambda a: a ^ 0x8000),
    Opcode("abs", "", "f16 bf16 f16x2 bf16x2", "t=t", lambda a: a & np.uint16(0x7FFF), lambda a: a & 0x7FFF),
    Opcode("div.rn", "ftz", "f32 f64", "t=tt", np.divide, lambda a, b: a / b),
    Opcode("sqrt.rn", "ftz", "f32 f64", "t=t", np.sqrt, np.sqrt),
    Opcode("neg", "ftz", "f32 f64", "t=t", np.negative, lambda a: -a),
    Opcode("abs", "ftz", "f32 f64", "t=t", np.abs, abs),
    Opcode("min", "ftz", "f32 f64", "t=tt", _greater(np.fmin, -1), lambda a, b: _exact_greater(a, b, -1, False)),
    Opcode("max", "ftz", "f32 f64", "t=tt", _greater(np.fmax, 1), lambda a, b: _exact_greater(a, b, 1, False)),
    Opcode("min.NaN", "ftz", "f32", "t=tt", _greater(np.minimum, -1),
           lambda a, b: _exact_greater(a, b, -1, True)),
    Opcode("max.NaN", "ftz", "f32", "t=tt", _greater(np.maximum, 1),
           lambda a, b: _exact_greater(a, b, 1, True)),
    Opcode("div.full", "ftz", "f32", "t=tt", _f64(np.divide), lambda a, b: a / b, _relative(22)),
    Opcode("rcp.approx", "ftz", "f32", "t=t", _f64(np.reciprocal), lambda a: 1 / a, _relative(23)),
    Opcode("sqrt.approx", "ftz", "f32", "t=t", _f64(np.sqrt), np.sqrt, _relative(22)),
    Opcode("rsqrt.approx", "ftz", "f32", "t=t", lambda a: 1 / np.sqrt(a.astype(np.float64)), lambda a: 1 / np.sqrt(a),
           _relative(22)),
    Opcode("ex2.approx", "ftz", "f32", "t=t", _f64(np.exp2), np.exp2, _relative(22)),
    Opcode("lg2.approx", "ftz", "f32", "t=t", _f64(np.log2), np.log2, _log_bound),
    *(Opcode(f"setp.{name}", "", INTEGERS + " b16 b32 b64", "p=tt", run, exact)
      for name, (run, exact) in COMPARISONS.items()),
    *(Opcode(f"setp.{name}", "ftz", "f32 f64", "p=tt", _unless_nan(run), exact)
      for name, (run, exact) in COMPARISONS.items()),
    *(Opcode(f"setp.{name}u", "ftz", "f32 f64", "p=tt", _or_nan(run),
             lambda a, b, exact=exact: exact(a, b) or a != a or b != b)
      for name, (run, exact) in COMPARISONS.items()),
    *(Opcode(f"setp.{name}", "", "bf16", "p=tt", lambda a, b, run=run: _unless_nan(run)(from_bf16(a), from_bf16(b)),
             lambda a, b, exact=exact: exact(_exact_bf16(a), _exact_bf16(b)))
      for name, (run, exact) in COMPARISONS.items()),
    Opcode("setp.num", "ftz", "f32 f64", "p=tt", lambda a, b: ~(np.isnan(a) | np.isnan(b)),
           lambda a, b: a == a and b == b),
    Opcode("setp.nan", "ftz", "f32 f64", "p=tt", lambda a, b: np.isnan(a) | np.isnan(b),
           lambda a, b: a != a or b != b),
    Opcode("cvt", "", " ".join(f"{d}.{s}" for d in ("s16", "u16", "s32", "u32", "s64", "u64")
                               for s in ("s8", "u8", *INTEGERS.split())),
           "d=s", lambda a: a, lambda a: a),
    Opcode("cvt.rn", "", "f32.s32 f32.u32 f32.s64 f32.u64 f64.s32 f64.u32", "d=s", lambda a: a, Fraction),
    *(Opcode(f"cvt.{mode}", "ftz", "f32.f32 f64.f64", "d=s", run, lambda x, exact=exact: _exact_integral(exact, x))
      for mode, (run, exact) in _INTEGRAL.items()),
    *(Opcode(f"cvt.{mode}", "ftz", f"{d}.{s}", "d=s", lambda x, run=run, d=d, s=s: to_integer(d, s, run(x)),
             lambda x, exact=exact, d=d, s=s: _exact_integer(exact, d, s, x))
      for mode, (run, exact) in _INTEGRAL.items() for d in INTEGERS.split() for s in ("f32", "f64")),
    Opcode("cvt", "", "f64.f32", "d=s", lambda a: a, lambda a: a),
    Opcode("cvt.rn", "", "f32.f64", "d=s", lambda a: a, lambda a: a),
    Opcode("cvt", "", "f32.bf16", "d=s", from_bf16, _exact_bf16),
    Opcode("cvt", "", "f32.f16", "d=s", from_f16, _exact_f16),
    Opcode("cvt.rn", "", "bf16.f32", "d=s", to_bf16, lambda a: half_bits(a, 8, 127)),
    Opcode("cvt.rn", "", "f16.f32", "d=s", to_f16, lambda a: half_bits(a, 11, 15)),
    Opcode("cvt.rn", "", "bf16x2.f32", "d=ss", lambda a, b: _pair(to_bf16(a), to_bf16(b)),
           lambda a, b: half_bits(a, 8, 127) << 16 | half_bits(b, 8, 127)),
    Opcode("cvt.rn", "", "f16x2.f32", "d=ss", lambda a, b: _pair(to_f16(a), to_f16(b)),
           lambda a, b: half_bits(a, 11, 15) << 16 | half_bits(b, 11, 15)),
)  # fmt: skip


def _pair(high: Array, low: Array) -> Array:
    return (high.astype(np.uint32) << np.uint32(16)) | low


def half_bits(x: float | Fraction, digits: int, bias: int) -> int:
    """The 16 bits of a number rounded to so many binary digits, to nearest, ties to even; exponents up to `bias`."""
    if math.isnan(x):
        return 0x7FFF
    sign, infinity = (0x8000 if math.copysign(1, x) < 0 else 0), (2 * bias + 1) << (digits - 1)
    if math.isinf(x):
        return sign | infinity
    exact = abs(x) if isinstance(x, Fraction) else Fraction(abs(float(x)))
    if not exact:
        return sign
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()  # or one less
    exponent = max(exponent - (exact < Fraction(2) ** exponent), 1 - bias)
    steps = round(exact / Fraction(2) ** (exponent - digits + 1))  # Python rounds to even
    # A carry into the exponent comes out right: the bits count up.
    return sign | min(steps + ((exponent + bias - 1) << (digits - 1)), infinity)


def lookup(opcode: str) -> tuple[Opcode, tuple[str, ...], set[str]] | None:
    """The row of an instruction, its types and its options; None if no row has it."""
    parts = opcode.split(".")
    for row in _ROWS.get(parts[0], ()):
        types = next((t for t in row.types.split() if opcode.endswith("." + t)), "")
        middle = opcode[: -len(types) - 1].split(".") if types else []
        options = {part for part in middle if part in row.options.split()}
        if types and ".".join(part for part in middle if part not in options) == row.name:
            return row, tuple(types.split(".")), options
    return None


_ROWS: dict[str, list[Opcode]] = {}
for _row in TABLE:
    _ROWS.setdefault(_row.name.partition(".")[0], []).append(_row)
