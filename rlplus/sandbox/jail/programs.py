"""Runs the programs of a job: each run in a fork of the driver.

A job is JSON: {"code": text, "inputs": [text, ...], "function": name or null, "link": descriptor or null, "tests": text
or null}. The code runs once for each input, in a fork, and reads it from stdin; with `function`, that function gets its
lines as arguments. The driver writes `READY`, and for each run one line: [true, output] or [false, reason].

A link connects two sandboxes, so that code shares no process with the tests that judge it. In the one without `tests`
the code runs and answers; in the other the tests run behind their own code, and that one's [true, ""] is the verdict.
What they use of the answering one (`function`, which their own code may have begun, and names that are only there) they
get by value if it is a number, a text or a collection of these. Anything else is a proxy (`_Remote`), which is equal to
nothing but itself: no `__eq__` of the code is ever asked.
"""

import builtins
import contextlib
import json
import numbers
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

OUTPUT_LIMIT = 1 << 20  # bytes of one run
READY = "ready"
_LOOK_S = 0.01
_INPUT = ".input"
_LONGEST_REASON = 500


def _run(job: dict[str, Any], given: str, end: int) -> None:
    """Run the code, in the fork; results go to descriptor `end`."""
    program = job["function"] is None and job["link"] is None
    scope: dict[str, Any] = {"__name__": "__main__" if program else "program"}
    scope |= {"exit": sys.exit, "quit": sys.exit}  # Python's start without -S has them
    code = compile(job["code"], "program.py", "exec")
    sys.argv = ["program.py"]
    sys.setrecursionlimit(100_000)
    os.dup2(end if program else os.open(os.devnull, os.O_WRONLY), 1)
    exec(code, scope)
    if job["tests"] is not None:
        scope.pop(job["function"], None)
        _test(scope, job["tests"], job["link"])
    elif job["link"] is not None:
        _serve(scope, job["link"])
    sys.stdout.flush()
    if program or job["link"] is not None:
        return
    function = getattr(scope["Solution"](), job["function"]) if "Solution" in scope else scope[job["function"]]
    with os.fdopen(end, "w") as file:
        file.write(json.dumps(function(*map(json.loads, given.split("\n")))))


# Values cross a link as JSON, with a collection as a list behind its type's name.
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, bytearray, dict)}


def _encode(value: Any, number: Callable[[Any], int]) -> Any:
    """number: of an object that stays in the code's process."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, *(_encode(part, number) for part in (value.items() if kind is dict else value))]
    return ["object", number(value)]


def _decode(data: Any, found: Callable[[int], Any]) -> Any:
    """found: the object of a number, or its proxy."""
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind == "object":
        return found(*parts)
    return _COLLECTIONS[kind]([_decode(part, found) for part in parts])


def _serve(scope: dict[str, Any], link: int) -> None:
    """Answer the tests' process until it ends: names of the code, attributes, calls."""
    objects: list[Any] = []
    sys.set_int_max_str_digits(0)

    def number(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    operations: dict[str, Callable[..., Any]] = {
        "names": lambda *names: {name: scope[name] for name in names if name in scope},
        "attribute": getattr,
        "call": lambda function, positional, named: function(*positional, **named),
    }
    with os.fdopen(link) as requests, os.fdopen(os.dup(link), "w") as replies:
        for line in requests:
            try:
                operation, *arguments = (_decode(part, objects.__getitem__) for part in json.loads(line))
                reply = [True, _encode(operations[operation](*arguments), number)]
            except Exception as error:
                reply = [False, [type(error).__name__, str(error)]]
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


class _Remote:
    """Proxy of an object in the code's process."""

    def __init__(self, number: int, ask: Callable[..., Any]) -> None:
        self._number = number
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", self, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._ask("call", self, positional, named)


def _test(scope: dict[str, Any], tests: str, link: int) -> None:
    """Run the tests, with proxies of what they use and `scope` does not have."""
    requests = os.fdopen(link, "w")
    replies = os.fdopen(os.dup(link))
    sys.set_int_max_str_digits(0)

    def number(value: Any) -> int:
        if not isinstance(value, _Remote):
            raise TypeError(f"want plain values and the code's own objects as arguments; got a {type(value).__name__}")
        return value._number

    def ask(*request: Any) -> Any:
        line = ""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            requests.write(json.dumps([_encode(part, number) for part in request]) + "\n")
            requests.flush()
            line = replies.readline()
        if not line:
            raise EOFError("the code ended before its tests")
        well, answer = json.loads(line)
        if well:
            return _decode(answer, lambda number: _Remote(number, ask))
        name, text = answer
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise RuntimeError(f"{name}: {text}")

    own = scope.keys() | vars(builtins).keys()
    scope |= ask("names", *sorted(set(re.findall(r"\w+", tests)) - own))
    exec(compile(tests, "tests.py", "exec"), scope)


def _one(job: dict[str, Any], given: str, replies: int) -> list[Any]:
    """[true, output] or [false, reason] of one run, which does not get the descriptor `replies`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.close(replies)
            os.dup2(_nameless_file(given), 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdin = os.fdopen(0)
            _run(job, given, writing)
            code = 0
        except SystemExit as stop:  # a program that exits has ended as it wanted
            sys.stdout.flush()
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException as error:
            with contextlib.suppress(OSError):
                reason = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
                os.write(writing, reason[:_LONGEST_REASON])
        finally:
            os._exit(code)
    os.close(writing)
    output = b""
    status: int | None = None
    while len(output) <= OUTPUT_LIMIT:
        if select.select([reading], [], [], 0 if status is not None else _LOOK_S)[0]:
            if not (data := os.read(reading, 1 << 16)):
                break
            output += data
        elif status is not None:  # a process that it left running still has the pipe
            break
        else:
            ended, found = os.waitpid(child, os.WNOHANG)
            status = found if ended else None
    os.close(reading)
    if len(output) > OUTPUT_LIMIT:
        return [False, "too much output"]
    if status is None:
        _, status = os.waitpid(child, 0)
    text = output.decode(errors="replace")
    if os.WIFSIGNALED(status):
        return [False, f"ended by {_signal_name(os.WTERMSIG(status))}"]
    return [True, text] if os.WEXITSTATUS(status) == 0 else [False, text[-_LONGEST_REASON:] or "it did not end well"]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _nameless_file(text: str) -> int:
    """A descriptor that gives the text, from a file that no folder lists."""
    descriptor = os.open(_INPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(_INPUT)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def drive() -> None:
    """Do the job on stdin; replies go to stdout."""
    job = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    replies.write(READY + "\n")
    replies.flush()
    for given in job["inputs"]:
        replies.write(json.dumps(_one(job, given, replies.fileno())) + "\n")
        replies.flush()
