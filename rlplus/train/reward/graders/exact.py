"""Equality of texts."""

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from .base import Grade, Grader

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def exact_match(pattern: str | None) -> Grader:
    """Compare the text, or the last match of the pattern's one group, with the answer; 1,000 is 1000."""
    regex = None if pattern is None else re.compile(pattern)
    if regex is not None and regex.groups != 1:
        raise ValueError(f"want a reward pattern with exactly one group, got {pattern!r} with {regex.groups}")

    def grade(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        if regex is not None:
            found = next(iter(deque(regex.finditer(text), maxlen=1)), None)  # the last match is the final answer
            if found is None or found.group(1) is None:
                return 0.0, "unparsed", "the pattern does not match"
            text = found.group(1)
        return float(_plain(text) == _plain(answer)), "ok", ""

    return grade


def _plain(text: str) -> str:
    text = text.strip()
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
