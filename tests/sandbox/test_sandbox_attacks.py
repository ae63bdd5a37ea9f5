"""Attacks of programs on the machine that grades them."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import has_name, wait_until
from sandboxes import KINDS, MEMORY, SECONDS, linux, make, run

from rlplus.sandbox import Sandbox
from rlplus.sandbox.jail.namespaces import free_user
from rlplus.sandbox.process_table import processes, tree

pytestmark = linux

# Each ends with its program counted as wrong, nothing left behind, and the next program graded


def left_behind() -> list[int]:
    """Processes below this one."""
    own = os.getpid()
    return [pid for pid, entry in processes().items() if entry.parent == own and entry.state != "Z"]


ATTACKS = {
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory": "x = []\nwhile True:\n    x.append(bytearray(1 << 22))",
    "one block": "x = bytearray(1 << 40)",
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "signal handlers": "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError):\n        pass\nwhile True: pass",
    "endless output": "while True: print('x' * 10000)",
    "endless descriptor": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "kill everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGKILL)",
    "deep recursion": "def f(n): return f(n + 1)\nf(0)",
    "segfault": "import ctypes\nctypes.string_at(0)",
}
ONLY_CLOSED = {"kill everything", "fork bomb"}  # without namespaces they would hit what else the user runs


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_only_its_program(sandbox: Sandbox, attack: str) -> None:
    if sandbox.kind == "limits" and attack in ONLY_CLOSED:
        return
    before = set(left_behind())
    results = run(sandbox, ATTACKS[attack])
    assert [ended_well for ended_well, _ in results] == [False]
    assert len(results[0][1]) <= 1000
    assert set(left_behind()) <= before
    assert run(sandbox, "print(1)") == [(True, "1\n")]


def test_processes_that_leave_are_ended(sandbox: Sandbox, tmp_path: Path) -> None:
    """In their own session, orphaned, and holding the program's output."""
    mark = f"600.{os.getpid()}{time.monotonic_ns()}"
    code = f"""
import os, subprocess
subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
for _ in range(6):  # some still fork when the first are killed
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "{mark}"])
        os._exit(0)
print("done", flush=True)
"""

    def asleep() -> list[int]:
        found = []
        for pid in processes():
            try:
                if mark in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
            except OSError:
                continue
        return found

    assert run(sandbox, code) == [(True, "done\n")]
    assert asleep() == []


def test_the_process_that_is_killed_last_adopts_what_the_others_leave() -> None:
    """Those below it are killed one after the other, and may fork meanwhile."""

    def only_child(parent: int) -> int:
        while not (found := [pid for pid, entry in processes().items() if entry.parent == parent]):
            time.sleep(0.01)
        return found[0]

    sandbox = make("limits")
    with contextlib.ExitStack() as stack:
        last = sandbox._start(stack, {"code": "import time\ntime.sleep(600)", "inputs": [""], "function": None})
        first = only_child(last.pid)
        driver = only_child(first)
        os.kill(first, signal.SIGKILL)
        while first in processes():
            time.sleep(0.01)
        assert processes()[driver].parent == last.pid
    assert driver not in processes()


@pytest.mark.parametrize("more", ["pass", "os.setsid()"], ids=["one group", "groups of their own"])
def test_a_program_that_is_never_the_same_process_is_ended(sandbox: Sandbox, more: str) -> None:
    """Each process starts the next one and ends; none lives for as long as a look at all processes takes."""
    name = f"hop{time.monotonic_ns() % 10**10}"
    code = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, b"{name}")  # the name of those that follow, too
while True:
    if os.fork():
        os._exit(0)
    {more}
"""
    run(sandbox, code)
    assert not any(has_name(name) for _ in range(20))


def test_a_stopped_sandbox_is_ended() -> None:
    with contextlib.ExitStack() as stack:
        job = {"code": "import time\ntime.sleep(600)", "inputs": [""], "function": None}
        process = make("limits")._start(stack, job)
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        below = set(tree(process.pid, processes()))
    assert len(below) > 2
    assert not below & set(processes())


@pytest.mark.skipif("bubblewrap" not in KINDS, reason="bubblewrap is not installed")
def test_hidden_processes_are_ended_with_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain user's, where /proc hides what is not the caller's to look into."""
    sandbox = make("bubblewrap")
    monkeypatch.setattr("rlplus.sandbox.sandbox.free_user", lambda: None)
    with contextlib.ExitStack() as stack:
        process = sandbox._start(stack, {"code": "import time\ntime.sleep(600)", "inputs": [""], "function": None})
        assert process.stdout is not None
        process.stdout.readline()
        below = set(tree(process.pid, processes()))
        monkeypatch.setattr("rlplus.sandbox.sandbox.processes", dict)
    assert len(below) > 2
    wait_until(lambda: not any(entry.state != "Z" for pid, entry in processes().items() if pid in below))


def test_a_program_sees_no_network(closed: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached: list[Any] = []

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                reached.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        port = server.getsockname()[1]
        ((ended_well, said),) = run(closed, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
        assert not ended_well
        assert "Error" in said
        assert not reached
    (name,) = run(closed, "import socket\nprint([i[1] for i in socket.if_nameindex()])")
    assert name in [(True, "[]\n"), (True, "['lo']\n")]


def test_a_program_writes_nothing_outside_its_folder(closed: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("secret")
    places = [str(tmp_path / "new"), str(tmp_path / "mine"), "/usr/x", "/x", "/tmp/rlplus-x", os.path.expanduser("~/x")]
    code = f"""
import os, pathlib
def attempt(action):
    try:
        action()
        return "done"
    except OSError:
        return "refused"
print([attempt(lambda: open(place, "w").write("x")) for place in {places!r}])
print([attempt(lambda: os.chmod(place, 0o777)) for place in {places!r}], attempt(lambda: os.remove(os.__file__)))
print(attempt(lambda: pathlib.Path({str(tmp_path / "mine")!r}).read_text()))
print(attempt(lambda: open("here", "w").write("x")), os.getcwd(), os.listdir("."))
"""
    ((ended_well, said),) = run(closed, code)
    assert ended_well
    assert said.count("done") == 1
    assert said.endswith("done /program ['here']\n")
    assert (tmp_path / "mine").read_text() == "secret"
    assert not any(Path(place).exists() for place in places if not place.endswith("mine"))
    assert run(closed, "import os\nprint(os.listdir('.'))") == [(True, "[]\n")]


def test_a_folder_in_memory_has_a_limit(sandbox: Sandbox) -> None:
    """The others are read-only, /dev/shm too."""
    if sandbox.kind == "limits":
        return
    code = "for i in range(1000):\n    with open(str(i), 'wb') as f:\n        f.write(b'x' * (1 << 20))"
    ((ended_well, said),) = run(sandbox, code)
    assert not ended_well
    assert "No space left" in said
    for folder in ("/", "/dev", "/dev/shm", "/proc"):
        ((ended_well, said),) = run(sandbox, f"open('{folder}/new', 'w')")
        assert not ended_well
        assert said.startswith(("OSError: [Errno 30] Read-only", "PermissionError", "FileNotFoundError")), folder


def test_empty_files_have_a_limit_too() -> None:
    """Each costs the kernel a kilobyte, which is in no process. bubblewrap has no option for it."""
    code = "import os\nopen('x', 'w')\nfor i in range(20_000): os.link('x', str(i)) if i % 2 else os.mkdir(str(i))"
    ((ended_well, said),) = run(make("namespaces"), code)
    assert not ended_well
    assert said.startswith("OSError: [Errno 28] No space left")


def test_bubblewrap_limits_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without running it: --size is of the mount that follows; what is remounted comes before."""
    commands: list[list[str]] = []

    def record(command: list[str], **options: object) -> None:
        commands.append(command)
        raise OSError("recorded")

    monkeypatch.setattr("rlplus.sandbox.sandbox.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("rlplus.sandbox.sandbox.subprocess.Popen", record)
    with pytest.raises(OSError, match="no sandbox"):
        Sandbox("bubblewrap", MEMORY, SECONDS)
    (command,) = commands
    text = " ".join(command)
    assert ("--unshare-all" in command) == (free_user() is None)
    assert command.count("--tmpfs") == 1
    assert f"--size {1 << 26} --tmpfs /program " in text
    parts = ("--tmpfs", "--dev-bind /dev/null", "--proc /proc", "--remount-ro /proc", "--remount-ro / ", " -I -S ")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


UNCOUNTED = {
    "memfd": "import os\nf = os.memfd_create('a')\nwhile True: os.write(f, bytes(1 << 20))",
    "segments": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.shmget(0, 1 << 20, 0o1600) >= 0, ctypes.get_errno()
""",
    "a namespace": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10020000) == 0 and libc.mount(b"none", b"/program", b"tmpfs", 0, None) == 0
""",
    "queues": "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
    "shared mapping": "import mmap\nx = mmap.mmap(-1, 1 << 20)",
    "zero": "import mmap\nwith open('/dev/zero', 'r+b') as f: x = mmap.mmap(f.fileno(), 1 << 20)",
}


@pytest.mark.parametrize("way", UNCOUNTED)
def test_memory_of_no_process_is_refused(sandbox: Sandbox, way: str) -> None:
    """Memory that belongs to no process is in no sum over processes, and outlives each of them."""
    if way == "zero" and sandbox.kind == "limits":
        return
    ((ended_well, said),) = run(sandbox, UNCOUNTED[way])
    assert not ended_well
    assert said.startswith(("PermissionError", "AssertionError", "FileNotFoundError"))
    private = "import mmap\nx = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE)\nprint(input(), len(x))"
    assert run(sandbox, private, "a", "b") == [(True, "a 1048576\n"), (True, "b 1048576\n")]


def test_a_program_cannot_read_what_its_parents_have(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_SECRET", "hunter2")
    code = """
import os, glob
found = dict(os.environ).get("RLPLUS_SECRET", "")
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        found += open(path).read()
    except OSError:
        pass
print("hunter2" in found)
"""
    if sandbox.kind == "limits":  # it can, in /proc; its own environment has nothing
        code = "import os\nprint('RLPLUS_SECRET' in os.environ)"
    assert run(sandbox, code) == [(True, "False\n")]


def test_a_program_cannot_gain_rights(sandbox: Sandbox) -> None:
    if sandbox.kind == "limits":
        return
    code = """
import os, ctypes
libc = ctypes.CDLL(None)
status = open("/proc/self/status").read().splitlines()
print(os.getuid() != 0, [line.split()[1] for line in status if line.startswith(("CapEff", "NoNewP"))])
print(libc.mount(b"none", b"/usr", None, 4096 | 32, None), libc.mount(b"none", b"/program", b"tmpfs", 0, None))
try:
    os.setuid(0)
    print("root")
except OSError:
    print("refused")
"""
    ((ended_well, said),) = run(sandbox, code)
    assert ended_well
    assert said == "True ['0000000000000000', '1']\n-1 -1\nrefused\n"
