"""Whatever a response does is its own failure: reward 0 with a reason, never a grader that crashes."""

import json

import pytest
import sandboxes
from reward_graders import linux
from sandboxes import Sandbox, run

from rlplus.train.reward.graders.code import code_grader

pytestmark = linux
sandbox, closed = sandboxes.sandbox, sandboxes.closed

DEEP = """
def deep(levels, wrap):
    value = 2
    for _ in range(levels):
        value = wrap(value)
    return value
"""
EVERYWHERE = (
    "import os\nfor fd in range(64):\n    try:\n        os.write(fd, {!r})\n    except OSError:\n        pass\n"
)
RESULTS = {  # calls of a function f, where 2 is right
    "a list too deep to read": "deep(5_000, lambda value: [value])",
    "an object too deep to read": "deep(1_100, lambda value: {'a': value})",
    "a list too deep to write": "deep(500_000, lambda value: (value,))",
    "many lists": "[[]] * 260_000",
    "itself": "(x := [], x.append(x), x)[2]",
    "more digits than Python reads": "10**5_000",
    "no number": "float('nan')",
    "half a character": "'\\ud800' * 1_000",
    "equal to all": "type('E', (), {'__eq__': lambda self, other: True, '__repr__': lambda self: repr(self)})()",
    "a number that says other digits": "type('I', (int,), {'__repr__': lambda self: '[' * 9_999})(3)",
    "an endless list": "type('L', (list,), {'__iter__': lambda self: iter(int, 1)})([1])",
    "an endless text": "'x' * 2_000_000",
}
PROGRAMS = {  # before a program prints 1, where 2 is right
    "a nameless signal": "import os\nos.kill(os.getpid(), 40)",
    "exit with an object": "raise SystemExit(10**100)",
    "an exception without a text": "class X(Exception):\n    def __str__(self): raise self\nraise X",
    "an exception's half a character": "raise type('\\ud800', (BaseException,), {})('\\ud800\\n')",
    "no descriptors": "import os\nos.closerange(0, 64)",
    "no builtins": "import builtins\nfor name in list(vars(builtins)): delattr(builtins, name)",
    "no modules": "import sys\nfor module in list(sys.modules.values()): vars(module).clear()",
    "no exit": "import os\nos._exit = print",
    "half of a reply": EVERYWHERE.format(b'[true, "2'),
    "a deep reply": EVERYWHERE.format(b"[" * 50_000 + b"\n"),
    "a huge number": "print('1e' + '9' * 1_000)",
    "a signalling number": "print('sNaN')",
    "white space": "print('\\x1f' * 1_000_000)",
    "bytes": "import os\nos.write(1, b'\\xff\\0' * 500_000)",
    "no limits left": "import resource\nfor n in range(16):\n    try: resource.setrlimit(n, (0, 0))\n"
    "    except (OSError, ValueError): pass",
    "no limits left for others": "import resource\nfor p in range(1, 50):\n    for n in range(16):\n"
    "        try: resource.prlimit(p, n, (0, 0))\n        except (OSError, ValueError): pass\n1 / 0",
    "a name like a process's state": "import ctypes\nctypes.CDLL(None).prctl(15, b') Z \\xff (\\n)', 0, 0, 0)",
    "the first input is a folder": "import os\nos.mkdir('.input')",
    "stops its parent": "import os\nos.kill(os.getppid(), 19)",
    "ends its parent": "import os\nos.kill(os.getppid(), 15)\nwhile True: pass",
    "replaces itself": "import os\nos.execvp('sleep', ['sleep', '1000'])",
    "a tree of forks": "import os\nfor _ in range(5): os.fork()\nwhile True: pass",
    "orphans": "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
    "a thread ends it": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "idle parents": "import os\nfor p in range(1, 50):\n    try: os.sched_setscheduler(p, 5, os.sched_param(0))\n"
    "    except OSError: pass\nwhile True: pass",
    "an exit that sleeps": "import atexit, time\natexit.register(time.sleep, 99)",
    "another machine's calls": "import ctypes\nctypes.CDLL(None).syscall(0x40000027)",
    "a text that does not end": "class X(Exception):\n    def __str__(self):\n        while True: pass\nraise X",
    "much work in vain": "9**9**9",
    "much memory": "x = 'x' * (1 << 28)\nx += x",
    "half a character in the code": "x = '\ud800'",
    "nothing in the code": "x = 1\0",
    "deep code": "x = " + "-" * 100_000 + "1",
    "a folder in a folder": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
}
QUICK = {"a list too deep to read", "half a character", "a nameless signal", "a deep reply"}
QUICK |= {"an exception's half a character", "no exit", "half a character in the code", "no descriptors"}
ENDS_OTHERS = {"ends its parent", "stops its parent", "no limits left for others", "idle parents"}


def cases(kinds: dict[str, str], quick: bool) -> list[str]:
    return [name for name in kinds if (name in QUICK) is quick]


def check(sandbox: Sandbox, name: str) -> None:
    """Wrong as a program, as a function's result and where tests call it; and the next program is graded."""
    grade = code_grader(sandbox)
    answers = {
        "program": {"cases": [["1", "2"], ["1", "2"]]},
        "function": {"cases": [["1", "2"]], "function": "f"},
        "tests": {"before": "def f(x):\n    '''.'''\n", "after": "assert f(1) == 2", "function": "f"},
    }
    if name in RESULTS:
        code = f"{DEEP}\ndef f(x):\n    return {RESULTS[name]}"
        del answers["program"]
    else:
        code = f"{PROGRAMS[name]}\nprint(1)\ndef f(x): return 1"
    for way, answer in answers.items():
        value, status, reason = grade(f"```python\n{code}\n```\n", json.dumps(answer), {})
        assert (value, status) == (0.0, "ok"), way
        assert reason, way
        assert "Traceback" not in reason, way
    assert run(sandbox, "print(1)") == [(True, "1\n")]


@pytest.mark.parametrize("name", cases(RESULTS, quick=True) + cases(PROGRAMS, quick=True))
def test_what_a_response_does_is_its_own_failure(closed: Sandbox, name: str) -> None:
    check(closed, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RESULTS, *PROGRAMS])
def test_what_a_response_does_is_its_own_failure_in_every_sandbox(sandbox: Sandbox, name: str) -> None:
    if sandbox.kind != "limits" or name not in ENDS_OTHERS:
        check(sandbox, name)


def test_wanted_values_that_nobody_can_read_are_the_answers_fault(closed: Sandbox) -> None:
    for wanted in ("two", "[" * 100_000, "9" * 5_000):
        answer = json.dumps({"cases": [["1", wanted]], "function": "f"})
        assert code_grader(closed)("```\ndef f(x): return x\n```\n", answer, {})[:2] == (0.0, "bad_gold")
