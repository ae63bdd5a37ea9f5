"""A program's verdict is not its own: it reaches neither the tests, nor the processes above it."""

import os
from pathlib import Path

import pytest
from sandboxes import MEMORY, SECONDS, linux, make, run

from rlplus.sandbox import Sandbox
from rlplus.sandbox.sandbox import _remove, _reply

pytestmark = linux

BEFORE = 'def double(x: int) -> int:\n    """Twice x."""\n'
# No program may learn the wanted value for an argument that it does not know.
TESTS = "def check(f):\n    assert f(481516) == 963032\n    assert f(2) != 5\ncheck(double)\n"
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

    def verdict(code: str) -> tuple[bool, str]:
        return closed.test(BEFORE + code, BEFORE, TESTS, "double")

    assert verdict("def double(x): return 2 * x") == (True, "")
    code = FORGERIES[way]
    for each in [code.format(value) for value in ("Yes(4)", "Any()", "[Any()]")] if "{}" in code else [code]:
        assert verdict(each)[0] is False


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


def test_a_late_supervisor_leaves_the_limit_of_cpu_time_to_the_kernel(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.sandbox.sandbox._LOOK_S", 600.0)
    assert run(sandbox, "while True: pass") == [(False, "ended by SIGXCPU")]


FORKS = """
import os, time
started = 0
try:
    while started < 300:
        if os.fork() == 0:
            time.sleep(600)
        started += 1
except OSError:
    pass
print(started)
"""


def test_a_late_supervisor_leaves_the_limit_of_processes_to_the_kernel(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user of bubblewrap's programs was root once, whom no such limit binds: a fork bomb filled the machine's table
    of processes between two looks."""
    if sandbox.kind == "limits":
        return
    monkeypatch.setattr("rlplus.sandbox.sandbox._LOOK_S", 600.0)
    ((ended_well, said),) = run(sandbox, FORKS)
    assert ended_well
    assert 50 < int(said) < 64


def test_a_sandbox_that_cannot_be_made_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known of the code: the grader fails, and tries again."""
    sandbox = make("limits")
    monkeypatch.setattr("rlplus.sandbox.sandbox._JAIL", tmp_path / "missing.py")
    for attempt in (lambda: run(sandbox, "print(1)"), lambda: sandbox.test("x = 1", "", "x")):
        with pytest.raises(OSError, match=r"can't open file '.*missing\.py'"):
            attempt()


def test_an_unknown_kind_is_refused() -> None:
    """Otherwise it would be `limits`, which was not asked for."""
    with pytest.raises(ValueError, match="want a sandbox of kind auto, bubblewrap, namespaces, limits; got 'bwrap'"):
        Sandbox("bwrap", MEMORY, SECONDS)


def test_the_signal_is_named_or_numbered(closed: Sandbox) -> None:
    code = "import os\nos.kill(os.getpid(), int(input()))"
    assert run(closed, code, "40", "15") == [(False, "ended by signal 40"), (False, "ended by SIGTERM")]


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    """Deeper than a recursion, with a path longer than Linux takes, without rights, and with links out of it."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for place in (folder, outside):
        place.mkdir()
    (outside / "kept").touch()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(1_200):
        os.mkdir("dddd", dir_fd=descriptor)
        os.symlink(outside, "link", dir_fd=descriptor)
        inner = os.open("dddd", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    (folder / "dddd").chmod(0)
    folder.chmod(0o500)
    _remove(str(folder))
    _remove(str(folder))
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]
