"""Columns of demonstrations that are only the answer, from which no reasoning can be learned."""

import re
from collections.abc import Sequence
from typing import Any

from rlplus.train.data.row_files import Row, get_column

ALMOST_ALL = 0.9  # share of the rows
_BOX = re.compile(r"(?s)\\boxed\s*\{(.*)\}")


def bare_answers(rows: Sequence[Row], demonstration: str, answer: str, pattern: str | None) -> str | None:
    """The problem of a column of demonstrations that equals the answers in almost all rows that have both; else None.

    answer, pattern: the column of the answers, and what finds them in it.
    """
    pairs = [(_texts(row, demonstration), _answer(row, answer, pattern)) for row in rows]
    pairs = [(texts, answer) for texts, answer in pairs if texts and answer]
    bare = [answer for texts, answer in pairs if all(text == answer for text in texts)]
    if not bare or len(bare) < ALMOST_ALL * len(pairs):
        return None
    return (
        f"the column {demonstration!r} is only the answer in {len(bare)} of {len(pairs)} rows looked at: "
        f"want worked solutions as demonstrations; got {bare[0][:40]!r}"
    )


def _answer(row: Row, column: str, pattern: str | None) -> str:
    found = re.search(pattern or "(?s)(.*)", "\n".join(_texts(row, column, whole=True)))
    return _plain(found[1]) if found else ""


def _texts(row: Row, column: str, *, whole: bool = False) -> list[str]:
    """The column's texts, of which a list has several; whole: as they are written."""
    try:
        value: Any = get_column(row, column)
    except KeyError:
        return []
    parts = value if isinstance(value, list) else [value]
    contents = [part.get("content") if isinstance(part, dict) else part for part in parts]
    texts = [str(content) for content in contents if content is not None]
    return texts if whole else [plain for text in texts if (plain := _plain(text))]


def _plain(text: str) -> str:
    """The text without a box or dollar signs around it."""
    text = text.strip().strip("$").strip()
    box = _BOX.fullmatch(text)
    return box[1].strip() if box else text
