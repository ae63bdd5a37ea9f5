"""Answers that count as the same: the table of docs/data.md, and kinds of which it has one example each."""

import re
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
from grader_kinds import GRADERS
from hypothesis import assume, given, settings

from rlplus.train.reward.graders.unicode_latex import as_latex
from rlplus.train.reward.graders.words import word_of

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
HEAD, *ROWS = [
    line.strip("| ").split(" | ")
    for line in re.findall(r"(?m)^\| [^|]* \| [^|]* \|.*\|$", PAGE)
    if "`oat`" in line or "| yes |" in line or "| no |" in line
]


def test_the_table_is_found() -> None:
    assert ["response", "answer", *(f"`{name}`" for name in GRADERS)] == HEAD
    assert len(ROWS) > 25


@pytest.mark.parametrize("row", ROWS, ids=[" for ".join(row[:2]) for row in ROWS])
def test_the_table_of_the_manual(row: list[str]) -> None:
    response, answer = (cell.strip("`") for cell in row[:2])
    said = {name: {"yes": 1.0, "no": 0.0}[cell] for name, cell in zip(GRADERS, row[2:], strict=True)}
    assert {name: grade(response, answer, {})[0] for name, grade in GRADERS.items()} == said


SAME = [  # as models write it, and in LaTeX
    ("−5", "-5"),
    ("–5", "-5"),
    ("‐5", "-5"),
    ("8–10", "8-10"),
    ("30°", r"30^\circ"),
    ("½", r"\frac{1}{2}"),
    ("−⅔", r"-\frac{2}{3}"),
    ("2½", r"2\frac{1}{2}"),
    ("√5", r"\sqrt{5}"),
    ("√(x+1)", r"\sqrt{x+1}"),
    ("√{12}", r"\sqrt{12}"),
    ("√2/2", r"\frac{\sqrt{2}}{2}"),
    ("∛x", r"\sqrt[3]{x}"),
    ("∜16", r"\sqrt[4]{16}"),
    ("√(2(3))", r"\sqrt{2(3)}"),
    ("√((x+1)(x+2))", r"\sqrt{(x+1)(x+2)}"),
    ("√(1+√(2))", r"\sqrt{1+\sqrt{2}}"),
    ("√√16", r"\sqrt{\sqrt{16}}"),
    ("√½", r"\sqrt{\frac{1}{2}}"),
    ("√π", r"\sqrt{\pi}"),
    ("∛{√5}", r"\sqrt[3]{\sqrt{5}}"),
    ("x²+y²", "x^2+y^2"),
    ("10⁻³", "0.001"),
    ("2¹⁰", "2^{10}"),
    ("x₁", "x_1"),
    ("3×4", r"3 \times 4"),
    ("6÷3", r"6 \div 3"),
    ("2·x", r"2 \cdot x"),
    ("2π", r"2\pi"),
    ("∞", r"\infty"),
    ("(−∞, 3]", r"(-\infty, 3]"),
    ("x ≥ 3", r"x \geq 3"),
    ("∅", r"\emptyset"),
    ("θ", r"\theta"),
    ("５", "5"),
    ("（1，2）", "(1, 2)"),
    ("5％", r"5\%"),
    ("1\u2009000", "1000"),
    ("1\u00a0000\u00a0000", "1000000"),
    ("1\u202f000", "1000"),
    ("5\u00a0cm", r"5\text{ cm}"),
    ("5\u200b", "5"),
    ("1.6e-19", r"1.6 \times 10^{-19}"),
    ("3E8", r"3 \times 10^{8}"),
    (r"1\,000", "1000"),
    (r"-12\;345\ 678", "-12345678"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    (r"-2.1\bar{6}", r"-\frac{13}{6}"),
    (r"0.\overline{142857}", r"\frac{1}{7}"),
    (r"0.\overline{9}", "1"),
]


@pytest.mark.parametrize(("written", "latex"), SAME, ids=[latex for _, latex in SAME])
@pytest.mark.parametrize("name", GRADERS)
def test_characters_that_stand_for_latex_are_read_on_both_sides(name: str, written: str, latex: str) -> None:
    """And a value is right for itself alone."""
    for response, answer in ((written, latex), (latex, written), (written, written)):
        verdict = GRADERS[name](f"So \\boxed{{{response}}}.", answer, {})
        if name != "math_verify_strict" or not re.search(r"[×÷–]|times|div|\d-\d", response):  # left to calculate
            assert verdict[:2] == (1.0, "ok")
        assert GRADERS[name](f"So \\boxed{{{response}}}.", "777", {})[:2] == (0.0, "ok")


@pytest.mark.parametrize("name", ["math_verify", "math_verify_box", "math_verify_strict"])
@pytest.mark.parametrize("box", ["72.", "$72.$", "72\\%.", "72 .", "50°.", "|3|.", "(1, 2]."])
def test_the_full_stop_behind_an_answer_is_not_read(box: str, name: str) -> None:
    answer = box.replace(".", "")
    assert GRADERS[name](f"So it is \\boxed{{{box}}}", answer, {})[0] == 1
    assert GRADERS[name](f"So it is \\boxed{{{answer}}}", answer + ".", {})[0] == 1
    assert GRADERS[name](f"So it is \\boxed{{{box}}}", "71", {})[0] == 0


def test_points_that_are_no_full_stop_stay() -> None:
    for text in (r"\boxed{1.5}", r"\boxed{.5}", r"\left. x \right.}", r"\bigr.}", "1. x"):
        assert as_latex(text) == text


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_text_is_left_alone(text: str) -> None:
    """But for numbers in scientific notation, with spaces between thousands, or with a bar, and last full stops."""
    assume(not re.search(r"\.\s*(\}|\Z)|\d[eE][-+]?\d|\d\\[,;: ]\d|\\overline|\\bar", text))
    assert as_latex(text) == text


@given(st.integers(0, 99), st.integers(0, 3), st.integers(1, 6), st.data())
def test_a_repeating_decimal_is_the_limit_of_its_digits(
    whole: int, fixed: int, period: int, data: st.DataObject
) -> None:
    once, again = (data.draw(st.text("0123456789", min_size=n, max_size=n)) for n in (fixed, period))
    found = re.fullmatch(r"(\d+)|\\frac\{(\d+)\}\{(\d+)\}", as_latex(rf"{whole}.{once}\overline{{{again}}}"))
    assert found is not None
    value = Fraction(int(found[1])) if found[1] else Fraction(int(found[2]), int(found[3]))
    assert abs(value - Fraction(f"{whole}.{once}{again * 10}")) <= Fraction(1, 10 ** (fixed + 10 * period))


@pytest.mark.parametrize(
    "text", [r"1\,00", r"1\,0000", r"1234\,567", r"0.123\,456", r"1, 000", r"\overline{AB}", r"x_{1}\,y"]
)
def test_other_digits_stay_apart(text: str) -> None:
    assert as_latex(text) == text


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9999), st.integers(-30, -5), st.sampled_from([0, 0, 1, 5]), st.sampled_from([0, 1, 3]))
def test_small_numbers_are_equal_where_their_first_digits_are(digits: int, power: int, more: int, scale: int) -> None:
    """In a set, a pair and an equation, too. By exact fractions: the share of the difference in the larger one."""
    one, other = digits * 10**scale, digits + more
    right = abs(one - other) <= 5e-4 * max(one, other)
    assume(right or abs(one - other) > 6e-4 * max(one, other))
    for form in ("{}", "x = {}", "({}, 2)", r"\{{{}, 2\}}"):
        answer = form.format(rf"{digits + more} \times 10^{{{power}}}")
        response = form.format(rf"{digits * 10**scale} \times 10^{{{power}}}")
        if max(one, other) * 10.0**power < 1e-4:
            assert GRADERS["math_verify_box"](f"\\boxed{{{response}}}", answer, {})[0] == right, (response, answer)


WORDS = ["east", "yes", "one", "Max", "even", "Tuesday", "True", r"\text{no}", r"\text{am}", "father-in-law", "Évian"]
PRODUCTS = ["x", "xy", "abc", "mgh", "xyz", "abcd", "mnpq", r"\pi", "infinity", "sinx", "2e", "x and y", "A", "ab", "5"]


def test_words_are_told_from_products() -> None:
    assert [word_of(word) is not None for word in WORDS] == [True] * len(WORDS)
    assert [word_of(text) for text in PRODUCTS] == [None] * len(PRODUCTS)


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_right_for_itself_alone(word: str, name: str) -> None:
    grade, letters = GRADERS[name], re.sub(r"\\text|[{}]", "", word)
    for form in (letters, letters.upper(), letters.lower(), rf"\text{{{letters}}}", rf"\textbf{{{letters}.}}"):
        assert grade(f"It is \\boxed{{{form}}}", word, {})[:2] == (1.0, "ok"), form
    for form in (letters[::-1], rf"\text{{{letters[1:] + letters[0]}}}", f"{letters} x", "5", "x"):
        assert grade(f"It is \\boxed{{{form}}}", word, {})[:2] == (0.0, "ok"), form
    assert grade("It is a thing.", word, {})[0] == 0


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize(
    "words",
    ["now won own", "rat art tar", "Mac cam", "cat act", "god dog", "net ten", "bat tab", "saw was", "TFT FTT",
     "TFFT FTFT", "BCD DCB", "XLIV XLVI", "MCMXC MCMCX", "dab bad", "stop pots", "sun uns", "oui iou"],
)  # fmt: skip
def test_letters_in_another_order_are_another_word(words: str, name: str) -> None:
    """Also three letters, of which no list has all words, and rows of letters."""
    for answer in words.split():
        for other in words.split():
            for form in (other, other.lower(), f"\\text{{{other}}}", f" {other}. "):
                value = GRADERS[name](f"\\boxed{{{form}}}", answer, {})[0]
                assert value == (other == answer), (form, answer)


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("words", ["xy yx", "ab ba", "xyz zyx", "mgh hgm", "abc cba", "axy yxa"])
def test_products_of_variables_may_be_in_any_order(words: str, name: str) -> None:
    one, other = words.split()
    assert GRADERS[name](f"\\boxed{{{one}}}", other, {})[:2] == (1.0, "ok")


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize(
    ("one", "other"),
    [("the east", "east"), ("The East", "east"), (r"\text{the east}", "east"), ("a planet", "planet"),
     ("an apple", "Apple"), ("the big dog", "Big dog."), (r"\text{No solution}", "no solution")],
)  # fmt: skip
def test_an_article_and_case_change_no_word(one: str, other: str, name: str) -> None:
    for text, answer in ((one, other), (other, one)):
        assert GRADERS[name](f"\\boxed{{{text}}}", answer, {})[:2] == (1.0, "ok")
        assert GRADERS[name](r"\boxed{the west}", answer, {})[0] == 0


def test_a_word_needs_no_box_where_the_grader_reads_other_answers() -> None:
    """Math-Verify's reading of the text, as a word."""
    assert GRADERS["math_verify"]("The answer is $east$.", "east", {})[:2] == (1.0, "ok")
    assert GRADERS["math_verify"]("The answer is $seat$.", "east", {})[:2] == (0.0, "ok")
    assert GRADERS["math_verify"]("Nothing here", "east", {})[1] == "unparsed"
    for name in ("math_verify_box", "math_verify_strict", "oat"):
        assert GRADERS[name]("The answer is $east$.", "east", {})[:2] == (0.0, "no_box")


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("answer", ["proof", "Proof.", "notfound", "not found", r"\text{NaN}", r"\boxed{proof}"])
def test_a_word_for_a_missing_answer_is_none(name: str, answer: str) -> None:
    """A policy that learned it would be right for ever."""
    assert GRADERS[name](r"\boxed{proof} \boxed{notfound}", answer, {})[:2] == (0.0, "bad_gold")
