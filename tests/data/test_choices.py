"""Choices in columns of their own, in the layouts of the field's data sets."""

from typing import Any

import pytest

from rlplus.train.data.choices import hidden_choices

TEXTS = ["a planet", "a stone", "a comet", "a moon"]
LAYOUTS: dict[str, tuple[str, Any, Any]] = {  # the column, its value, an answer that points at the second choice
    "mmlu": ("choices", TEXTS, 1),
    "arc": ("choices", {"text": TEXTS, "label": list("ABCD")}, "B"),
    "arc, digits": ("choices", {"text": TEXTS, "label": list("1234")}, "2"),
    "arc, as published": (
        "question.choices",
        [{"text": t, "label": n} for t, n in zip(TEXTS, "ABCD", strict=True)],
        "B",
    ),
    "openbookqa": ("choices", {"label": list("ABCD"), "text": TEXTS}, "B"),
    "hellaswag": ("endings", TEXTS, "1"),
    "mmlu pro": ("options", TEXTS, "B"),
    "medqa": ("options", dict(zip("ABCD", TEXTS, strict=True)), "B"),
    "medqa, parquet": ("options", dict(zip("ABCDE", [*TEXTS, None], strict=True)), "B"),
    "medqa, key and value": ("options", [{"key": n, "value": t} for t, n in zip(TEXTS, "ABCD", strict=True)], "B"),
    "quail": ("answers", TEXTS, 1),
    "numbers": ("choices", [12, 15, 18, 21], "B"),
    "numbers with a point": ("choices", [1.5, 2.5, 3.5, 4.5], "B"),
    "pandas": ("choices", TEXTS, 1.0),
    "a list of one": ("options", TEXTS, ["B"]),
}


def row(layout: str, **changes: Any) -> dict[str, Any]:
    column, choices, answer = LAYOUTS[layout]
    nested = {"question": {"choices": choices}} if "." in column else {column: choices}
    return {"prompt": "Which turns?", "key": answer} | nested | changes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_that_point_at_choices_are_found(layout: str) -> None:
    problem = hidden_choices([row(layout)] * 5, "prompt", "key")
    assert problem is not None
    assert f"point at '{LAYOUTS[layout][0]}' in 5 of 5 rows looked at, and 5 of 5 prompts there do not show" in problem
    assert hidden_choices([row(layout, key="Mars")] * 5, "prompt", "key") is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "malformed",
    [{"choices": None}, {"choices": "A, B"}, {"choices": [None, "x"]}, {"choices": {}}, {"choices": [{}]},
     {"key": None}, {"choices": ["a"]}, {"choices": [["a"], ["b"]]}, {"key": {"a": 1}}, {"key": True}],
)  # fmt: skip
def test_a_malformed_row_hides_no_other_ones(layout: str, malformed: dict[str, Any]) -> None:
    """Wherever it is, in whichever column."""
    column = LAYOUTS[layout][0].partition(".")[0]
    odd = row(layout) | {(column if name == "choices" else name): value for name, value in malformed.items()}
    for place in (0, 3, 5):
        rows = [row(layout)] * 5
        rows.insert(place, odd)
        assert "in 5 of 6 rows" in str(hidden_choices(rows, "prompt", "key"))
    assert hidden_choices([odd] * 3, "prompt", "key") is None


def test_prompts_that_show_what_is_asked_for_are_right() -> None:
    shown = "Which turns? A) a planet B) a stone C) a comet D) a moon"
    assert hidden_choices([row("arc", prompt=shown)] * 3, "prompt", "key") is None
    problem = hidden_choices([row("mmlu", prompt=shown)] * 3, "prompt", "key")  # the prompt asks for a letter
    assert problem is not None
    assert "prompts show letters" in problem


def test_answers_that_are_texts_of_choices_point_at_none() -> None:
    assert hidden_choices([row("numbers", key=15)] * 3, "prompt", "key") is None
    assert hidden_choices([{"prompt": "2 or 3?", "choices": [2, 3], "key": "2"}] * 3, "prompt", "key") is None
    assert hidden_choices([{"prompt": "1?", "answers": ["1", "one"], "key": "1"}] * 3, "prompt", "key") is None
    assert hidden_choices([{"prompt": "1?", "answers": ["A", "B"]}] * 3, "prompt", "answers") is None
    assert hidden_choices([], "prompt", "key") is None
