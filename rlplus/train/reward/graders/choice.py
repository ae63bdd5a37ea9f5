r"""Multiple choice: the letter that a response settles on, A to J, or the digit where the answer is one.

Boxes count, `\boxed{C}`, and letters after the word "answer" or "correct choice": "ANSWER: C", "the answer is **(c)**",
`<answer>C</answer>`; the last of them is the response's. Without any, the last line is read: "C", "(C)", "C) text", or
the only letter in it in brackets, in bold or after "option". A lower-case letter counts if it cannot be a word, an
upper-case A or I if it is not one.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .base import Grade, boxes

# No repetition gives back what it took (*+, ++), so that a run of n blanks takes n steps, not n^4.
_OPENING = r"(?:[\s*_$\"'`(\[{]|\\\(|\\\[|\\(?:text|textbf|textit|mathrm|mathbf)\s*+\{|\\(?:bf|rm|it)\b)*+"
_CLOSED = r"(?=[^\S\n]*+(?:[)\]}*_$\"'`.:,;!<]|\\\)|\\\]|$|\n))"  # follows a letter that could be a word
_CALLED = (
    r"(?i:(?:\banswer\b|\b(?:correct|right|best|final)\s++(?:choice|option)\b)"
    r"(?:[\s*_]++(?:choice|option|letter)\b)?+(?:\s++(?:to|for|of)\b[^\n.:]{0,60}?)?"
    r"[\s*_]*+(?:\b(?:is|would be|should be|must be)\b)?+"
    r"(?:[\s,]*+\b(?:therefore|thus|hence|clearly|likely|probably)\b,?+)?+)"
    rf"(?:(?i:(?<=<answer)>)|[\s*_]*+[:=]?+){_OPENING}(?i:(?:option|choice)\b)?+{_OPENING}"
)


class _Signs(NamedTuple):
    """Patterns of an answer: after the word, at the start of an item or a box, within the last line."""

    answer: re.Pattern[str]
    item: re.Pattern[str]
    marked: re.Pattern[str]


def _signs(every: str, marked: str, behind_the_word: str) -> _Signs:
    return _Signs(
        re.compile(f"{_CALLED}(?:{behind_the_word})"),
        re.compile(rf"{_OPENING}(?P<sign>{every})(?:\s*+[)\].:](?!\w)|[\s*_$\"'`}}\]).]*+$)"),
        re.compile(rf"\(({marked})\)|\*\*({marked})\*\*|\b(?:[Oo]ption|[Cc]hoice)\s++\(?+({marked})\b"),
    )


_CLEAR = r"(?![\w'’-])(?!\s*+(?:[=+*/^>]|<(?!/)))"  # not the start of a word or a formula
_LETTERS = _signs(
    "[A-Ja-j]",
    "[A-J]",
    rf"(?P<clear>[B-HJ]){_CLEAR}|(?P<upper>[AI])(?:{_CLOSED}|(?=\s++(?:because|since|as|and|which|with|is)\b))"
    rf"|(?P<lower>[a-j]){_CLOSED}",
)
_DIGITS = _signs("[1-9]", "[1-9]", rf"(?P<clear>[1-9]){_CLEAR}(?![.,]\d)(?P<upper>)(?P<lower>)")


def choice(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
    """Right if the text's letter is the answer's, which may be written as in a response: "C", "(C)", "C) text"."""
    signs = _DIGITS if _item(answer, _DIGITS) else _LETTERS
    gold = _item(answer, signs)
    if gold is None:
        return 0.0, "bad_gold", f"want a letter from A to J, or a digit, as the reference; got {answer!r}"
    found = letter(text, signs)
    if found is None:
        return 0.0, "unparsed", "no letter is marked as the answer"
    return float(found == gold), "ok", ""


def letter(text: str, signs: _Signs = _LETTERS) -> str | None:
    """The letter, in upper case; None if there is none or it is ambiguous."""
    found = [(m.end(), (m["clear"] or m["upper"] or m["lower"]).upper()) for m in signs.answer.finditer(text)]
    found += [(end, item) for _, end, content in boxes(text) if (item := _item(content, signs))]
    return max(found)[1] if found else _of_last_line(text, signs)


def _item(text: str, signs: _Signs) -> str | None:
    """The first letter of a list's item or of a box's content."""
    match = signs.item.match(text.strip())
    return match["sign"].upper() if match else None


def _of_last_line(text: str, signs: _Signs) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    item = _item(lines[-1], signs)
    if item is not None:
        listed = len(lines) > 1 and _item(lines[-2], signs) not in (None, item)  # the end of the options, said again
        return None if listed else item
    marked = {"".join(groups) for groups in signs.marked.findall(lines[-1])}
    return marked.pop() if len(marked) == 1 else None
