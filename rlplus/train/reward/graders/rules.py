"""Responses that are worth 0 whatever a grader reads in them: without an end, the end of the thought, or a box."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple

from .base import NO_BOX, Grade, Grader, boxes

# (text, answer, the row's columns, whether the response was cut off, whether the prompt asks for a box)
Judge = Callable[..., Grade]
BOX = "\\boxed"  # a prompt with this asks for a box
_CUT_OFF: Grade = (0.0, "cut_off", "the limit of tokens ended it")
_NO_THOUGHT: Grade = (0.0, "unparsed", "no </think>")


class Rules(NamedTuple):
    """zero_if_cut: whether a response that was cut off is worth 0. box: whether one without a closed box is."""

    zero_if_cut: bool
    box: Literal["required", "asked", "optional"]


def rules_of(name: str, cut_off: str, box: str) -> Rules:
    """The rules of a grader, a kind or a function's reference, with these values of reward.cut_off and reward.box."""
    zero = cut_off == "zero" or (cut_off == "auto" and not _is_function(name))
    if box == "auto":
        return Rules(zero, "asked" if name == "math_verify" else "optional")
    return Rules(zero, "required" if box == "required" else "optional")


def judge(name: str, grader: Grader, rules: Rules, require_think: bool) -> Judge:
    """The grader, behind its rules. Where it cannot read the reference, the verdict says so."""

    @wraps(grader)  # its note, too
    def verdict(text: str, answer: str, row: Mapping[str, Any], cut: bool = False, asked: bool = False) -> Grade:
        broken = _CUT_OFF if cut and rules.zero_if_cut else None
        if require_think:
            _, thought, text = text.rpartition("</think>")
            broken = broken or (None if thought else _NO_THOUGHT)
        if rules.box == "required" or (rules.box == "asked" and asked):
            broken = broken or (None if any(content for *_, content in boxes(text)) else NO_BOX)
        if broken is None:
            return grader(text, answer, row)
        of_nothing = broken if _is_function(name) else grader("", answer, row)
        return of_nothing if of_nothing[1] == "bad_gold" else broken

    return verdict


def _is_function(name: str) -> bool:
    return ":" in name
