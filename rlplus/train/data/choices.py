"""Columns of choices beside prompts that do not show them, whose answers no response can give."""

from collections.abc import Sequence
from typing import Any

from rlplus.train.data.row_files import Row, get_column

NAMES = ("choices", "options", "endings", "answers", "question.choices")
# Keys of dicts.
_LABELS = ("label", "labels", "key", "id")
_TEXTS = ("text", "texts", "value", "content")

Choices = dict[str, str]  # the texts by their labels


def hidden_choices(rows: Sequence[Row], prompt: str, answer: str) -> str | None:
    """The problem of rows whose answers are places or letters of choices that the prompts do not show; None if none.

    prompt, answer: names of these columns. Rows whose choices cannot be read count for nothing; of the others most must
    have such an answer. An answer that is a place is a problem in any case: prompts show letters.
    """
    name = max(NAMES, key=lambda column: sum(len(_choices(_value(row, column))) > 1 for row in rows), default="")
    known = [(row, choices) for row in rows if len(choices := _choices(_value(row, name))) > 1 and name != answer]
    pointing = [(row, choices, place) for row, choices in known if (place := _points(row, choices, answer)) is not None]
    hidden = sum(any(text not in str(_value(row, prompt)) for text in choices.values()) for row, choices, _ in pointing)
    places = sum(place for *_, place in pointing)
    if 2 * len(pointing) <= len(known) or not (hidden or places):
        return None
    count = f"{hidden} of {len(pointing)} prompts there do not show them" if hidden else "prompts show letters"
    row, choices, _ = pointing[0]
    return (
        f"the answers in {answer!r} point at {name!r} in {len(pointing)} of {len(rows)} rows looked at, and {count}: "
        "want prompts with the choices and their letters, and the letter as the answer; got "
        f"{_value(row, answer)!r} of {str(list(choices.values()))[:80]}"
    )


def _points(row: Row, choices: Choices, answer: str) -> bool | None:
    """Whether the answer is the place of a choice (True) or its label (False); None if it is neither, or a text."""
    value = _value(row, answer)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, bool) or not isinstance(value, int | str) or (given := str(value).strip()) in choices.values():
        return None
    if given in choices:
        return False
    return True if given.isdecimal() and len(given) < 4 and int(given) <= len(choices) else None


def _choices(value: Any) -> Choices:
    """The choices of a row as data sets have them: a list of texts or numbers, or of dicts, or a dict; {} of no such.

    Dicts are ARC's {"text": [...], "label": [...]}, {"text": ..., "label": ...} in a list, and {"A": ..., "B": ...}.
    """
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        texts = [_named(each, _TEXTS) for each in value]
        labels = [_named(each, _LABELS) for each in value]
    elif isinstance(value, dict):
        texts = _named(value, _TEXTS)
        labels = _named(value, _LABELS)
        if texts is None and all(len(str(key)) == 1 for key in value):
            named = {key: text for key, text in value.items() if text is not None}  # Parquet has every row's letters
            texts = list(named.values())
            labels = list(named)
    else:
        texts = value
        labels = None
    if not isinstance(texts, list) or not all(isinstance(text, str | int | float) for text in texts):
        return {}
    if not isinstance(labels, list) or len(labels) != len(texts) or None in labels:
        labels = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(texts)])
    return {str(label): str(text) for label, text in zip(labels, texts, strict=False)}


def _named(value: Row, names: Sequence[str]) -> Any:
    return next((value[name] for name in names if name in value), None)


def _value(row: Row, column: str) -> Any:
    try:
        return get_column(row, column)
    except KeyError:
        return None
