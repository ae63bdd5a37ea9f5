"""Conversions and sums that round as the GPU rounds."""

from typing import Any

import numpy as np

Array = Any
NAN = {  # the NaN that instructions return
    np.float32: np.array([0x7FFFFFFF], np.uint32).view(np.float32), np.float64: np.array([np.nan]),
}  # fmt: skip
_TIE, _LOW = np.uint64(0x10000000), np.uint64(0x1FFFFFFF)  # the bits of a double that fp32 has no room for


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a b + c, rounded once: in double, whose last bit is corrected where rounding twice would show."""
    p, c = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    s = np.atleast_1d(p + c)
    risky = ((s.view(np.uint64) & _LOW) == _TIE) | (np.abs(s) < 2.0**-125)
    if risky.any():
        i = np.flatnonzero(risky)
        pi, ci, si = np.broadcast_to(p, s.shape)[i], np.broadcast_to(c, s.shape)[i], s[i]
        other = si - pi
        error = (pi - (si - other)) + (ci - other)
        fix = np.isfinite(si) & (error != 0) & ((si.view(np.uint64) & np.uint64(1)) == 0)
        away = (error > 0) == (si > 0)
        s[i] = (si.view(np.int64) + np.where(fix, np.where(away, 1, -1), 0)).view(np.float64)
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


def towards_zero(rounded: Array, exact: Array) -> Array:
    """fp32 of `exact` without its rounding up: what tensor cores may do with sums."""
    return np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0)), rounded)
