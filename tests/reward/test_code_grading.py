"""Programs in a model's responses: those that pass their tests, those that do not, and what is no test."""

import json
import re
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import sandboxes
from reward_graders import linux, reward_config
from sandboxes import Sandbox

from rlplus.train.reward import Scorer
from rlplus.train.reward.graders.code import code_grader
from rlplus.train.reward.worker_handle import Worker

pytestmark = linux
sandbox, closed = sandboxes.sandbox, sandboxes.closed

REWARD = Path(__file__).parents[2] / "rlplus" / "train" / "reward"
DOUBLE = "for line in open(0):\n    print(2 * int(line))"


def block(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


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
    with Scorer(reward_config(kind="code", sandbox="namespaces", workers=1, memory_mb=1024, timeout_s=4.0)) as scorer:
        answer = json.dumps({"cases": [["1", "2"]]})
        scores = scorer([block(DOUBLE), block("while True: pass"), "none"], [answer] * 3)
        assert scorer.note == "namespaces"
    assert [(score.value, score.status) for score in scores] == [(1.0, "ok"), (0.0, "ok"), (0.0, "unparsed")]
    assert "over the limit of CPU time" in scores[1].detail or "SIGXCPU" in scores[1].detail


def test_no_sandbox_is_one_whole_line_on_why() -> None:
    """As a worker says it where Linux refuses every namespace: neither tracebacks, nor cut off."""
    code = f"""
import ctypes, json, os, sys
sys.path.insert(0, {str(REWARD)!r})
import grading_worker as worker
worker._without_rlplus("train.reward.graders")
from _rlplus.sandbox.jail import syscalls
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
syscalls.install_filter()
settings = dict(kind="code", function=None, sandbox="auto", memory_mb=512, timeout_s=10, token="",
                cut_off="auto", box="auto", require_think=False)
reading, writing = os.pipe()
os.write(writing, json.dumps(settings).encode() + b"\\n")
os.dup2(reading, 0)
worker.main()
"""
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stdout + done.stderr
    kind, said = json.loads(done.stdout)
    assert kind == "error"
    assert said.isprintable()
    why = r"\((namespaces|bubblewrap): (?!.*Traceback)[^;]+; (namespaces|bubblewrap): [^;]+\)"
    assert re.fullmatch(
        rf"OSError: reward.sandbox: no sandbox for programs {why}: want bubblewrap, .* neither files nor network", said
    )


def test_a_grader_may_still_say_that_a_program_was_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 processes burn seconds of CPU time between two looks: the program is wrong, and the grader has not failed."""
    now, cpu = 0.0, 0.0
    monkeypatch.setattr("rlplus.train.reward.worker_handle.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("rlplus.train.reward.worker_handle.cpu_seconds", lambda process: cpu)
    worker = Worker.__new__(Worker)
    monkeypatch.setattr(worker, "_ended", lambda: False)
    worker.ready, worker.pending, worker._broken, worker.process = True, deque([0]), "", SimpleNamespace(pid=1)
    worker._restart_clocks()
    for now, cpu in ((1.0, 0.0), (11.0, 9.0), (12.0, 12.0), (12.9, 90.0)):
        assert worker.fault(10.0) is None, (now, cpu)
    now = 13.1
    assert worker.fault(10.0) == ("timeout", "used 10 s of CPU time")
