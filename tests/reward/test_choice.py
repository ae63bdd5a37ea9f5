"""Multiple choice: the letter that a response settles on, however it is written."""

import pytest

from rlplus.train.reward.graders.choice import choice, letter

READ = [
    ("(C)", "C"),
    ("**C**", "C"),
    ("ANSWER: C", "C"),
    ("C) Planetary days will become shorter.", "C"),
    (r"so \boxed{C}", "C"),
    ("c", "C"),
    ("(c)", "C"),
    ("answer: c", "C"),
    (r"\boxed{c}", "C"),
    ("C", "C"),
    ("C.", "C"),
    ("**C. Planetary days**", "C"),
    (r"\boxed{\text{C}}", "C"),
    (r"\boxed{(C)}", "C"),
    (r"$\boxed{\textbf{(C)}\ 5}$", "C"),
    (r"\boxed{\text{C) days will become shorter}}", "C"),
    (r"\(\boxed{\mathrm{C}}\)", "C"),
    (r"\fbox{C}", "C"),
    ("The answer is (C).", "C"),
    ("The correct answer is **C**.", "C"),
    ("**Answer:** C", "C"),
    ("**Answer**: (C)", "C"),
    ("Answer: **c) shorter days**", "C"),
    ("Final answer: $C$", "C"),
    ("The final answer is: option C", "C"),
    ("The correct answer choice is C because the days become shorter.", "C"),
    ("The answer to this question is therefore C, as said.", "C"),
    ("The answer is\n\n(C)", "C"),
    ("Reasoning.\n\nTherefore, option C is correct.", "C"),
    ("Reasoning about (A) and (B).\nSo it must be (C), the last.", "C"),
    ("The answer is A because it is.", "A"),
    ("Answer: A", "A"),
    ("The answer is I.", "I"),
    ("ANSWER: J", "J"),
    ("<answer>B</answer>", "B"),
    ("Thought.\n<answer> (B) text </answer>", "B"),
    ("<ANSWER>b</ANSWER>", "B"),
    ("<answer>A</answer> is mine.", "A"),
    ("the correct choice is: B", "B"),
    ("The correct option is (B), not (C).", "B"),
    (r"\boxed{\bf{B}}", "B"),
    (r"\boxed{{\bf B}}", "B"),
    (r"\boxed{\rm B}", "B"),
    # The last of several counts.
    ("The answer is A. No, wait: the answer is B.", "B"),
    (r"At first \boxed{A}, but then \boxed{B}", "B"),
    (r"First I thought the answer is A. \boxed{B}", "B"),
    (r"I have \boxed{A} here." + "\nANSWER: B", "B"),
    ("The answer is D because option B is wrong.", "D"),
    # Words are no letters.
    ("The answer is a planet.", None),
    ("The answer: A planet turns faster.", None),
    ("the answer is I think unclear", None),
    ("The answer is E = mc^2.", None),
    ("Answer: C6H12O6", None),
    ("answer > B", None),
    ("The answer is E < F.", None),
    ("<answer>A planet turns</answer>", None),
    ("The best choice among B and C is unclear.", None),
    ("ANSWER: $LETTER", None),
    ("I do not know.", None),
    ("A planet turns.", None),
    ("", None),
    (r"\boxed{5}", None),
    (r"\boxed{a+b}", None),
    (r"\boxed{\text{Planetary days}}", None),
    (r"\boxed{B \text{ and } D}", None),
    (r"\boxed{C", None),
    ("The options are\nA) one\nB) two\nC) three", None),
    ("Either (A) or (B).", None),
]


@pytest.mark.parametrize(("text", "expected"), READ, ids=range(len(READ)))
def test_letter(text: str, expected: str | None) -> None:
    assert letter(text) == expected


def test_every_letter_in_every_way() -> None:
    ways = ["({})", "**{}**", "ANSWER: {}", "{}) text", r"\boxed{{{}}}", "The answer is ({}).", "Answer: {}", "{}."]
    for sign in "ABCDEFGHIJ":
        for way in ways:
            for text in (way.format(sign), f"Let us think.\n{way.format(sign)}\n"):
                assert letter(text) == sign, text
            assert letter(way.format(sign.lower())) == sign, way


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 3.", "3"),
        ("**Answer:** (3) text", "3"),
        (r"first \boxed{2}, then \boxed{3}", "3"),
        ("3) text", "3"),
        ("(3)", "3"),
        ("3", "3"),
        ("Of 1 to 4, option 3 is right.", "3"),
        ("The answer is 3.5", None),
        ("The answer is 35", None),
        ("The answer is 3 + 1", None),
        ("Either (2) or (3).", None),
        ("1) one\n2) two\n3) three", None),
        ("ANSWER: C", None),
    ],
)
def test_options_that_are_digits(text: str, expected: str | None) -> None:
    """Read as letters are, but only if the answer is a digit."""
    assert choice(text, "3", {}) == (
        (1.0, "ok", "") if expected else (0.0, "unparsed", "no letter is marked as the answer")
    )
    assert choice(text, "(3) text", {})[0] == (expected == "3")
    assert choice(text, "2", {})[0] == 0
    assert choice(text, "C", {})[0] == (text == "ANSWER: C")


def test_verdicts() -> None:
    assert choice("ANSWER: C", "C", {}) == (1.0, "ok", "")
    assert choice("ANSWER: C", "(C)", {}) == (1.0, "ok", "")
    assert choice("ANSWER: c", "C) shorter days", {}) == (1.0, "ok", "")
    assert choice("ANSWER: B", "C", {}) == (0.0, "ok", "")
    assert choice("who knows", "C", {})[1] == "unparsed"
    assert choice("ANSWER: C", "12", {})[1] == "bad_gold"
