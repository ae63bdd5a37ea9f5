"""Programs: the code in a response, run in a sandbox against tests that it does not see.

The answer is JSON. {"after": tests}, also with {"before": text}: the code between these is a program that must reach
its end, as in HumanEval and DeepSeek's LeetCode. {"cases": [[input, output], ...]}: a program that reads and writes,
or, with {"function": name}, a function, whose arguments are the input's lines and whose result the output, in JSON.
"""

import json
import re
import secrets
from collections.abc import Container, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from .base import Grader, Verdict
from .sandbox import Sandbox

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

    def grade(text: str, answer: str, row: Mapping[str, Any]) -> Verdict:
        try:
            tests = json.loads(answer)
            cases = None if "after" in tests else [(str(given), str(wanted)) for given, wanted in tests["cases"]]
            if cases == []:
                raise ValueError("no case")  # any code would pass
        except (ValueError, TypeError, KeyError) as error:
            return 0.0, "bad_gold", f'want {{"after": ...}} or {{"cases": ...}} as JSON, got {answer[:80]!r} ({error})'
        code = extract_code(text, _wanted_names(tests))
        if code is None:
            return 0.0, "unparsed", "there is no code block"
        if cases is None:
            secret = secrets.token_hex(16)
            program = f"{_IMPORTS}{tests.get('before', '')}{code}\n{tests['after']}"
            job = {"code": program, "inputs": [""], "function": None, "secret": secret}
            wanted = [secret]
        else:
            job = {"code": _IMPORTS + code, "inputs": [given for given, _ in cases]}
            job |= {"function": tests.get("function"), "secret": None}
            wanted = [wanted for _, wanted in cases]
        return _judge(sandbox, job, wanted)

    grade.note = sandbox.kind  # type: ignore[attr-defined]
    return grade


def _judge(sandbox: Sandbox, job: dict[str, Any], wanted: list[str]) -> Verdict:
    results = sandbox.run(job)
    try:
        for number, (ended_well, output) in enumerate(results):
            if not ended_well:
                return 0.0, "ok", f"test {number + 1} of {len(wanted)}: {output}"
            if not _same(output, wanted[number], values=job["function"] is not None):
                return 0.0, "ok", f"test {number + 1} of {len(wanted)}: another result"
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
    if "after" in tests:
        after = str(tests["after"])
        return set(re.findall(r"\w+", after)).difference(_DEFINED.findall(after))
    return {tests["function"]} if tests.get("function") else set()


def _same(output: str, wanted: str, *, values: bool) -> bool:
    """Equal values in JSON, or equal texts up to white space and the notation of numbers."""
    if values:
        try:
            return bool(json.loads(output) == json.loads(wanted))
        except ValueError:
            return False
    one, other = ([line.split() for line in text.strip().splitlines()] for text in (output, wanted))
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
