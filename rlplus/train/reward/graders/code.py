"""Programs: the code in a response, run in a sandbox against tests that it does not see.

The answer is JSON. {"after": tests}: Python that must reach its end, using what the code defines, as in DeepSeek's
LeetCode; also with {"before": text, "function": name}: the code goes on behind this text, which the tests see too, and
defines this name, as in HumanEval. {"cases": [[input, output], ...]}: a program that reads and writes, or, with
{"function": name}, a function, whose arguments are the input's lines and whose result the output, in JSON.
"""

import json
import re
from collections.abc import Container, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from ....sandbox import Sandbox  # noqa: TID252  the worker loads both folders under other names
from .base import Grade, Grader

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)  # the language, and what follows it; the code
_DEFINED = re.compile(r"^[ \t]*(?:async )?(?:def|class) +(\w+)", re.MULTILINE)
_PYTHON = ("python", "python3", "py", "py3")
# Names that solutions rely on, as on the sites from which the problems are.
_IMPORTS = (
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import *\nfrom typing import *\n"
)


def code_grader(sandbox: Sandbox) -> Grader:
    """Right if the program passes every test within the sandbox's limits."""

    def grade(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
        try:
            tests = json.loads(answer)
            cases = None if "after" in tests else _read_cases(tests)
            if cases is None:
                for part in (tests.get("before", ""), tests["after"]):
                    compile(part, "tests.py", "exec")
        except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
            return 0.0, "bad_gold", f'want {{"after": ...}} or {{"cases": ...}} as JSON, got {answer[:80]!r} ({error})'
        code = extract_code(text, _wanted_names(tests))
        if code is None:
            return 0.0, "unparsed", "there is no code block"
        if cases is not None:
            return _judge_cases(sandbox, _IMPORTS + code, cases, tests.get("function"))
        before = _IMPORTS + tests.get("before", "")
        passed, reason = sandbox.test(before + code, before, tests["after"], tests.get("function"))
        return (1.0, "ok", "") if passed else (0.0, "ok", reason)

    grade.note = sandbox.kind  # type: ignore[attr-defined]
    return grade


def _read_cases(tests: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Inputs with what is wanted: a text, of a function the value."""
    cases = [(str(given), str(wanted)) for given, wanted in tests["cases"]]
    if not cases:
        raise ValueError("no case")  # any code would pass
    return cases if tests.get("function") is None else [(given, json.loads(wanted)) for given, wanted in cases]


def _judge_cases(sandbox: Sandbox, code: str, cases: list[tuple[str, Any]], function: str | None) -> Grade:
    same = _same_text if function is None else _same_value
    results = sandbox.run(code, [given for given, _ in cases], function)
    try:
        for number, (ended_well, output) in enumerate(results):
            if not ended_well:
                return 0.0, "ok", f"test {number + 1} of {len(cases)}: {output}"
            if not same(output, cases[number][1]):
                return 0.0, "ok", f"test {number + 1} of {len(cases)}: another result"
        return 1.0, "ok", ""
    finally:
        results.close()


def extract_code(text: str, wanted: Container[str] = ()) -> str | None:
    """The last code block that defines a function or class of a wanted name, else the last block.

    Of the blocks in Python, or without any, of those in no language.
    """
    found = [((marks.lower().split() or [""])[0], code) for marks, code in _BLOCK.findall(text)]
    blocks = [code for language, code in found if language in _PYTHON] or [
        code for language, code in found if not language
    ]
    blocks = [code for code in blocks if any(name in wanted for name in _DEFINED.findall(code))] or blocks
    return blocks[-1] if blocks else None


def _wanted_names(tests: Mapping[str, Any]) -> set[str]:
    """Names that the tests call; none for a program that reads and writes."""
    if tests.get("function"):
        return {tests["function"]}
    after = tests.get("after", "")
    return set(re.findall(r"\w+", after)).difference(_DEFINED.findall(after))


def _same_value(output: str, wanted: Any) -> bool:
    """Whether the output is JSON of that value. One too deep or too large to read is not."""
    try:
        return bool(json.loads(output) == wanted)
    except (ValueError, RecursionError, MemoryError):
        return False


def _same_text(output: str, wanted: str) -> bool:
    """Equal texts up to white space and the notation of numbers."""
    one = [line.split() for line in output.strip().splitlines()]
    other = [line.split() for line in wanted.strip().splitlines()]
    return len(one) == len(other) and all(
        len(ours) == len(theirs) and all(map(_same_word, ours, theirs)) for ours, theirs in zip(one, other, strict=True)
    )


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:
        return False
