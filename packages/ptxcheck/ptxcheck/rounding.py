"""Conversions and sums that round as the GPU rounds."""

from typing import Any

import numpy as np

Array = Any
NAN = {  # the NaN that instructions return
    np.float32: np.array([0x7FFFFFFF], np.uint32).view(np.float32), np.float64: np.array([np.nan]),
}  # fmt: skip
_TIE, _LOW = np.uint64(0x10000000), np.uint64(0x1FFFFFFF)  # the bits of a double that fp32 has no room for


def _odd(p: Array, c: Array, s: Array) -> Array:
    """s = p + c in double, its last bit set where the sum is not exact: it can be rounded again as if it were."""
    other = s - p
    error = (p - (s - other)) + (c - other)
    fix = np.isfinite(s) & (error != 0) & ((s.view(np.uint64) & np.uint64(1)) == 0)
    return (s.view(np.int64) + np.where(fix, np.where((error > 0) == (s > 0), 1, -1), 0)).view(np.float64)


def fma16(dtype: str, a: Array, b: Array, c: Array) -> Array:
    """The bits of a b + c of fp16 or bf16, rounded once."""
    a, b, c = (FROM_HALF[dtype](x).astype(np.float64) for x in (a, b, c))
    p = a * b  # exact
    s = _odd(p, c, p + c)
    if dtype == "f16":
        return np.where(np.isnan(s), np.uint16(0x7FFF), s.astype(np.float16).view(np.uint16))
    near = s.astype(np.float32)
    even = np.isfinite(s) & (near != s) & ((near.view(np.uint32) & np.uint32(1)) == 0)
    return to_bf16(np.where(even, np.nextafter(near, np.where(s > near, np.inf, -np.inf).astype(np.float32)), near))


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a b + c, rounded once: in double, whose last bit is corrected where rounding twice would show."""
    p, c = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    s = np.atleast_1d(p + c)
    risky = ((s.view(np.uint64) & _LOW) == _TIE) | (np.abs(s) < 2.0**-125)
    if risky.any():
        i = np.flatnonzero(risky)
        s[i] = _odd(np.broadcast_to(p, s.shape)[i], np.broadcast_to(c, s.shape)[i], s[i])
    return s.astype(np.float32)


def flush(x: Array) -> Array:
    """fp32 with subnormal numbers as 0 of the same sign."""
    x = np.asarray(x)
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def to_bf16(x: Array) -> Array:
    """The bits of fp32 rounded to bf16."""
    u = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def to_f16(x: Array) -> Array:
    """The bits of fp32 rounded to fp16."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.asarray(x, np.float32).astype(np.float16).view(np.uint16))


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


FROM_HALF = {"bf16": from_bf16, "f16": from_f16}


def to_integer(dtype: str, source: str, x: Array) -> Array:
    """An integral number as an integer: what is too large or too small is the largest or the smallest one."""
    bits, signed = int(dtype[1:]), dtype[0] == "s"
    least, limit = -(2 ** (bits - 1)) if signed else 0, 2 ** (bits - signed)
    kind = np.dtype(f"{'int' if signed else 'uint'}{bits}").type
    wide = x.astype(np.float64)
    inside = (wide >= least) & (wide < limit)
    out = np.where(inside, wide, 0).astype(kind)
    out = np.where(wide >= limit, kind(limit - 1), np.where(wide < least, kind(least), out))
    return np.where(
        np.isnan(wide), np.array(nan_as_integer(dtype, source) & (2**bits - 1), f"uint{bits}").view(kind), out
    )


def nan_as_integer(dtype: str, source: str) -> int:
    """0 if both are of 32 bits or fewer, else the highest bit of the result alone."""
    return 1 << (int(dtype[1:]) - 1) if source == "f64" or dtype[1:] == "64" else 0


def towards_zero(rounded: Array, exact: Array) -> Array:
    """fp32 of `exact` without its rounding up: what tensor cores may do with sums."""
    return np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0)), rounded)
