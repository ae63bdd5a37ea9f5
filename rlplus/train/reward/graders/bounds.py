r"""Bounds on what sympy is given: a policy learns to write `\boxed{10^{-1000000000}}`, which would take hours.

Math-Verify's parser computes nothing, so the digits and terms of a result are estimated from its tree beforehand.
"""

import re
from math import comb, inf, log10
from typing import Any, NamedTuple

LONGEST = 5000  # characters of an expression
DEEPEST = 40  # brackets within each other
DIGITS_IN_A_ROW = 1000  # digits of a number
COMMAS = 200
BARS = 12  # bars of absolute values
POWERS = 10  # within each other
DIGITS = 10_000  # digits of a result
TERMS = 250  # terms of a result
_LETTER = 0.5  # digits of a value without a size, as the base of a power: x, pi, e
_BAR = re.compile(r"\||\\[lr]?vert\b")
_SIGNS = re.compile(rf"(?:[-+]\s*){{{DEEPEST + 1}}}")
_HIGHEST = 300.0  # logarithms above this are numbers that no computer counts to


class _Size(NamedTuple):
    """digits: of numerator and denominator together. terms: of the sum that it is multiplied out; 0 for a number."""

    digits: float
    terms: float


class _TooLarge(ValueError):
    pass


def too_large(value: Any) -> str | None:
    """The reason for which a value is not computed; None if it may be."""
    try:
        _size(value)
    except _TooLarge as error:
        return str(error)
    except RecursionError:
        return "want an expression that is nested less deeply"
    return None


def too_long(text: str) -> str | None:
    """The reason for which an expression is not parsed; None if it may be."""
    if len(text) > LONGEST:
        return f"want an expression of at most {LONGEST:,} characters; got {len(text):,}"
    if (digits := max(map(len, re.findall(r"\d+", text)), default=0)) > DIGITS_IN_A_ROW:
        return f"want numbers written with at most {DIGITS_IN_A_ROW:,} digits; got {digits:,}"
    if _SIGNS.search(text):
        return f"want at most {DEEPEST} signs in a row"
    for most, got, what in (
        (COMMAS, text.count(","), "commas"),
        (BARS, len(_BAR.findall(text)), "bars of absolute values"),
        (DEEPEST, _deepest(text), "brackets around an expression"),
        (POWERS, _deepest(text, powers=True), "powers within each other"),
    ):
        if got > most:
            return f"want at most {most} {what}; got {got:,}"
    return None


def _deepest(text: str, *, powers: bool = False) -> int:
    """The largest number of brackets around a place; powers: of those that are exponents."""
    opened = list[int]()
    deepest = 0
    before = ""
    for sign in text:
        if sign in "{([":
            opened.append((opened[-1] if opened else 0) + (before == "^" or not powers))
            deepest = max(deepest, opened[-1])
        elif sign in "})]" and opened:
            opened.pop()
        before = before if sign == " " else sign
    return deepest


def _size(node: Any) -> _Size:
    """The size of a node whose parts are small enough; `_TooLarge` for one that is not."""
    parts = [_size(part) for part in getattr(node, "args", ())]
    size = _size_of(node, parts)
    if size.digits > DIGITS:
        raise _TooLarge(f"want numbers of at most {DIGITS:,} digits")
    if size.terms > TERMS:
        raise _TooLarge(f"want at most {TERMS:,} terms in a product that is multiplied out")
    return size


def _size_of(node: Any, parts: list[_Size]) -> _Size:
    digits = sum(part.digits for part in parts)
    name = type(node).__name__
    if getattr(node, "is_Rational", False):
        return _Size(log10(max(abs(node.p), node.q)), 0)
    if getattr(node, "is_Float", False):
        _, _, exponent, bits = node._mpf_
        return _Size(abs(exponent + bits) * log10(2), 0)
    if name == "Add":
        sums = sum(part.terms for part in parts)
        return _Size(digits + log10(len(parts)), sums + any(not part.terms for part in parts) * bool(sums))
    if name in ("Mul", "MatMul"):
        factors = 1.0
        for part in parts:
            factors *= part.terms or 1
        return _Size(digits, factors if any(part.terms for part in parts) else 0)
    if name in ("Pow", "MatPow"):
        return _power(parts[0], node.args[1], parts[1])
    if name == "exp":
        return _power(_Size(0, 1), node.args[0], parts[0])
    if name in ("factorial", "factorial2", "subfactorial", "gamma"):
        return _Size(_count(digits) * max(digits, _LETTER), 0)
    if name == "binomial":
        above, below = parts
        return _Size(min(_count(above.digits) * log10(2), _count(below.digits) * max(above.digits, _LETTER)), 0)
    if name in ("Integral", "Limit", "Derivative"):
        raise _TooLarge("want an expression without integrals, limits and derivatives to compute")
    if name in ("Sum", "Product"):  # a body, and (variable, from, to) for each variable
        if not all(end.is_number and end.is_finite for limits in node.args[1:] for end in limits.args[1:]):
            raise _TooLarge("want sums and products from a number to a number")
        steps = digits - parts[0].digits
        return _Size(_count(steps) * (parts[0].digits + steps + _LETTER), 1)
    return _Size(digits, 1)


def _power(base: _Size, exponent: Any, size: _Size) -> _Size:
    if getattr(exponent, "is_Rational", False):
        times = 10 ** min(log10(max(abs(exponent.p), 1)) - log10(exponent.q), _HIGHEST)
    else:
        times = _count(size.digits)
    terms = base.terms
    if terms > 1 and times > 1:
        whole = int(times) if times <= TERMS else TERMS + 1
        terms = comb(whole + int(terms) - 1, whole)
    return _Size(max(base.digits, _LETTER) * times if times > 1 else base.digits, terms)


def _count(digits: float) -> float:
    """The largest number with so many digits."""
    return 10**digits if digits < _HIGHEST else inf
