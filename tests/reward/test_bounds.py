r"""Answers that no computer should compute: numbers that explode, sums multiplied out, texts on which a pattern hangs.

Each would take hours or gigabytes without a bound: that a test ends is its result.
"""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import sympy
from grader_kinds import GRADERS
from hypothesis import assume, given, settings

from rlplus.train.reward.graders import bounds, words
from rlplus.train.reward.graders.base import last_box
from rlplus.train.reward.graders.choice import choice
from rlplus.train.reward.graders.code import extract_code
from rlplus.train.reward.graders.exact import exact_match
from rlplus.train.reward.graders.math import load_math_verify
from rlplus.train.reward.graders.unicode_latex import as_latex

HUGE = [
    "10^{-1000000000}", "10^{1000000000}", "9^{9^{9}}", "1e1000000000", "1e-1000000000", r"\frac{1}{3}^{1000000000}",
    "2^{2^{2^{2^{2^{2}}}}}", "((((((9^9)^9)^9)^9)^9)^9)^9", "10^{1000000000+x-x}", r"10^{\frac{1}{10^{-10}}}",
    r"2^{1000000000\cdot\frac{1}{3}}", "99999999!", "5!!!!!!", "(10^9)!", r"\binom{1000000000}{500000000}",
    r"e^{1000000000\ln 10}", r"\log_{2}(2^{10^{10}})", r"\prod_{n=1}^{1000000000} n", r"\gcd(10^{1000000000},3)",
    r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{1000000000}", "(x+y+z)^{1000}", r"(\sqrt{2}+1)^{1000000000}",
    "(a+b)(c+d)(f+g)(h+k)(m+n)(p+q)(r+s)(t+u)(v+w)(x+y)(A+B)(C+D)(F+G)(H+K)(M+N)(P+Q)",
    "1" * 100_000, "0." + "3" * 100_000, r"0.\overline{" + "3" * 20_000 + "}", "(" * 3000 + "1" + ")" * 3000,
    "1+" * 50_000 + "1", "-" * 3000 + "1", "- " * 3000 + "1", r"\frac{1}{" * 2000 + "2" + "}" * 2000,
    "x_{" * 2000 + "1" + "}" * 2000,
]  # fmt: skip


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("content", HUGE, ids=[content[:30] for content in HUGE])
def test_what_explodes_is_worth_nothing(content: str, name: str) -> None:
    """As a response; as a reference it is right where it is written in the same way, and other responses are not."""
    response = f"So \\boxed{{{content}}}."
    for answer in ("7", "x+1"):
        value, status, _ = GRADERS[name](response, answer, {})
        assert (value, status in ("ok", "unparsed")) == (0.0, True)
    assert GRADERS[name](r"So \boxed{7}.", content, {})[0] == 0


COSTLY = {  # all that is within the bounds
    "commas": ",".join(map(str, range(201))),
    "a set": r"\{" + ",".join(map(str, range(201))) + r"\}",
    "bars": "|x|" * 6,
    "bars within bars": r"\left|x+" * 6 + "1" + r"\right|" * 6,
    "powers": "x^{" * 10 + "x" + "}" * 10,
    "terms": "(a+b+c+d)^{9}",
}


@pytest.mark.parametrize("name", ["math_verify", "math_verify_box", "oat"])
@pytest.mark.parametrize("content", COSTLY.values(), ids=COSTLY)
def test_what_is_within_the_bounds_is_graded(content: str, name: str) -> None:
    assert GRADERS[name](f"\\boxed{{{content}}}", "x+1", {})[:2] == (0.0, "ok")


def test_the_bound_is_said() -> None:
    for content, reason in (
        ("10^{-1000000000}", "want numbers of at most 10,000 digits"),
        ("(x+y+z)^{1000}", "want at most 250 terms in a product that is multiplied out"),
        ("1" * 2000, "want numbers written with at most 1,000 digits; got 2,000"),
        ("1+" * 3000 + "1", "want an expression of at most 5,000 characters; got 6,001"),
        ("-" * 50 + "1", "want at most 40 signs in a row"),
        ("(" * 50 + "1" + ")" * 50, "want at most 40 brackets around an expression; got 50"),
        ("1," * 1200 + "1", "want at most 200 commas; got 1,200"),
        ("|x|" * 20, "want at most 12 bars of absolute values; got 40"),
        (r"\lvert x+" * 12 + "1" + r"\rvert" * 12, "want at most 12 bars of absolute values; got 24"),
        ("x^{" * 38 + "2" + "}" * 38, "want at most 10 powers within each other; got 38"),
        (r"\int_0^1 e^{x^2}\sin(x^{3}) dx", "want an expression without integrals, limits and derivatives to compute"),
        (r"\lim_{x\to 0} \frac{\sin x}{x}", "want an expression without integrals, limits and derivatives to compute"),
        (r"\frac{d}{dx} x^x", "want an expression without integrals, limits and derivatives to compute"),
        (r"\sum_{n=1}^{\infty} \frac{1}{n^2}", "want sums and products from a number to a number"),
        (r"\sum_{n=1}^{N} n", "want sums and products from a number to a number"),
    ):
        verdict = GRADERS["math_verify_box"](f"\\boxed{{{content}}}", "7", {})
        assert verdict == (0.0, "unparsed", reason)
        assert GRADERS["math_verify_box"](f"\\boxed{{{content}}}", content, {})[:2] == (1.0, "ok")


@pytest.mark.parametrize(
    ("content", "same", "other"),
    [
        ("2^{2023}", r"2 \cdot 2^{2022}", "2^{2022}"),
        ("2019^{2019}", r"2019 \cdot 2019^{2018}", "2019^{2018}"),
        ("1000!", r"1000 \cdot 999!", "999!"),
        (r"\binom{1000}{500}", r"\frac{1000!}{500! \cdot 500!}", r"\binom{1000}{499}"),
        ("(x+1)^{20}", r"(x+1)^{19} \cdot (x+1)", "(x+1)^{19}"),
        ("10^{-400}", r"\frac{1}{10^{400}}", "10^{-401}"),
        (r"e^{2 \ln 3}", "9", "8"),
        ("2(3)", "6", "5"),
        ("(2)(3)", "6", "5"),
        (r"2\frac{1}{2}", "2.5", "1"),
        ("|x-1|+|x-2|+|x-3|", "|x-3|+|x-2|+|x-1|", "|x-1|"),
        ("2^{2^{3}}", "256", "255"),
        (r"\sum_{n=1}^{10} n", "55", "54"),
        (r"m \frac{d v}{d t} + b v = f", r"b v + m \frac{dv}{dt} = f", "b v = f"),
        (r"\frac{dy}{dx} = 2x", r"\frac{dy}{dx} = x \cdot 2", r"\frac{dy}{dx} = 3x"),
        (",".join(map(str, range(200))), ",".join(map(str, range(200))), "0,1"),
    ],
)
def test_large_answers_of_mathematics_are_computed(content: str, same: str, other: str) -> None:
    for answer, right in ((same, 1.0), (other, 0.0), (content, 1.0)):
        assert GRADERS["math_verify_box"](f"\\boxed{{{content}}}", answer, {})[:2] == (right, "ok"), answer


NUMBERS = st.builds(sympy.Rational, st.integers(0, 40), st.integers(1, 30))
SMALL = st.integers(-5, 9).map(sympy.Integer)
TREES = st.recursive(
    NUMBERS,
    lambda parts: (
        st.builds(lambda one, other: sympy.Add(one, other, evaluate=False), parts, parts)
        | st.builds(lambda one, other: sympy.Mul(one, other, evaluate=False), parts, parts)
        | st.builds(lambda base, power: sympy.Pow(base, power, evaluate=False), parts, SMALL)
        | st.builds(lambda number: sympy.factorial(abs(number), evaluate=False), SMALL)
        | st.builds(lambda n, k: sympy.binomial(10 * abs(n), abs(k), evaluate=False), SMALL, SMALL)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_no_result_has_more_digits_than_was_estimated(tree: sympy.Expr) -> None:
    assume(bounds.too_large(tree) is None)
    value = tree.doit()
    assume(value.is_Rational)
    assert math.log10(max(abs(value.p), value.q)) <= bounds._size(tree).digits + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_no_sum_has_more_terms_than_was_estimated(letters: int, power: int, number: bool) -> None:
    total = sum(sympy.symbols("a b c d")[:letters], sympy.Integer(int(number)))
    tree = sympy.Mul(sympy.Pow(total, power, evaluate=False), total, evaluate=False)
    assume(bounds.too_large(tree) is None)
    assert len(sympy.Add.make_args(sympy.expand(tree))) <= max(1, bounds._size(tree).terms)


SIZE = 100_000
PIECES = [
    " ", "\n", "\t", "*", "_", "(", "[", "{", "}", ")", "'", ",", "$", "`", "\\", "a", "A", "1", "1,", "1,000", "- ",
    "a-", "a ", "the ", "and ", "answer ", "answer for ", "answer is ", "the correct choice ", "option ", "<answer>",
    ". ", "é", "°", "√", "√(", "1e", "1.5e3", "\\(", r"\text{", r"\bf ", r"\bf", r"\text", r"\text{ or ", r"\frac{",
    r"\sqrt{", "^{",
    "\\boxed", "\\boxed{", "\\boxed ", r"\,!", "```", "```a\n", "def f", "class ", " ,",
]  # fmt: skip
READERS: dict[str, Callable[[str], object]] = {
    "letters": lambda text: choice(text, "A", {}),
    "digits": lambda text: choice(text, "3", {}),
    "a letter's box": lambda text: choice(f"\\boxed{{{text}}}", "A", {}),
    "exact": lambda text: exact_match(None)(text, "1", {}),
    "code": lambda text: extract_code(text, ("f",)),
    "a block": lambda text: extract_code(f"```\n{text}\n```", ("f",)),
    "latex": as_latex,
    "a root": lambda text: as_latex(f"√{text}"),
    "boxes": last_box,
    "words": lambda text: [words.word_of(text), words.is_prose(text), words.same_words(text, text)],
    "other words": lambda text: [words.stands_for_none(text), words.reordered(text, "now")],
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("lead", ["", "answer", "1", r"\text{"])
def test_long_texts_take_steps_in_proportion_to_their_length(lead: str, reader: str) -> None:
    """A hundred thousand characters, of which the square is hours and the fourth power no matter of time."""
    for piece in PIECES:
        READERS[reader](lead + piece * (SIZE // len(piece)) + "\0")


@pytest.mark.parametrize("piece", [" ", "\t", "\\(", "\\[", "\\boxed{"])
def test_a_long_text_without_a_box_is_read_or_refused(piece: str) -> None:
    """Math-Verify's own patterns try each opening sign with all that follows."""
    for lead in ("", "$", "$7$ "):
        value, status, reason = GRADERS["math_verify"](lead + piece * (SIZE // len(piece)), "7", {})
        assert (value, status) == ((1.0, "ok") if piece.isspace() and "7" in lead else (0.0, "unparsed"))
        assert piece.isspace() or reason.startswith(f"want at most 100 {piece} without an end; got ")


def test_a_parser_that_others_loaded_is_the_bounded_one() -> None:
    """Whichever grader comes first."""
    with pytest.raises(ValueError, match="want numbers written with at most"):
        load_math_verify().parser.latex2sympy("1" * 2000)
