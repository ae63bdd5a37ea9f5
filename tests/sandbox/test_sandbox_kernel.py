"""The parts of Linux that a sandbox uses: read-only mounts, a keyring of its own, system calls that are refused."""

import ctypes
import errno
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import processes
import pytest
from sandboxes import MEMORY, SECONDS, linux, run

import rlplus.sandbox
from rlplus.sandbox import Sandbox
from rlplus.sandbox.jail import syscalls
from rlplus.sandbox.jail.linux import MACHINES
from rlplus.sandbox.jail.namespaces import _make_read_only

pytestmark = linux

PACKAGE = Path(rlplus.sandbox.__file__).parent.parent


def test_the_machines_settings_cannot_be_written(sandbox: Sandbox) -> None:
    """As root outside, bubblewrap's user 65534 is that root: only a read-only /proc keeps it from them."""
    if sandbox.kind == "limits":
        return
    code = """
for name in ("kernel/hostname", "kernel/core_pattern", "vm/overcommit_memory", "../sysrq-trigger"):
    try:
        open(f"/proc/sys/{name}", "r+")
        print(name)
    except (PermissionError, FileNotFoundError, OSError) as error:
        assert error.errno in (1, 2, 13, 30), error
"""
    assert run(sandbox, code) == [(True, "")]
    code = "import os\nprint([o for m, o in (l.split()[4:6] for l in open('/proc/self/mountinfo')) if m == '/proc'])"
    ((ended_well, said),) = run(sandbox, code)
    assert not ended_well or said.startswith("['ro")  # without /proc there is nothing to read


@pytest.mark.parametrize(("user", "first"), [(0, "namespaces"), (1000, "bubblewrap")])
def test_for_root_our_own_namespaces_come_first(monkeypatch: pytest.MonkeyPatch, user: int, first: str) -> None:
    monkeypatch.setattr("rlplus.sandbox.sandbox.os.getuid", lambda: user)
    monkeypatch.setattr("rlplus.sandbox.sandbox.Sandbox._command", lambda self, folder: ["/missing"])
    with pytest.raises(OSError, match=rf"no sandbox for programs \({first}: .*; "):
        Sandbox("auto", MEMORY, SECONDS)


def child(code: str) -> str:
    """Standard output of a Python process with the C library and the sandbox; its exit status 9 skips the test."""
    start = f"import ctypes, os, sys\nsys.path.insert(0, {str(PACKAGE)!r})\n"
    start += "from sandbox import Sandbox\nfrom sandbox.jail import namespaces\n"
    start += "libc = ctypes.CDLL(None, use_errno=True)\n"
    done = processes.run([sys.executable, "-c", start + code])
    if done.returncode == 9:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TRAINERS_KEY = """
import platform
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
if libc.syscall(keyctl, 1, None) < 0:  # a session of its own for this test
    print("no keys here")
    os._exit(9)
serial = libc.syscall(add, b"user", b"trainer", b"secret", 6, -3)
"""


def test_the_trainers_keys_are_neither_read_nor_revoked() -> None:
    """The effect of the new session keyring alone, without the filter. 11: read, 3: revoke (linux/keyctl.h)."""
    code = """
if os.fork() == 0:
    namespaces.leave_keyring()
    buffer = ctypes.create_string_buffer(8)
    print(libc.syscall(keyctl, 11, serial, buffer, 8), libc.syscall(keyctl, 3, serial), buffer.raw[:6], flush=True)
    os._exit(0)
os.wait()
buffer = ctypes.create_string_buffer(8)
print(libc.syscall(keyctl, 11, serial, buffer, 8), buffer.raw[:6])
"""
    assert child(TRAINERS_KEY + code) == f"-1 -1 {bytes(6)!r}\n6 b'secret'\n"


def test_a_program_has_few_timers(sandbox: Sandbox) -> None:
    """They count against a limit of the user, who may be the trainer's."""
    code = "import ctypes\nlibc = ctypes.CDLL(None)\ntimer = ctypes.c_void_p()\n"
    code += "print(any(libc.timer_create(0, None, ctypes.byref(timer)) for _ in range(257)))"
    assert run(sandbox, code) == [(True, "True\n")]


def test_a_program_leaves_no_keys_and_finds_none(sandbox: Sandbox) -> None:
    code = f"""
program = f'''
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = [({{add}}, b"user", b"left", b"x", 1, place) for place in (-3, -4, -5)]
calls += [({{keyctl}}, 3, {{serial}}), ({{keyctl}}, 1, None), ({{add}} + 1, b"user", b"trainer", None, 0)]
for call in calls:
    assert libc.syscall(*call) == -1 and ctypes.get_errno() == 1, call
'''
print(list(Sandbox({sandbox.kind!r}, {MEMORY}, {SECONDS}).run(program, [""])))
"""
    assert child(TRAINERS_KEY + code) == "[(True, '')]\n"


def test_mounts_below_the_folders_are_read_only_too(sandbox: Sandbox) -> None:
    if sandbox.kind == "limits":
        return
    code = f"""
user, group = os.getuid(), os.getgid()
if libc.unshare(0x20000 if user == 0 else 0x10020000):
    print("no mounts here")
    os._exit(9)
if user:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {{user}} 1")
    open("/proc/self/gid_map", "w").write(f"0 {{group}} 1")
assert libc.mount(b"none", b"/", None, 1 << 18 | 16384, None) == 0
assert libc.mount(b"tmpfs", b"/usr/share", b"tmpfs", 0, b"mode=777") == 0
program = "open('/usr/share/new', 'w')"
print(list(Sandbox({sandbox.kind!r}, {MEMORY}, {SECONDS}).run(program, [""])))
"""
    assert "OSError: [Errno 30] Read-only file system" in child(code)


def test_linux_before_5_12_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing else that makes mounts below a folder read-only at once."""

    class Old:
        def syscall(self, number: int, *_: object) -> int:
            assert number == 442
            ctypes.set_errno(errno.ENOSYS)
            return -1

    monkeypatch.setattr("rlplus.sandbox.jail.namespaces.libc", Old())
    with pytest.raises(OSError, match=r"want Linux 5\.12 or later \(mount_setattr\); got "):
        _make_read_only("/usr")


# The filter, by an interpreter of its own: the other machine's, too

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """The verdict of linux/filter.h on this call: data are number, architecture, address, six arguments of 8 bytes."""
    words = {0: number, 4: AUDIT[machine] if audit is None else audit}
    words |= {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate(arguments)}
    program: Sequence[tuple[int, int, int, int]] = syscalls.filter_program(MACHINES.index(machine))
    place, loaded = 0, 0
    while True:
        code, true, false, value = program[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = words.get(value, 0)
        elif code == 0x54:
            loaded &= value
        else:
            tests = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}
            assert 0 <= true < 256 > false >= 0
            place += true if tests[code] else false


def test_every_listed_call_is_refused_and_the_usual_ones_are_not() -> None:
    usual = {"x86_64": [0, 1, 2, 3, 12, 39, 57, 58, 59, 202, 228, 231, 257, 293, 318, 334], "aarch64": [56, 57, 63, 64]}
    for index, machine in enumerate(MACHINES):
        refused = syscalls.REFUSED[index]
        assert {verdict(machine, number) for number in refused.values()} == {EPERM}
        assert len(set(refused.values())) == len(refused) > 60
        assert max(refused.values()) <= syscalls.NEWEST
        assert {verdict(machine, number) for number in range(syscalls.NEWEST + 1, 0x40000000, 999_983)} == {ENOSYS}
        assert verdict(machine, syscalls.NEWEST + 1) == verdict(machine, 0x3FFFFFFF) == ENOSYS
        others = set(range(syscalls.NEWEST + 1)) - set(refused.values())
        others -= {435, *((41, 53) if index == 0 else (198, 199))}
        assert {verdict(machine, number) for number in others} == {ALLOW}
        assert set(usual[machine]) <= others


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_about_these(machine: str) -> None:
    clone, mmap, socket, pair = {"x86_64": (56, 9, 41, 53), "aarch64": (220, 222, 198, 199)}[machine]
    threads = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000 | 0x100000 | 0x200000 | 0x1000000
    assert verdict(machine, clone, threads) == verdict(machine, clone, 17) == ALLOW  # a thread; fork, with SIGCHLD
    for new in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):  # CLONE_NEW*
        assert verdict(machine, clone, new | 17) == EPERM
    assert verdict(machine, 435, 0) == ENOSYS  # clone3
    assert verdict(machine, mmap, 0, 1, 3, 0x22) == verdict(machine, mmap, 0, 1, 3, 0x01) == ALLOW  # private; a file
    assert verdict(machine, mmap, 0, 1, 3, 0x21) == verdict(machine, mmap, 0, 1, 3, 0x23) == EPERM  # shared, validated
    for family in range(64):
        for call in (socket, pair):
            assert verdict(machine, call, family) == (ALLOW if family in (1, 2, 10, 16) else EPERM)
    assert verdict(machine, 0x40000000) == verdict(machine, 0x40000200) == KILL  # x32
    assert verdict(machine, 0, audit=0x40000003) == KILL  # i386


@pytest.mark.parametrize(
    ("index", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_the_kernels_headers(index: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header}")
    found = {name: int(n) for name, n in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())}
    newer = {"setxattrat", "removexattrat", "open_tree_attr"}
    refused = {name: number for name, number in syscalls.REFUSED[index].items() if name in found or name not in newer}
    assert refused == {name: found.get(name) for name in refused}


HELD = {  # calls that run into the filter in a real process; PermissionError is EPERM
    "a user namespace by clone": "assert libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0) == -1 == -ctypes.get_errno()",
    "clone3": "assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == 38",
    "io_uring": "assert libc.syscall(425, 1, bytes(120)) == -1 == -ctypes.get_errno()",
    "the machine's events": "assert libc.syscall(aio, 8, bytes(8)) == -1 == -ctypes.get_errno()",
    "a call of the future": "assert libc.syscall(600) == -1 and ctypes.get_errno() == 38",
    "userfaultfd": "assert libc.syscall(fault, 1) == -1 == -ctypes.get_errno()",
    "attributes": "expect(lambda: os.setxattr('.', 'user.x', bytes(1 << 15)))",
    "the virtual machine's host": "expect(lambda: socket.socket(40, 1))",
    "the kernel's ciphers": "expect(lambda: socket.socket(socket.AF_ALG, 5))",
}


def test_the_filter_holds_in_a_process_and_python_works(sandbox: Sandbox) -> None:
    code = """
import concurrent.futures, ctypes, os, platform, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
clone, fault, aio = {"x86_64": (56, 323, 206), "aarch64": (220, 282, 0)}[platform.machine()]
def expect(action):
    try:
        action()
    except PermissionError:
        return
    raise AssertionError
"""
    works = """
threads = [threading.Thread(target=print, args=("thread",)) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
assert subprocess.run([sys.executable, "-S", "-c", "print(6 * 7)"], capture_output=True).stdout == b"42\\n"
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
    socket.socket(family).close()
socket.socketpair()
"""
    assert run(sandbox, code + "\n".join(HELD.values()) + works) == [(True, "thread\nthread\n")]
