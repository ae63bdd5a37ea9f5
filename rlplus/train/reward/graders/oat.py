r"""The grader of oat and LUFFY: the last box, compared as text in two normal forms, by sympy, and by Math-Verify.

The rules were read from `boxed_reward_fn(..., fast=False)` in oat/utils/math_grader.py (github.com/sail-sg/oat), which
joins the graders of MATH (Hendrycks et al. 2021), PRM800K (Lightman et al. 2023) and Math-Verify. The differences:
LaTeX becomes text without pylatexenc, and only units of measure are removed; oat also removes single letters, which may
be variables. Characters that stand for LaTeX are read, words are no products of letters, small numbers are compared by
their digits, and `5 \text{ or } 6` is not 5.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from math import isnan
from typing import Any

from .base import NO_BOX, Grade, last_box
from .bounds import too_large, too_long
from .math import load_math_verify, same_value
from .unicode_latex import as_latex
from .words import letters_of, reordered, same_words, stands_for_none, word_of

_UNITS = (
    "degree|deg|mile|mph|kmph|kmh|ft|foot|feet|inch|inche|yard|cm|mm|dm|km|kg|gm|lb|ounce|meter|metre|centimeter|liter|litre|"
    "gallon|gal|acre|hectare|second|sec|minute|min|hour|hr|day|week|month|year|yr|percent|dollar|cent|unit|square|sq|cubic|ohm"
)
_UNIT_WORDS = re.compile(rf"(^|\W)(?:{_UNITS})s?($|\W)")
_MEASURES = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
_MEASURE_WORDS = re.compile(rf"(?:{_MEASURES})(?:es)?s? *(?:\^[0-9]+)?")
_GROUPED = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"-?\d+.?/0*[1-9]\d*.?")
_SYMBOLS = {
    "\\pi": "pi", "\\infty": "inf", "\\cup": "U", "\\cdot": "*", "\\times": "*", "\\leq": "≤", "\\le": "≤",
    "\\geq": "≥", "\\ge": "≥", "\\neq": "≠", "\\ne": "≠", "\\pm": "±", "\\in": "∈", "\\left": "", "\\right": "",
}  # fmt: skip
# Words between two answers, whichever they are: MATH's grader drops all behind a word, which rewards a second answer.
_CONJUNCTION = re.compile(
    r"\\text\{(?:\s*(?:or|and)\s*\}|[^{}]*\}(?=\s*[-+]?\s*(?:\d|\\d?frac|\\sqrt|\\pi)))", re.IGNORECASE
)
_HARD = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+|\*\*|!")  # powers and factorials on which sympy may hang
_MOST_LETTERS = 2  # also: no Python names reach sympy, whose parser evaluates what it reads


def oat(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
    """Right if one of the three graders finds the last box equal to the answer."""
    gold = last_box(answer) if "\\boxed" in answer else answer.strip()
    if gold and stands_for_none(gold):
        return 0.0, "bad_gold", f"the reference {answer!r} stands for a missing answer"
    if not gold:
        return 0.0, "bad_gold", f"there is no answer in the reference {answer!r}"
    given = last_box(text) if "\\boxed" in text else None
    if given is None:
        return NO_BOX
    return float(equal(given, gold)), "ok", ""


@lru_cache(maxsize=4096)
def equal(given: str, gold: str) -> bool:
    """The verdict on the contents of two boxes."""
    given = _CONJUNCTION.sub(" , ", as_latex(given))
    gold = _CONJUNCTION.sub(" , ", as_latex(gold))
    if (word := word_of(gold)) is not None:
        return letters_of(given) == word
    if reordered(given, gold):
        return False
    return (
        same_words(given, gold)
        or _math_form(given) == _math_form(gold)
        or _prm_equal(given, gold)
        or _math_verify_equal(given, gold)
    )


def _math_form(text: str) -> str:
    """The normal form of MATH's grader."""
    text = text.strip()
    if whole := re.fullmatch(r"\\text\{(.+?)\}", text):
        text = whole[1].strip()
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\begin\{array\}\{.*?\}", r"\\begin{pmatrix}", text)
    text = text.replace("\\end{array}", "\\end{pmatrix}").replace("bmatrix", "pmatrix")
    text = re.sub(r"[td]frac", "frac", text)
    text = text.replace("\\neq", "\\ne").replace("\\leq", "\\le").replace("\\geq", "\\ge")
    text = text.replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\text\{.*?\}$", "", text).strip() or text
    for _ in range(2):
        text = _UNIT_WORDS.sub(r"\1\2", text) or text
    text = re.sub(r"\^\{?\\circ\}?", "", text).replace("\\$", "").replace("\\%", "")
    text = text.partition("\\text{ ")[0] or text
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _prm_form(text: str) -> str:
    """The normal form of PRM800K's grader."""
    if whole := re.search(r"^\\text\{(.+?)\}$", text):
        text = whole[1]
    text = text.replace("\\%", "").replace("\\$", "").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    text = re.sub(r"\^ *\\circ", "", _MEASURE_WORDS.sub("", text))
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (number := _number(text)) is not None and _is_whole(number):
        text = str(round(number))
    if "\\" in text:
        text = _plain_text(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4
    text = re.sub("[ {}]", "", text).lower()
    number = _number(_without_commas(text))
    return str(int(number)) if number is not None and _is_whole(number) else text


def _prm_equal(given: str, gold: str) -> bool:
    one = _prm_form(given)
    other = _prm_form(gold)
    if one == other:
        return True
    ours = _elements(one)
    theirs = _elements(other)
    if not one or len(ours) != len(theirs) or (len(theirs) > 1 and (one[0], one[-1]) != (other[0], other[-1])):
        return False
    return all(map(_element_equal, ours, theirs))


def _element_equal(given: str, gold: str) -> bool:
    """A fraction must be reduced as the answer's is, and a whole number written out."""
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(gold):
        return given == gold
    numbers = [_number(_without_commas(text)) for text in (given, gold)]
    whole = [number is not None and _is_whole(number) for number in numbers]
    return whole[0] == whole[1] and _sympy_equal(given, gold)


def _sympy_equal(given: str, gold: str) -> bool:
    from sympy import simplify
    from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr, standard_transformations

    difference = f"({gold})-({given})"
    letters = {c for c in difference.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > _MOST_LETTERS or _HARD.search(difference) or too_long(difference):
        return False
    rules = (*standard_transformations, implicit_multiplication_application)
    try:
        expression = parse_expr(difference.replace("^", "**"), transformations=rules, evaluate=False)
        return too_large(expression) is None and bool(simplify(expression.doit()) == 0)
    except Exception:  # an expression that sympy cannot read is not equal
        return False


def _math_verify_equal(given: str, gold: str) -> bool:
    library = load_math_verify()
    targets = (library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig())

    def read(text: str) -> list[Any]:
        text = text if "$" in text else f"${text}$"
        return list(library.parse(text, targets, "no_fallback", "first_match", parsing_timeout=None))

    theirs = read(gold)
    ours = read(given)
    return bool(theirs and ours and same_value(theirs, ours)[0])


def _plain_text(latex: str) -> str:
    """LaTeX as sympy can read it: fractions with a slash, roots and symbols by name, no other command."""
    text = re.sub(r"\\[td]?frac", r" \\frac", latex)
    for short in (r"\\frac *(\d)(\d)", r"\\frac *\{([^{}]*)\}(\d)"):
        text = re.sub(short, r"\\frac{\1}{\2}", text)
    while (inner := re.sub(r"\\frac *\{([^{}]*)\} *\{([^{}]*)\}", r"\1/\2", text)) != text or (
        inner := re.sub(r"\\sqrt *\{([^{}]*)\}", r"sqrt(\1)", text)
    ) != text:
        text = inner
    text = re.sub(r"\\sqrt *(\w)", r"sqrt(\1)", text)
    text = re.sub(r"\\[A-Za-z]+", lambda match: _SYMBOLS.get(match[0], ""), text)
    return re.sub(r"\\[,;:! ]", "", text).replace("\\", "").strip()


def _elements(text: str) -> list[str]:
    """Elements of a tuple or an interval; any other text is the only element."""
    text = _without_commas(text)
    inside = text[1:-1]
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not set(inside) & set("()[]"):
        return [element.strip() for element in inside.split(",")]
    return [text] if text else []


def _without_commas(text: str) -> str:
    while (shorter := _GROUPED.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if isnan(number) else number


def _is_whole(number: float) -> bool:
    if abs(number) == float("inf"):
        return False
    return abs(number - round(number)) <= 1e-7 and (round(number) != 0 or number == 0)
