"""The graders by name. grading_worker.py loads this folder and the sandbox by path: nothing here may import torch, or
rlplus by its name.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import fsum, isfinite  # by name: the package's own module takes the name math where it is imported
from typing import Any

from .base import Grade, Grader
from .rules import Judge, judge, rules_of


def make_grader(settings: Mapping[str, Any], load: Callable[[str], Any]) -> Judge:
    """The grader of these settings: `kind`, or `function` and its weights, as in the configuration's section reward.

    `columns`: names of the values that come with each item. load: `import_function` of rlplus/common/lazy.py.
    ValueError or an import error if it cannot be set up.
    """
    cut_off = settings["cut_off"]
    box = settings["box"]
    think = settings["require_think"]
    named = settings["kind"] if settings["function"] is None else settings["function"]
    weights = {named: 1.0} if isinstance(named, str) else named
    if not isinstance(weights, dict):
        weights = dict.fromkeys(weights, 1.0)
    graders = [
        (judge(name, _named_grader(name, settings, load), rules_of(name, cut_off, box), think), weight)
        for name, weight in weights.items()
    ]
    return graders[0][0] if isinstance(named, str) else _weighted(graders)


def _weighted(graders: Sequence[tuple[Judge, float]]) -> Judge:
    def grade(text: str, answer: str, row: Mapping[str, Any], cut: bool = False, asked: bool = False) -> Grade:
        """The weighted sum, with the first status that is not "ok"."""
        verdicts = [grader(text, answer, row, cut, asked) for grader, _ in graders]
        # exactly rounded: 0.6 + 0.3 + 0.1 is below 1, which would make a right response wrong
        value = fsum(weight * value for (_, weight), (value, _, _) in zip(graders, verdicts, strict=True))
        _, status, detail = next((verdict for verdict in verdicts if verdict[1] != "ok"), verdicts[0])
        return value, status, detail

    return grade


def _named_grader(name: str, settings: Mapping[str, Any], load: Callable[[str], Any]) -> Grader:
    if ":" in name:
        return _function(name, load(name), settings["columns"])
    if name == "exact_match":
        from .exact import exact_match

        return exact_match(settings["pattern"])
    if name == "choice":
        from .choice import choice

        return choice
    if name == "code":
        from ....sandbox import Sandbox  # noqa: TID252  the worker loads both folders under other names
        from .code import code_grader

        try:
            sandbox = Sandbox(settings["sandbox"], settings["memory_mb"] << 20, settings["timeout_s"] / 2)
        except OSError as error:
            raise OSError(f"reward.sandbox: {error}") from None
        return code_grader(sandbox)
    if name == "oat":
        from .oat import oat

        return oat
    from .math import math_verify

    return math_verify(box=name == "math_verify_box", plain=name == "math_verify_strict")


def _function(reference: str, function: Any, columns: Sequence[str]) -> Grader:
    if not callable(function):
        raise ValueError(f"want {reference} to be callable as f(text, answer), got a {type(function).__name__}")
    taken = _taken_columns(function, reference, columns)

    def grade(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        value = function(text, answer, **{name: row[name] for name in taken})
        if value is None:
            return 0.0, "unparsed", f"{reference} returned None"
        value = float(value)
        if not isfinite(value):
            raise ValueError(f"want a finite reward from {reference}, got {value}")
        return value, "ok", ""

    return grade


def _taken_columns(function: Callable[..., Any], reference: str, columns: Sequence[str]) -> list[str]:
    """The columns that the function has a parameter for, behind text and answer."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin may not tell
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(columns)
    further = [p for p in parameters[2:] if p.kind is not p.VAR_POSITIONAL]
    for parameter in further:
        if parameter.default is parameter.empty and parameter.name not in columns:
            wanted = f"{reference} takes {parameter.name!r}: want a column of that name in data.columns"
            raise ValueError(f"{wanted}; got {', '.join(columns) or 'none'}")
    return [parameter.name for parameter in further if parameter.name in columns]
