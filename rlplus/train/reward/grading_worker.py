"""Grades untrusted text in a process of its own, which supervisor.py starts: it imports neither torch nor rlplus.

JSON lines on stdin and stdout. First line in: the settings; first line out: ["ready", note] or ["error", text]. Then
every line in is a list of [index, text, answer, columns, cut, asked], see `Item` in worker_handle.py, and every line
out is [index, value, status, detail], one per item, in the order received: the other side knows which one the process
was at when it hung or died. Each line out begins with the settings' `token`, so that code which writes on every
descriptor cannot answer in this process's place by accident.
"""

import contextlib
import importlib
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_MAX_DETAIL = 500  # characters of a verdict
_MAX_ERROR = 4000  # characters of what prevents all


def _without_rlplus(name: str) -> Any:
    """A module of rlplus, loaded without the package, under a name that no user's module has."""
    root = Path(__file__).parents[2]
    for folder in ("", "common", "train", "train/reward"):
        package = f"_rlplus/{folder}".rstrip("/").replace("/", ".")
        sys.modules.setdefault(package, ModuleType(package)).__path__ = [str(root / folder)]
    return importlib.import_module(f"_rlplus.{name}")


def _grade(grader: Any, item: Sequence[Any]) -> tuple[float, str, str]:
    try:
        value, status, detail = grader(*item)
        return value, status, detail[:_MAX_DETAIL]
    except MemoryError:  # it may stay full: a fresh process serves the others better
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
        grader = _without_rlplus("train.reward.graders").make_grader(
            settings, _without_rlplus("common.lazy").import_function
        )
    except Exception as error:
        send("error", f"{type(error).__name__}: {error}"[:_MAX_ERROR])
        return
    send("ready", getattr(grader, "note", ""))
    for line in requests:
        for index, *item in json.loads(line):
            send(index, *_grade(grader, item))


if __name__ == "__main__":
    main()
