r"""Math-Verify: equality of mathematical values by sympy, and a strict reading of it.

If a text has one box and nothing that Math-Verify would read before it, the verdict depends only on the box and the
answer, and is cached for the next response with that box. Two whole numbers are compared as numbers, and texts that
Math-Verify normalises to the same text are equal: neither needs its parser.
tests/reward/test_math_grading.py compares both.
"""

import logging
import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any

from .base import NO_BOX, Grade, Grader, boxes, last_box

_KEPT = 4096  # answers and verdicts
_WHOLE = re.compile(r"(-?\d{1,9})(?:\.0+)?")
_READ_FIRST = re.compile("final answer", re.IGNORECASE)  # Math-Verify reads what follows it first, or too
_PERCENT = re.compile("%|percent|pct", re.IGNORECASE)  # part of the number, if it follows the box
# Nothing but letters and punctuation, as in "see the book": Math-Verify reads a product of one-letter variables.
_PROSE = re.compile(r"[^\W\d_]+(?:[\s,;:.?!'\"()-]+[^\W\d_]+)+[\s.?!)]*")
_WORD = re.compile(r"[^\W\d_]{2,}")
_FORMULA_MARKS = ("$", "[", "]", "\n", "\\(", "\\)")  # a formula could end there, inside the box


@cache
def load_math_verify() -> Any:
    """The package, quiet and with a faster parser.

    ANTLR's SLL prediction is tried first. It either builds the tree of LL prediction, the default, or reports an error
    (documentation of PredictionMode.SLL), and does without lookahead in full context, which no cache spares.
    """
    import math_verify
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

    latex2sympy2.PSParser = TwoStageParser
    # math-verify's own timeouts are signals, swallowed as "not equal"; here the parent kills and counts instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    return math_verify


def math_verify(*, strict: bool) -> Grader:
    r"""strict: only the last box counts, and only a plain value in it: `\boxed{3+4}` is not 7."""
    values = _Values()
    grade = values.grade_strictly if strict else values.grade

    def verdict(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        value, status, detail = grade(text, answer, row)
        if not value and status != "bad_gold" and is_prose(answer):  # equal texts are right all the same
            return (
                0.0,
                "bad_gold",
                f"the reference {answer!r} is prose: math-verify reads a product of letters",
            )
        return value, status, detail

    return verdict


def is_prose(answer: str) -> bool:
    """Whether it is two words or more, with no sign of mathematics."""
    return len(_WORD.findall(answer)) > 1 and _PROSE.fullmatch(answer.strip()) is not None


class _Values:
    """Math-Verify, which the constructor imports, with caches of parsed texts and verdicts."""

    def __init__(self) -> None:
        math_verify = load_math_verify()
        from latex2sympy2_extended.latex2sympy2 import normalize_latex

        self._normalize, self._normalization = normalize_latex, math_verify.LatexExtractionConfig().normalization_config
        self._parse = partial(math_verify.parse, parsing_timeout=None)
        self._verify = partial(math_verify.verify, timeout_seconds=None)
        self._only_boxes = [math_verify.LatexExtractionConfig(try_extract_without_anchor=False)]
        kept = lru_cache(maxsize=_KEPT)
        self._normal = kept(self._normal_of)
        self._read_box, self._read_gold = kept(self._box_read), kept(self._gold_read)
        self._box_verdict, self._strict_verdict = kept(self._judge_box), kept(self._judge_strictly)

    def grade(self, text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        """Math-Verify's verdict."""
        answer, content = answer.strip(), _only_box(text)
        verdict = self._box_verdict(content, answer) if content and answer else None
        if verdict:
            return 1.0, "ok", ""
        if not self._has_value(answer):
            return 0.0, "bad_gold", f"math-verify finds no answer in the reference {answer!r}"
        if verdict is not None:
            return 0.0, "ok", ""
        found = self._parse(text)
        if not found:
            return 0.0, "unparsed", "math-verify finds no answer in the text"
        return float(self._verify(self._read_gold(answer), found)), "ok", ""

    def grade_strictly(self, text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        """Math-Verify's verdict on the last box alone; wrong unless that is a plain value."""
        answer, content = answer.strip(), last_box(text)
        if not self._has_value(answer):
            return 0.0, "bad_gold", f"math-verify finds no answer in the reference {answer!r}"
        return self._strict_verdict(content, answer) if content else NO_BOX

    def _normal_of(self, content: str) -> str:
        """The normalised text that Math-Verify parses: equal texts have equal values."""
        return str(self._normalize(content, self._normalization))

    def _box_read(self, content: str) -> list[Any]:
        return list(self._parse(f"\\boxed{{{content}}}"))

    def _gold_read(self, answer: str) -> list[Any]:
        return list(self._parse(answer)) if "\\boxed" in answer else self._read_box(answer)

    def _has_value(self, answer: str) -> bool:
        return bool(answer) and bool(_WHOLE.fullmatch(answer) or self._read_gold(answer))

    def _judge_box(self, content: str, answer: str) -> bool | None:
        """None if sympy cannot read the box, so that Math-Verify would read more of the text."""
        first, second = _WHOLE.fullmatch(content), _WHOLE.fullmatch(answer)
        if first and second:
            return int(first[1]) == int(second[1])
        if "\\boxed" not in answer and self._normal(content) and self._normal(content) == self._normal(answer):
            return True
        found = self._read_box(content)
        if not found or isinstance(found[0], str):
            return None
        return bool(self._verify(self._read_gold(answer), found))

    def _judge_strictly(self, content: str, answer: str) -> Grade:
        gold, found = self._read_gold(answer), self._parse(f"\\boxed{{{content}}}", self._only_boxes)
        if not found:
            return 0.0, "unparsed", "math-verify cannot read the box"
        if not self._verify(gold, found):
            return 0.0, "ok", ""
        from .plain_values import is_plain

        plain = found[0] == gold[0] or isinstance(found[0], str) or is_plain(found[0])
        return float(plain), "ok", "" if plain else "right, but not a plain value"


def _only_box(text: str) -> str | None:
    """The content of the text's only box if Math-Verify reads nothing else; None if it might."""
    start = text.find("\\boxed{")
    if start < 0 or text.count("\\boxed") > 1 or "\\fbox" in text or _READ_FIRST.search(text):
        return None
    for _, end, content in boxes(text):
        marked = any(mark in content for mark in _FORMULA_MARKS)
        return None if not content or marked or _PERCENT.search(text, end) else content
    return None
