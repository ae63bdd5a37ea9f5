"""The types that all graders share, and the boxes in a text."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Grade = tuple[float, str, str]  # value, status, detail: see rlplus.train.reward.Score
Grader = Callable[[str, str, Mapping[str, Any]], Grade]  # (text, answer, the row's `data.columns`)

NO_BOX: Grade = (0.0, "no_box", "there is no closed box with an answer in it")

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile("[{}]")


def boxes(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Start, end and content of every `\boxed{...}` and `\fbox{...}` whose braces match, in order; inner ones too."""
    closing = None
    for found in _BOX.finditer(text):
        closing = _closing_braces(text) if closing is None else closing
        if (end := closing.get(found.end() - 1)) is not None:
            yield found.start(), end + 1, text[found.end() : end].strip()


def last_box(text: str) -> str | None:
    """The content of the last box that is closed; None without one."""
    contents = [content for _, _, content in boxes(text)]
    return contents[-1] if contents else None


def _closing_braces(text: str) -> dict[int, int]:
    """The place of the brace that closes each opening one. One pass, however many boxes a policy leaves open."""
    opened = list[int]()
    closing = dict[int, int]()
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing
