"""Grades untrusted text in a process of its own, which supervisor.py starts: it imports neither torch nor rlplus.

JSON lines on stdin and stdout. First line in: the settings; first line out: ["ready"] or ["error", text]. Then every
line in is a list of [index, text, answer], and every line out is [index, value, status, detail], one per item, in the
order received: the other side knows which one the process was at when it hung or died. Each line out begins with the
settings' `token`, so that code which writes on every descriptor cannot answer in this process's place by accident.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import re
import resource
import sys
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TextIO

Verdict = tuple[float, str, str]  # value, status, detail
Grader = Callable[[str, str], Verdict]

_MAX_DETAIL = 500  # characters


def _exact_match(pattern: str | None) -> Grader:
    regex = None if pattern is None else re.compile(pattern)
    if regex is not None and regex.groups != 1:
        raise ValueError(f"want a reward pattern with exactly one group, got {pattern!r} with {regex.groups}")

    def grade(text: str, answer: str) -> Verdict:
        if regex is not None:
            found = next(iter(deque(regex.finditer(text), maxlen=1)), None)  # the last match is the final answer
            if found is None or found.group(1) is None:
                return 0.0, "unparsed", "the pattern does not match"
            text = found.group(1)
        return float(text.strip() == answer.strip()), "ok", ""

    return grade


def _math_verify() -> Grader:
    # math-verify's own timeouts are signals, swallowed as "not equal"; here the parent kills and counts instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    from math_verify import parse, verify

    @lru_cache(maxsize=1024)  # the members of a group share the answer
    def parse_gold(answer: str) -> list[Any]:
        return list(parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None))

    def grade(text: str, answer: str) -> Verdict:
        gold = parse_gold(answer) if answer.strip() else []
        if not gold:
            return 0.0, "bad_gold", f"math-verify finds no answer in the reference {answer!r}"
        found = parse(text, parsing_timeout=None)
        if not found:
            return 0.0, "unparsed", "math-verify finds no answer in the text"
        return float(verify(gold, found, timeout_seconds=None)), "ok", ""

    return grade


def _function(reference: str) -> Grader:
    module, separator, name = reference.partition(":")
    if not (module and separator and name):
        raise ValueError(f'want reward.function as "module:name", got {reference!r}')
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise ValueError(f"want {reference} to be callable as f(text, answer), got a {type(function).__name__}")

    def grade(text: str, answer: str) -> Verdict:
        value = function(text, answer)
        if value is None:
            return 0.0, "unparsed", f"{reference} returned None"
        value = float(value)
        if not math.isfinite(value):
            raise ValueError(f"want a finite reward from {reference}, got {value}")
        return value, "ok", ""

    return grade


def _make_grader(settings: dict[str, Any]) -> Grader:
    if settings["function"] is not None:
        return _function(settings["function"])
    if settings["kind"] == "math_verify":
        return _math_verify()
    return _exact_match(settings["pattern"])


def _grade(grader: Grader, require_think: bool, text: str, answer: str) -> Verdict:
    if require_think:
        _, closed, text = text.rpartition("</think>")
        if not closed:
            return 0.0, "unparsed", "no </think>"
    try:
        value, status, detail = grader(text, answer)
        return value, status, detail[:_MAX_DETAIL]
    except MemoryError:  # what filled it may still be held: a fresh process serves the others better
        raise SystemExit("reward worker: out of memory (limit: reward.memory_mb)") from None
    except Exception as error:  # one text must not cost the others their score; counted and logged by the parent
        return 0.0, "crash", f"{type(error).__name__}: {error}"[:_MAX_DETAIL]


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Move the protocol off descriptors 0 and 1, where prints and children of the grader could touch it."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")  # os.dup: closed in a child on exec
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def close_in_child() -> None:
        for stream in (requests, replies):
            with contextlib.suppress(OSError):
                os.close(stream.fileno())

    os.register_at_fork(after_in_child=close_in_child)
    return requests, replies


def main() -> None:
    requests, replies = _take_pipes()
    settings = json.loads(requests.readline())
    token = settings["token"]

    def send(*reply: object) -> None:
        replies.write(f"{token}{json.dumps(reply)}\n")
        replies.flush()

    try:
        memory = settings["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        sys.path.insert(0, os.getcwd())
        grader = _make_grader(settings)
    except Exception as error:
        send("error", f"{type(error).__name__}: {error}"[:_MAX_DETAIL])
        return
    send("ready")
    for line in requests:
        for index, text, answer in json.loads(line):
            send(index, *_grade(grader, settings["require_think"], text, answer))


if __name__ == "__main__":
    main()
