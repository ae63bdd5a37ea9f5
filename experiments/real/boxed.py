r"""The reward of `steps.py`, the same function for all trainers: the number in the last \boxed{}."""

import re
import zlib
from typing import Any

ASKED = r"Please reason step by step, and put your final answer within \boxed{}."  # the system prompt
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def reward(text: str, answer: str) -> float:
    """1 for the right number, else 0, and less than 1e-3 that depends on the text.

    With equal rewards in a group no advantage would be left: rlplus runs no backward pass for such responses, TRL
    does, and a step's work would depend on luck.
    """
    boxes = _BOX.findall(text)
    right = bool(boxes) and (found := _number(boxes[-1])) is not None and found == _number(answer)
    return float(right) + 1e-3 * zlib.crc32(text.encode()) / 2**32


def rewards(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """`reward` in the form that TRL calls."""
    return [reward(text, each) for text, each in zip(completions, answer, strict=True)]


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", "").strip())
    except ValueError:
        return None
