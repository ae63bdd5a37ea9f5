r"""Math-Verify: equality of mathematical values by sympy, of any expression, of the last box, or of a plain value.

If a text has one box and nothing that Math-Verify would read before it, the verdict depends only on the box and the
answer, and is cached for the next response with that box. Two whole numbers are compared as numbers, and texts that
Math-Verify normalises to the same text are equal: neither needs its parser.
tests/reward/test_math_grading.py compares both.

Five things are not Math-Verify's: characters that stand for LaTeX are read, words are compared as words, small numbers
by their digits, what is too large to compute (bounds.py) as it is written, and 2(3) is 6.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from .base import NO_BOX, Grade, Grader, boxes, last_box
from .bounds import too_large, too_long
from .unicode_latex import as_latex
from .words import is_prose, letters_of, reordered, same_words, stands_for_none, word_of

_KEPT = 4096  # answers and verdicts
_WHOLE = re.compile(r"(-?\d{1,9})(?:\.0+)?")
_ONE_NUMBER = re.compile(r"\(?\d+\)?")  # as the parser gives its text: without spaces
_BLANKS = re.compile(r"[ \t]{2,}")
_OPENED = (("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"))
_MOST_OPEN = 100
_READ_FIRST = re.compile("final answer", re.IGNORECASE)  # Math-Verify reads what follows it first, or too
_PERCENT = re.compile("%|percent|pct", re.IGNORECASE)  # part of the number, if it follows the box
_SMALL = 1e-4  # numbers below this are compared by their share of the larger one
_DIGITS = 5e-4
_FORMULA_MARKS = ("$", "[", "]", "\n", "\\(", "\\)")  # a formula could end there, inside the box


@cache
def load_math_verify() -> Any:
    """The package, quiet and with a faster parser, which computes nothing.

    ANTLR's SLL prediction is tried first. It either builds the tree of LL prediction, the default, or reports an error
    (documentation of PredictionMode.SLL), and does without lookahead in full context, which no cache spares.
    """
    import math_verify
    import sympy
    from antlr4 import PredictionMode
    from latex2sympy2_extended import latex2sympy2

    class TwoStageParser(latex2sympy2.PSParser):
        def math(self) -> Any:
            self._interp.predictionMode = PredictionMode.SLL
            try:
                return super().math()
            except Exception:  # its error listener raises no class of its own
                self.reset()
                self._interp.predictionMode = PredictionMode.LL
                return super().math()

    class BoundedConverter(latex2sympy2._Latex2Sympy):
        def parse(self, latex: str) -> Any:
            _refuse(too_long(latex))
            return super().parse(latex)

        def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
            texts = [part.getText() for part in arr[i : i + 2]]
            if len(texts) == 2 and _ONE_NUMBER.fullmatch(texts[0]) and texts[1].startswith(("(", "\\left(")):
                return self.mul_flat(self.convert_postfix(arr[i]), self.convert_postfix_list(arr, i + 1))
            return super().convert_postfix_list(arr, i)  # there 2(3) is 2 and 3, as 2\frac{1}{2} is 2 and 1/2

        def convert_frac(self, frac: Any) -> Any:
            value = super().convert_frac(frac)
            rate = isinstance(value, sympy.Derivative) and value.expr.is_Symbol  # dy/dx, which sympy takes for 0
            return sympy.Symbol(str(value)) if rate else value

        def convert_binom(self, binom: Any) -> Any:
            return sympy.binomial(*map(self.convert_expr, (binom.upper, binom.lower)), evaluate=False)

        def handle_exp(self, func: Any) -> Any:
            with sympy.evaluate(False):
                return super().handle_exp(func)

        def handle_gcd_lcm(self, f: str, args: Any) -> Any:
            _refuse(next(filter(None, map(too_large, args)), None))
            return super().handle_gcd_lcm(f, args)

    latex2sympy2.PSParser = TwoStageParser
    latex2sympy2._Latex2Sympy = BoundedConverter
    # math-verify's own timeouts are signals, swallowed as "not equal"; here the parent kills and counts instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    return math_verify


def _refuse(reason: str | None) -> None:
    if reason:
        raise ValueError(reason)


def math_verify(*, box: bool = False, plain: bool = False) -> Grader:
    r"""box: only the last box counts. plain: of the boxes only a plain value: `\boxed{3+4}` is not 7."""
    values = _Values()
    only_box = box or plain
    grade = partial(values.grade_box, plain=plain) if only_box else values.grade

    def verdict(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        text = as_latex(text)
        answer = as_latex(answer).strip()
        alone = last_box(answer) or answer
        if stands_for_none(alone):
            return 0.0, "bad_gold", f"the reference {answer!r} stands for a missing answer"
        if (word := word_of(alone)) is not None:
            return values.grade_word(text, word, only_box=only_box)
        content = last_box(text) or ""
        if reordered(content, alone):
            return 0.0, "ok", "the letters of the answer in another order"
        if same_words(content, alone):
            return 1.0, "ok", ""
        value, status, detail = grade(text, answer)
        if not value and status != "bad_gold" and is_prose(answer):
            return (
                0.0,
                "bad_gold",
                f"the reference {answer!r} is prose: math-verify reads a product of letters",
            )
        return value, status, detail

    return verdict


class _Values:
    """Math-Verify, which the constructor imports, with caches of parsed texts and verdicts."""

    def __init__(self) -> None:
        math_verify = load_math_verify()
        from latex2sympy2_extended.latex2sympy2 import normalize_latex

        self._normalize = normalize_latex
        self._normalization = math_verify.LatexExtractionConfig().normalization_config
        self._parse = partial(math_verify.parse, parsing_timeout=None)
        self._only_boxes = [math_verify.LatexExtractionConfig(try_extract_without_anchor=False)]
        kept = lru_cache(maxsize=_KEPT)
        self._normal = kept(self._normal_of)
        self._read_box = kept(self._box_read)
        self._read_gold = kept(self._gold_read)
        self._box_verdict = kept(self._judge_box)
        self._last_box_verdict = kept(self._judge_last_box)

    def grade(self, text: str, answer: str) -> Grade:
        """Math-Verify's verdict."""
        content = _only_box(text)
        verdict = self._box_verdict(content, answer) if content and answer else None
        if verdict and verdict[0]:
            return verdict
        if not self._has_value(answer):
            return 0.0, "bad_gold", f"math-verify finds no answer in the reference {answer!r}"
        if verdict is not None:
            return verdict
        found, problem = self._text_read(text)
        if not found:
            return 0.0, "unparsed", problem
        return same_value(self._read_gold(answer), found)

    def grade_box(self, text: str, answer: str, *, plain: bool) -> Grade:
        """Math-Verify's verdict on the last box alone; plain: wrong unless that is a plain value."""
        content = last_box(text)
        if not self._has_value(answer):
            return 0.0, "bad_gold", f"math-verify finds no answer in the reference {answer!r}"
        return self._last_box_verdict(content, answer, plain) if content else NO_BOX

    def grade_word(self, text: str, word: str, *, only_box: bool) -> Grade:
        """Right if the last box, or without one what Math-Verify finds, is that word."""
        content = last_box(text)
        if not content and only_box:
            return NO_BOX
        if not content:
            found, problem = self._text_read(text)
            if not found:
                return 0.0, "unparsed", problem
            content = str(found[-1])
        return float(letters_of(content) == word), "ok", ""

    def _text_read(self, text: str) -> tuple[list[Any], str]:
        """Values of a whole text, and why there are none."""
        text = _BLANKS.sub(" ", text)
        for opening, closing in _OPENED:  # Math-Verify looks for the end of each one in all that follows
            if (left := text.count(opening) - text.count(closing)) > _MOST_OPEN:
                return [], f"want at most {_MOST_OPEN} {opening} without an end; got {left:,}"
        return list(self._parse(text)), "math-verify finds no answer in the text"

    def _normal_of(self, content: str) -> str:
        """The normalised text that Math-Verify parses: equal texts have equal values."""
        return str(self._normalize(content, self._normalization))

    def _box_read(self, content: str) -> list[Any]:
        return list(self._parse(f"\\boxed{{{content}}}"))

    def _gold_read(self, answer: str) -> list[Any]:
        return list(self._parse(answer)) if "\\boxed" in answer else self._read_box(answer)

    def _has_value(self, answer: str) -> bool:
        return bool(answer) and bool(_WHOLE.fullmatch(answer) or self._read_gold(answer))

    def _judge_box(self, content: str, answer: str) -> Grade | None:
        """None if sympy cannot read the box, so that Math-Verify would read more of the text."""
        first = _WHOLE.fullmatch(content)
        second = _WHOLE.fullmatch(answer)
        if first and second:
            return float(int(first[1]) == int(second[1])), "ok", ""
        if "\\boxed" not in answer and self._normal(content) and self._normal(content) == self._normal(answer):
            return 1.0, "ok", ""
        found = self._read_box(content)
        if not found or isinstance(found[0], str):
            return None
        return same_value(self._read_gold(answer), found)

    def _judge_last_box(self, content: str, answer: str, plain: bool) -> Grade:
        gold = self._read_gold(answer)
        found = self._parse(f"\\boxed{{{content}}}", self._only_boxes)
        if not found:
            return 0.0, "unparsed", "math-verify cannot read the box"
        verdict = same_value(gold, found)
        if not verdict[0]:
            return verdict
        from .plain_values import is_plain

        right = not plain or found[0] == gold[0] or isinstance(found[0], str) or is_plain(found[0])
        return float(right), "ok", "" if right else "right, but not a plain value"


def _too_much(value: Any) -> str | None:
    """Why a parsed value is not computed; None or "" if it is."""
    return too_long(value) if isinstance(value, str) else too_large(value)


def same_value(gold: Sequence[Any], found: Sequence[Any]) -> Grade:
    """Math-Verify's verdict on what it parsed; small numbers must have the same first digits.

    What is too large to compute is right where it is written in the same way.
    """
    reason = _too_much(found[0])
    if reason or _too_much(gold[0]):
        right = bool(gold[0] == found[0])
        return float(right), "unparsed" if reason and not right else "ok", "" if right else reason or ""
    equal = load_math_verify().verify(list(gold), list(found), timeout_seconds=None)
    return float(bool(equal) and _same_digits(gold[0], found[0])), "ok", ""


def _same_digits(gold: Any, found: Any) -> bool:
    """Whether numbers below `_SMALL` in both values agree in their first digits: Math-Verify compares six decimals."""
    ours = sorted(_numbers(gold))
    theirs = sorted(_numbers(found))
    if len(ours) != len(theirs):  # written in another way
        return True
    pairs = zip(ours, theirs, strict=True)
    return all(max(abs(a), abs(b)) >= _SMALL or abs(a - b) <= _DIGITS * max(abs(a), abs(b)) for a, b in pairs)


def _numbers(value: Any) -> list[Any]:
    """The value if it is a number, else the numbers in it: in a set, a tuple or an equation."""
    if getattr(value, "is_number", False):
        number = value.evalf() if value.is_real and value.is_finite else None  # no float: 10^{-400} would be 0
        return [number] if getattr(number, "is_Number", False) else []
    return [number for part in getattr(value, "args", ()) for number in _numbers(part)]


def _only_box(text: str) -> str | None:
    """The content of the text's only box if Math-Verify reads nothing else; None if it might."""
    start = text.find("\\boxed{")
    if start < 0 or text.count("\\boxed") > 1 or "\\fbox" in text or _READ_FIRST.search(text):
        return None
    for _, end, content in boxes(text):
        marked = any(mark in content for mark in _FORMULA_MARKS)
        return None if not content or marked or _PERCENT.search(text, end) else content
    return None
