"""Columns of choices beside prompts that do not show them, whose answers no response can give."""

from collections.abc import Sequence
from typing import Any

from rlplus.data.row_files import Row, get_column

NAMES = ("choices", "options", "endings")


def hidden_choices(rows: Sequence[Row], prompt: str, answer: str) -> str | None:
    """The problem of rows whose answers are places or letters of choices that the prompts do not show; None if none.

    prompt, answer: names of these columns. An answer that is a place is a problem in any case: prompts show letters.
    """
    found = next((name for name in NAMES if rows and all(_texts(row.get(name)) for row in rows)), None)
    if found is None:
        return None
    pointing = hidden = places = 0
    for row in rows:
        texts, labels, given = _texts(row[found]), _labels(row[found]), _value(row, answer)
        place = isinstance(given, int | str) and str(given).strip().isdigit() and int(given) <= len(texts)
        place = place and str(given).strip() not in texts
        pointing += place or (isinstance(given, str) and given.strip() in labels)
        places += place
        hidden += not all(text in str(_value(row, prompt)) for text in texts)
    if pointing < len(rows) or not (hidden or places):
        return None
    count = f"{hidden} of {len(rows)} prompts looked at do not show them" if hidden else "prompts show letters"
    return (
        f"the answers in {answer!r} point at {found!r}, and {count}: want prompts with the choices and their letters, "
        f"and the letter as the answer; got {_value(rows[0], answer)!r} of {str(_texts(rows[0][found]))[:80]}"
    )


def _texts(value: Any) -> list[str]:
    """Texts of a list, or of ARC's {"text": [...], "label": [...]}; none for anything else."""
    value = value.get("text") if isinstance(value, dict) else value
    whole = isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) for text in value)
    return value if whole else []


def _labels(value: Any) -> list[str]:
    named = value.get("label") if isinstance(value, dict) else None
    return [str(label) for label in named] if isinstance(named, list) else list("ABCDEFGHIJ"[: len(_texts(value))])


def _value(row: Row, column: str) -> Any:
    try:
        return get_column(row, column)
    except KeyError:
        return None
