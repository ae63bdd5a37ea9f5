"""A model's programs in the sandbox: those that pass their tests, and attacks on the machine that grades them."""

import json
from pathlib import Path

import pytest
from reward_graders import linux, reward_config
from sandboxes import make, run

from rlplus.reward import Scorer
from rlplus.reward.graders.code import code_grader
from rlplus.reward.graders.sandbox import Sandbox, _reply

pytestmark = linux


def block(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


# Programs and their tests

DOUBLE = "for line in open(0):\n    print(2 * int(line))"


def test_a_program_reads_and_writes(sandbox: Sandbox) -> None:
    answer = json.dumps({"cases": [["1\n2\n", "2\n4\n"], ["5", "10"]]})
    grade = code_grader(sandbox)
    whole = "import sys\nfor n in sys.stdin.read().split():\n    print(2 * int(n))"
    main = "if __name__ == '__main__':\n    try:\n        while True:\n            print(2 * int(input()))\n"
    for code in (DOUBLE, whole, f"{main}    except EOFError:\n        pass"):
        assert grade(block(code), answer, {}) == (1.0, "ok", "")
    assert grade(block("print(2)\nprint(4)"), answer, {}) == (0.0, "ok", "test 2 of 2: another result")
    assert grade(block("1 / 0"), answer, {}) == (0.0, "ok", "test 1 of 2: ZeroDivisionError: division by zero")
    assert grade(block("print(2"), answer, {})[2].startswith("test 1 of 2: SyntaxError")
    assert grade(block(DOUBLE + "\nexit(3)"), answer, {})[0] == 0
    assert grade(block(DOUBLE + "\nexit()"), answer, {})[0] == 1


def test_a_function_gets_the_lines(sandbox: Sandbox) -> None:
    answer = json.dumps({"cases": [["[1, 2]\n3", "[4, 5]"], ['["a"]\n"b"', '["ab"]']], "function": "add"})
    grade = code_grader(sandbox)
    body = "    def add(self, xs: List[int], y: int):\n        print('noise')\n        return [x + y for x in xs]"
    assert grade(block(f"class Solution:\n{body}"), answer, {}) == (1.0, "ok", "")
    assert grade(block("def add(xs, y):\n    return tuple(x + y for x in xs)"), answer, {}) == (1.0, "ok", "")
    assert grade(block("def add(xs, y):\n    return xs"), answer, {})[0] == 0
    assert grade(block("def sub(xs, y):\n    return xs"), answer, {})[2] == "test 1 of 2: KeyError: 'add'"


def test_tests_behind_the_code_must_be_reached(sandbox: Sandbox) -> None:
    """Code that exits before them does not pass."""
    before = 'from typing import List\n\ndef add(xs: List[int], y: int) -> List[int]:\n    """Add y."""\n'
    tests = {"before": before, "after": "def check(f):\n    assert f([1], 2) == [3]\ncheck(add)\n", "function": "add"}
    answer = json.dumps(tests)
    grade = code_grader(sandbox)
    right = "def add(xs: List[int], y: int) -> List[int]:\n    return [x + y for x in xs]"
    assert grade(block(right), answer, {}) == (1.0, "ok", "")
    assert grade(block("    return [x + y for x in xs]"), answer, {}) == (1.0, "ok", "")
    assert grade(block(right.replace("+", "-")), answer, {})[:2] == (0.0, "ok")
    for end in ("exit(0)", "import os; os._exit(0)", "raise SystemExit", "print('passed'); import sys; sys.exit(0)"):
        assert grade(block(f"{right}\n{end}"), answer, {})[0] == 0
    answer = json.dumps({"after": "my_solution = Solution()\nassert my_solution.f(1) == 2"})
    assert grade(block("class Solution:\n    def f(self, x: Optional[int]):\n        return x + 1"), answer, {})[0] == 1


DOUBLE_TESTS = {  # what no program may learn: the wanted value, of an argument that it does not know
    "before": 'def double(x: int) -> int:\n    """Twice x."""\n',
    "after": "def check(f):\n    assert f(481516) == 963032\n    assert f(2) != 5\ncheck(double)\n",
    "function": "double",
}
ANY_FD = "for fd in range(64):\n    try:\n        os.write(fd, ({}).encode())\n    except OSError:\n        pass\n"
FORGERIES = {
    "equal to everything": "class Yes(int):\n    __eq__ = __ne__ = lambda self, other: True\n    __hash__ = None\n"
    "class Any:\n    __eq__ = __ne__ = __bool__ = lambda *_: True\ndef double(x):\n    return {}",
    "no assertion": "import builtins\nbuiltins.AssertionError = print\ncheck = lambda f: True",
    "a debugger": "import sys\ndef skip(frame, event, argument):\n    frame.f_trace_lines = False\n    return skip\n"
    "sys.settrace(skip)",
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef double(x):\n    os._exit(0)",
    "exit by exception": "raise SystemExit(0)",
    "no output": "import sys\nsys.stdout = sys.stderr = None",
    "a reply": "import os\n" + ANY_FD.format("'[true, \"\"]\\n'") + "os._exit(0)",
    "replies on the link": "import os\ndef double(x):\n    "
    + ANY_FD.format("'[true, true]\\n' * 9").replace("\n", "\n    ")
    + "os._exit(0)",
    "search": """
import gc, os, re, sys
def double(x):
    frame, seen = sys._getframe(), []
    while frame is not None:
        seen += map(repr, (frame.f_locals, frame.f_globals, frame.f_code.co_consts, gc.get_referents(frame)))
        frame = frame.f_back
    seen += [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        for path in [f"/proc/{pid}/cmdline", f"/proc/{pid}/environ", *(f"/proc/{pid}/fd/{n}" for n in range(64))]:
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                    seen.append(repr(file.read()))
            except (OSError, TypeError):
                pass
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
                for start, end in re.findall("(?m)^([0-9a-f]+)-([0-9a-f]+) rw", maps.read()):
                    memory.seek(int(start, 16))
                    seen.append(memory.read(int(end, 16) - int(start, 16)).decode("latin-1"))
        except (OSError, OverflowError):
            pass
    for found in re.findall(rf"{x}[^0-9]{{1,6}}([0-9]{{6}})", " ".join(seen)):
        return int(found)
""",
}


@pytest.mark.parametrize("way", FORGERIES)
def test_code_does_not_decide_its_verdict(closed: Sandbox, way: str) -> None:
    """It neither finds the tests nor ends or answers in their place; what it returns is compared by value."""
    code = FORGERIES[way]
    answer = json.dumps(DOUBLE_TESTS)
    for each in [code.format(value) for value in ("Yes(4)", "Any()", "[Any()]")] if "{}" in code else [code]:
        value, status, detail = code_grader(closed)(block(each), answer, {})
        assert (value, status) == (0, "ok"), detail


def test_values_and_objects_cross_the_link(sandbox: Sandbox) -> None:
    """Collections with their types; other objects stay where they are, and can be asked and handed back."""
    code = """
from collections import Counter, namedtuple
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
def back(x): return x
def many(): return [1, (2.5, None), {"a": {3, frozenset()}, (1, True): b"x"}, -(10**5000)]
def counted(word): return Counter(word)
def pair(): return namedtuple("Pair", "a b")(1, b=2)
def refused(): raise ValueError("no")
def odd(): raise Node
def last(node): return last(node.next) if node.next else node
limit = 7
"""
    tests = """
assert many() == [1, (2.5, None), {"a": {3, frozenset()}, (1, True): b"x"}, -(10**5000)]
assert [type(x) for x in many()] == [int, tuple, dict, int] and back((1, [2])) == (1, [2]) != [1, [2]]
assert str(back(float("nan"))) == "nan" and back("\\ud800é") == "\\ud800é" and back(True) is True and limit == 7
assert counted("aab") == {"a": 2, "b": 1} and pair() == (1, 2)
node = Node(1, next=Node(2))
assert node.next.value == 2 and last(node).value == 2 and node.next.next is None and node != node.next
assert not hasattr(node, "missing")
for wrong, kind in ((refused, ValueError), (odd, TypeError), (lambda: back(len), TypeError), (limit, TypeError)):
    try:
        wrong()
    except kind:
        pass
    else:
        raise AssertionError(kind)
"""
    assert sandbox.test(code, "", tests) == (True, "")
    assert sandbox.test(code, "", "back(")[1].startswith("SyntaxError")
    assert sandbox.test("back = 1 /", "", "back(1)") == (False, "EOFError: the code ended before its tests")
    assert sandbox.test("while True: pass", "", "pass")[0] is False
    assert sandbox.test("def f(): pass", "", "f(); missing()") == (False, "NameError: name 'missing' is not defined")


def test_a_program_reaches_no_process_above_it(closed: Sandbox) -> None:
    """Not their memory, their descriptors, or where they write replies."""
    code = """
import os
def opens(path, flags):
    try:
        os.close(os.open(path, flags))
        return True
    except OSError:
        return False
above = [pid for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) != os.getpid()]
paths = [f"/proc/{pid}/{name}" for pid in above for name in ("mem", "environ", "maps", "fd/0", "fd/1", "fd/2")]
print(len(above) > 1, [path for path in paths if opens(path, os.O_RDONLY) or opens(path, os.O_WRONLY)])
"""
    assert run(closed, code) == [(True, "True []\n")]
    forge = "import os\n" + ANY_FD.format("'[true, \"forged\"]\\n'") + "print('own')"
    ((ended_well, said),) = run(closed, forge)
    assert ended_well
    assert said.endswith("own\n")
    for line in (b"no JSON", b"[" * 100_000, b"[true]", b"7"):
        assert _reply(line) == (False, "wrote where it should not")


def test_the_kernel_guards_the_processes_above_a_program(sandbox: Sandbox) -> None:
    """Where they have the program's user, as without root, only what a fork inherits tells: PR_GET_DUMPABLE."""
    assert run(sandbox, "import ctypes\nprint(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))") == [(True, "0\n")]


def test_what_is_no_program_and_what_is_no_test(closed: Sandbox) -> None:
    grade = code_grader(closed)
    assert grade("no code", json.dumps({"after": ""}), {})[1] == "unparsed"
    broken = ['{"after": "1 +"}', '{"before": "def f(x):", "after": "f(1)"}', '{"after": 1}']
    for answer in ("", "7", "{}", '{"cases": 3}', '{"cases": [["a"]]}', '{"cases": []}', *broken):
        assert grade(block("pass"), answer, {})[1] == "bad_gold"


def test_the_tests_say_which_block_counts(closed: Sandbox) -> None:
    """A script behind a draft for a program that reads and writes; a function's definition before its example."""
    grade = code_grader(closed)
    draft, example = block("def add(x):\n    return x + 2"), block("print(add(1))")
    helper = block("def show(x):\n    print(x)\n\ndef check(f):\n    pass")
    script = block("print(int(input()) + 2)")
    assert grade(draft + script, json.dumps({"cases": [["1", "3"]]}), {})[0] == 1
    for answer in (
        {"cases": [["1", "3"]], "function": "add"},
        {"after": "def check(f):\n    assert f(1) == 3\ncheck(add)\n"},
    ):
        assert grade(draft + example + helper, json.dumps(answer), {})[0] == 1


def test_the_scorer_says_which_sandbox_it_has() -> None:
    with Scorer(reward_config(kind="code", sandbox="namespaces", workers=1, memory_mb=1024)) as scorer:
        answer = json.dumps({"cases": [["1", "2"]]})
        scores = scorer([block(DOUBLE), block("while True: pass"), "none"], [answer] * 3)
        assert scorer.note == "namespaces"
    assert [(score.value, score.status) for score in scores] == [(1.0, "ok"), (0.0, "ok"), (0.0, "unparsed")]
    assert "over the limit of CPU time" in scores[1].detail or "SIGXCPU" in scores[1].detail


def test_a_late_supervisor_leaves_the_limit_of_cpu_time_to_the_kernel(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.reward.graders.sandbox._LOOK_S", 600.0)
    assert run(sandbox, "while True: pass") == [(False, "ended by SIGXCPU")]


def test_a_sandbox_that_cannot_be_made_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known of the code: the grader fails, and tries again."""
    sandbox = make("limits")
    monkeypatch.setattr("rlplus.reward.graders.sandbox._JAIL", tmp_path / "missing.py")
    for attempt in (lambda: run(sandbox, "print(1)"), lambda: sandbox.test("x = 1", "", "x")):
        with pytest.raises(OSError, match=r"can't open file '.*missing\.py'"):
            attempt()
