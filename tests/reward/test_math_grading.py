"""Graders of mathematics: Math-Verify by the short way and the long one, its strict reading, and oat's grader."""

import itertools
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import parse, parser, verify

from rlplus.train.reward.graders.base import boxes, last_box
from rlplus.train.reward.graders.math import _only_box, math_verify
from rlplus.train.reward.graders.oat import oat

GRADE, BOX, STRICT = math_verify(), math_verify(box=True), math_verify(plain=True)


def plain_parse(text: str) -> list[Any]:
    """Math-Verify's own reading: with its own parser, and nothing in its caches."""
    for cached in (parser.parse_latex_cached, parser.parse_expr_cached, parser.extract_latex):
        cached.cache_clear()
    with patch.object(latex2sympy2, "PSParser", PSParser):
        return list(parse(text, parsing_timeout=None))


def plainly(text: str, answer: str) -> bool:
    """The verdict of Math-Verify itself."""
    gold = plain_parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}")
    return bool(verify(gold, plain_parse(text), timeout_seconds=None))


VALUES = [
    "0", "5", "-5", "05", "007", "-0", "142.0", "142", "5.00", "5.01", "999999999", "1000000000", "1,000", "0.5",
    r"\frac{1}{2}", r"\frac12", "1/2", r"2\sqrt{3}", r"\sqrt{12}", "x^2+1", "(1, 2)", "1, 2", "1,2", r"\{1, 2\}",
    r"\text{A}", "A", r"90^\circ", "90", r"50\%", "x=5", r"\pi", "", " 5 ", "5 and 6", r"\text{five}", "3+4", "7",
    r"\frac{\pi}{2}", r"\infty", "4.5e33", "2^{10}", "1024",
]  # fmt: skip
AROUND = [
    "{}", "so {}", "so ${}$.", "so $x = {}$", "$$y = {}$$", r"\[ {} \]", r"\( {} \)", "{} cm", "{}%", r"${}\%$",
    "{} percent of {{all}}", "The final answer is {}. I hope it is correct.", "Final answer: ${}$", "$3$ and {}",
    "the answer is 3, or {}", "{} or $4$", "so {} and {{7}}", r"{} \fbox{{4}}", "a [ b {} ] c", "${} + 1$ = $2$",
]  # fmt: skip


def test_the_short_way_gives_the_verdict_of_math_verify() -> None:
    """Every value in half of the surroundings, against itself or another."""
    for (place, value), (turn, around) in itertools.product(enumerate(VALUES), enumerate(AROUND)):
        if (place + turn) % 2:
            continue
        answer = value if (place + turn) % 4 else VALUES[(place * 7 + turn) % len(VALUES)]
        if answer.strip():
            text = around.format(f"\\boxed{{{value}}}")
            verdict, status, _ = GRADE(text, answer, {})
            assert verdict == plainly(text, answer.strip()), (text, answer)
            assert status == ("ok" if plain_parse(text) else "unparsed"), text


@settings(max_examples=50)
@given(st.integers(-(10**10), 10**10), st.integers(0, 12), st.integers(0, 2), st.sampled_from([0, 0, 1, -1, 10**9]))
def test_whole_numbers_are_compared_as_math_verify_does(number: int, zeros: int, decimals: int, gap: int) -> None:
    sign, digits = ("-" if number < 0 else ""), str(abs(number))
    content = f"{sign}{'0' * (zeros % 3)}{digits}" + ("." + "0" * decimals if decimals else "")
    text, answer = f"so $\\boxed{{{content}}}$", str(number + gap)
    assert GRADE(text, answer, {})[0] == plainly(text, answer)


def test_what_else_math_verify_reads_takes_the_long_way() -> None:
    assert _only_box(r"so $\boxed{5}$") == "5"
    for text in (
        r"\boxed{5} \boxed{6}",
        r"The final answer is \boxed{5}",
        r"\boxed{5}%",
        r"\boxed{$5$}",
        "5",
        r"\boxed 5",
    ):
        assert _only_box(text) is None


def test_a_box_that_sympy_cannot_read_is_no_end_of_the_search() -> None:
    text = r"The answer is $7$, that is \boxed{\frac{}{)}}"
    assert GRADE(text, "7", {})[0] == plainly(text, "7")


@pytest.mark.parametrize(
    ("content", "answer", "right"),
    [
        ("7", "7", True),
        ("3+4", "7", False),
        (r"2 \cdot 5", "10", False),
        ("2^{10}", "1024", False),
        ("2^{10}", "2^{10}", True),
        ("1024", "2^{10}", True),
        ("5!", "120", False),
        (r"\sqrt{16}", "4", False),
        (r"\frac{8}{4}", "2", True),  # a fraction as written; reducing it was not asked for
        ("-7", "-7", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac{2}{4}", r"\frac{1}{2}", True),
        (r"50\%", r"50\%", True),
        (r"3 \times 10^8", "300000000", True),
        (r"3+2\sqrt{2}", r"3+2\sqrt{2}", True),
        (r"\frac{3\pi}{4}", r"\frac{3\pi}{4}", True),
        ("x+3+4", "x+7", False),
        ("x+7", "x+7", True),
        ("(1, 2)", "(1,2)", True),
        ("(1, 1+1)", "(1,2)", False),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        ("8", "7", False),
    ],
)
def test_strict_wants_a_plain_value(content: str, answer: str, right: bool) -> None:
    assert STRICT(f"so \\boxed{{{content}}}", answer, {})[:2] == (float(right), "ok")


def test_strict_reads_the_last_box_alone() -> None:
    assert STRICT(r"the final answer is $7$", "7", {})[1] == "no_box"
    assert STRICT(r"\boxed{7} and then \boxed{8}", "8", {})[0] == 1
    assert STRICT(r"\boxed{7} and then \boxed{8}", "7", {})[0] == 0
    assert STRICT(r"\boxed{7", "7", {})[1] == "no_box"
    assert STRICT(r"\boxed{7}", " ", {})[1] == "bad_gold"


@pytest.mark.parametrize("grade", [GRADE, STRICT])
def test_prose_is_no_reference(grade: Any) -> None:
    """Where Math-Verify would compare a product of letters; no reward changes."""
    for text in (r"\boxed{x}", "no idea", r"\boxed{7}"):
        assert grade(text, "see the book", {})[:2] == (0.0, "bad_gold")
    assert grade(r"\boxed{no solution}", "no solution", {})[:2] == (1.0, "ok")
    for answer in ("5 and 6", r"\text{no solution}", "x and y", "A, B", "Evelyn", "sin x", "2 cm long", r"x \in S"):
        assert grade(r"\boxed{8}", answer, {})[1] == "ok", answer


OAT = [  # verdicts derived by reading oat's boxed_reward_fn(text, answer, fast=False), which was not run
    (r"so \boxed{72}", "72", True),
    (r"so \boxed{73}", "72", False),
    ("72", "72", False),
    (r"\boxed{72", "72", False),
    (r"\boxed{1,000}", "1000", True),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", True),
    (r"\boxed{0.5}", r"\frac{1}{2}", True),
    (r"\boxed{1/2}", r"\frac{1}{2}", True),
    (r"\boxed{5\text{ cm}}", "5", True),
    (r"\boxed{5\%}", "5", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", True),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", True),
    (r"\boxed{\text{C}}", "C", True),
    (r"\boxed{C}", "C", True),
    (r"\boxed{B}", "C", False),
    *(
        (rf"\boxed{{5 \text{{ {word} }} {other}}}", "5", False)
        for word in ("or", "OR", "or maybe", "and/or", "else", "otherwise")
        for other in ("6", "-6", r"\frac{1}{2}")
    ),
    (r"\boxed{5 \text{ or } 6}", "5, 6", True),
    (r"\boxed{5 \text{ miles per } \text{hour}}", "5", True),
    (r"\boxed{5} or \boxed{6}", "5", False),
    (r"\boxed{5} or \boxed{6}", "6", True),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
    (r"\boxed{x^2+1}", "x^2+2x+1", False),
]


@pytest.mark.parametrize(("text", "answer", "right"), OAT, ids=range(len(OAT)))
def test_oat(text: str, answer: str, right: bool) -> None:
    assert bool(oat(text, answer, {})[0]) is right


def test_oat_says_what_it_cannot_read() -> None:
    assert oat("no box", "5", {})[1] == "no_box"
    assert oat(r"\boxed{5}", " ", {})[1] == "bad_gold"


def test_boxes() -> None:
    text = r"\boxed{a} \boxed 5 \fbox{b{c}d} \boxed{\text{e}} \boxed{ f \boxed{g} } \boxed{open"
    assert [content for _, _, content in boxes(text)] == ["a", "b{c}d", r"\text{e}", r"f \boxed{g}", "g"]
    assert all(text[start:end].endswith("}") for start, end, _ in boxes(text))
    assert last_box(text) == "g"
    assert last_box("none") is None
