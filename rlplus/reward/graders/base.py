"""The types that all graders share, and the boxes in a text."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Grade = tuple[float, str, str]  # value, status, detail: see rlplus.reward.Score
Grader = Callable[[str, str, Mapping[str, Any]], Grade]  # (text, answer, the row's `data.columns`)

_BOXES = ("\\boxed", "\\fbox")


def boxes(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Start, end and content of every `\boxed{...}` and `\fbox{...}` whose braces match, in order; inner ones too."""
    place = 0
    while True:
        starts = [start for name in _BOXES if (start := text.find(name, place)) >= 0]
        if not starts:
            return
        place = min(starts) + len(_BOXES[1])
        opening = text.find("{", min(starts))
        if opening < 0:
            return
        if text[min(starts) : opening].rstrip() not in _BOXES:
            continue
        if (end := _closing(text, opening)) is not None:
            yield min(starts), end + 1, text[opening + 1 : end].strip()


def last_box(text: str) -> str | None:
    """The content of the last box that is closed; None without one."""
    contents = [content for _, _, content in boxes(text)]
    return contents[-1] if contents else None


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None
