r"""LaTeX in the place of the Unicode characters that models write for it: 90°, −5, ½, √5, x², full-width digits."""

import re
import unicodedata
from fractions import Fraction

_SIGNS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "﹣": "-", "∗": "*", "∕": "/", "⁄": "/",
    "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ",
    "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ",
    "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ",
}  # fmt: skip
_SINGLE = str.maketrans(
    _SIGNS
    | dict.fromkeys("\u200b\u2060\u2061\u2062\u2063\ufeff", "")  # without a width
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width
)
_SPACE = "[\u00a0\u2000-\u200a\u202f\u205f\u3000]"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉"
_DIGITS = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789")
_FRACTIONS = "[¼½¾⅐-⅞]"
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile("[√∛∜] *")
_UNDER = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+")  # a number, letter or command under a root
_BRACKETS = re.compile("[(){}]")
# 1.6e-19, which Math-Verify reads as 1.6 e - 19
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])")
# 1\,000, which Math-Verify reads as two numbers
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:\\[,;: ]\d{3})+(?!\d)")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,20})\.(\d{0,20})\\(?:overline|bar) *\{(\d{1,20})\}(?!\d)")
# The full stop of a sentence that ends with a box or with the text: Math-Verify takes 72. for a decimal without digits
_FULL_STOP = re.compile(
    r"(?<=[\w)\]}%!|$'])(?<!\\left)(?<!\\right)(?<!\\[bB]ig[lr])(?<!\\[bB]igg[lr])\s{0,3}\.(?=\s{0,9}\$?\s{0,9}(?:\}|\Z))"
)


def as_latex(text: str) -> str:
    """The text with LaTeX for such characters, and numbers that Math-Verify misreads in another form.

    1.6e-19 becomes a product, 1\\,000 the number without spaces, 0.\\overline{3} a fraction. A full
    stop before the end of a box or of the text is left out. Other ASCII is unchanged.
    """
    if not text.isascii():
        text = re.sub(rf"(?<=\d){_SPACE}(?=\d{{3}}(?!\d))", "", text)  # between thousands
        text = re.sub(_SPACE, " ", text)
        text = re.sub(f"[{_RAISED}]+", lambda found: f"^{{{found[0].translate(_DIGITS)}}}", text)
        text = re.sub(f"[{_LOWERED}]+", lambda found: f"_{{{found[0].translate(_DIGITS)}}}", text)
        text = re.sub(_FRACTIONS, _fraction, text)
        text = text.translate(_SINGLE)
        text = _with_roots(text)
    text = _FULL_STOP.sub("", text)
    text = _THOUSANDS.sub(lambda found: re.sub(r"\\.", "", found[0]), text)
    text = _REPEATING.sub(_repeating, text)
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def _repeating(found: re.Match[str]) -> str:
    whole, once, again = found.groups()
    value = Fraction(int(whole + once + again) - int(whole + once), 10 ** len(once) * (10 ** len(again) - 1))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found[0]).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def _with_roots(text: str) -> str:
    r"""`\sqrt{...}` for the signs of roots: of what is in brackets, one number, letter or command, or another root."""
    closing = _closing(text)
    parts = list(text)
    ends: dict[int, int] = {}  # where the part that begins with a root ends
    for sign in reversed(list(_ROOT.finditer(text))):
        start = sign.end()
        name = _ROOTS[sign[0][0]]
        bracketed = closing.get(start)
        if bracketed is not None:
            parts[start] = "{"
            parts[bracketed] = "}"
            end = bracketed + 1
        elif (end := ends.get(start, 0) or _end_of_one(text, start, closing)) > start:
            parts[start] = "{" + parts[start]
            parts[end - 1] += "}"
        else:
            continue
        parts[sign.start()] = name
        ends[sign.start()] = end
    return "".join(parts)


def _end_of_one(text: str, start: int, closing: dict[int, int]) -> int:
    """The end of the number, letter or command that begins there, with the command's groups; `start` without one."""
    found = _UNDER.match(text, start)
    end = start if found is None else found.end()
    while found is not None and found[0][0] == "\\" and text[end : end + 1] == "{" and end in closing:
        end = closing[end] + 1
    return end


def _closing(text: str) -> dict[int, int]:
    """The place of the bracket that closes each opening one; a bracket of another kind in between closes none."""
    opened = list[int]()
    closing = dict[int, int]()
    for bracket in _BRACKETS.finditer(text):
        if bracket[0] in "({":
            opened.append(bracket.start())
        elif opened and text[opened[-1]] + bracket[0] in ("()", "{}"):
            closing[opened.pop()] = bracket.start()
    return closing
