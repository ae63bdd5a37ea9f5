"""The system calls by which a process changes files, seen and answered one by one before they happen.

A filter (seccomp) in the child stops it at each such call, of any of its threads and processes, until this process has
answered: go on, or fail with an errno. Nothing escapes it: torch, safetensors and tensorboard write from C++ and Rust.
"""

import ctypes
import errno
import itertools
import os
import platform
import posix
import select
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import processes
import pytest

# Numbers of x86-64. Of mmap only shared mappings of a file stop the child.
_NUMBERS = {
    1: "write", 2: "open", 9: "mmap", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync", 75: "fdatasync",
    76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink",
    88: "symlink", 162: "sync", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
    266: "symlinkat", 285: "fallocate", 296: "pwritev", 306: "syncfs", 316: "renameat2", 326: "copy_file_range",
    328: "pwritev2", 437: "openat2",
}  # fmt: skip
_MMAP, _SECCOMP, _NO_NEW_PRIVS, _CWD = 9, 317, 38, -100
_ALLOW, _NOTIFY, _SET_FILTER, _LISTENER = 0x7FFF0000, 0x7FC00000, 1, 8
_RECEIVE, _ANSWER, _CONTINUE = 0xC0502100, 0xC0182101, 1
_LOAD, _EQUAL, _SOME, _RETURN = 0x20, 0x15, 0x45, 0x06
_PAGE = 1 << 12
_count = itertools.count()
PRELOADED = [
    "rlplus.train.trainer",
    "rlplus.train.evaluation.sample",
    "rlplus.tools.compare.comparing",
    "rlplus.tools.cli.train",
    "deepspeed",
]


@dataclass(frozen=True)
class Call:
    """A call that changes or flushes something in the folder, or a mark.

    kind: open, write, truncate, mkdir, rename, unlink, rmdir, fsync or mark. path, to: relative to the folder; the text
    of a mark. offset: None at the end of the file. create, empty: of an open.
    """

    kind: str
    path: str
    to: str = ""
    data: bytes = b""
    offset: int | None = 0
    create: bool = False
    empty: bool = False


def mark(text: str) -> None:
    """Put a mark between the calls of a watched process."""
    with suppress(OSError):
        os.rmdir(f"/dev/null/{text}")


@dataclass
class Watched:
    """The end of a process: its status, negative for a signal, what it said, and what it did."""

    status: int
    said: str
    calls: list[Call] = field(default_factory=list)


def need_notifications() -> None:
    """Skip the test where the kernel does not let one process answer another's calls."""
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if platform.machine() != "x86_64" or not actions.is_file() or "user_notif" not in actions.read_text():
        pytest.skip("wants Linux on x86-64 with seccomp's user notifications, to see every call that changes a file")


def watch(
    folder: Path,
    action: Callable[..., Any],
    arguments: Sequence[Any] = (),
    decide: Callable[[Call], int] = lambda call: 0,
    *,
    method: str = "forkserver",
) -> Watched:
    """Call a function, importable by its name, in a new process. decide: the errno with which a call fails, or 0.

    method: "forkserver" for runs, which need a process without threads that has imported all; "fork" for what needs
    none of that, at once.
    """
    context: Any = get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe()
    said = folder.parent / f"{folder.name}-{next(_count)}.said"
    child = context.Process(target=_begin, args=(there, str(said), action, tuple(arguments)))
    child.start()
    there.close()
    try:
        listener = reduction.recv_handle(here)
        calls = _Supervisor(folder.resolve(), listener, decide).follow(child.sentinel)
        child.join(processes.PATIENCE_S)
    finally:
        child.kill()
        child.join()
    assert child.exitcode is not None
    return Watched(child.exitcode, said.read_text(errors="replace"), calls)


def _begin(there: Connection, said: str, action: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """In the child: let the parent see its calls, then act; the exit status is what the action returns."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.fsync = posix.fsync  # conftest.py replaces it
    listener = _install()
    reduction.send_handle(there, listener, os.getppid())  # sendmsg does not stop
    os.close(listener)
    os._exit(int(action(*arguments) or 0))


def _install() -> int:
    """The filter, for this process and all that it starts; the descriptor on which their calls arrive."""
    shared = [(_LOAD, 0, 0, 16 + 3 * 8), (_SOME, 0, 1, 1), (_RETURN, 0, 0, _NOTIFY), (_RETURN, 0, 0, _ALLOW)]
    others = [line for nr in _NUMBERS if nr != _MMAP for line in ((_EQUAL, 0, 1, nr), (_RETURN, 0, 0, _NOTIFY))]
    lines = [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(shared), _MMAP), *shared, *others, (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or (fd := libc.syscall(_SECCOMP, _SET_FILTER, _LISTENER, header)) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(fd)


class _Supervisor:
    """Answers the calls of a process and of all that it starts."""

    def __init__(self, folder: Path, listener: int, decide: Callable[[Call], int]) -> None:
        self.folder, self.listener, self.decide = str(folder), listener, decide
        self.calls: list[Call] = []

    def follow(self, sentinel: int) -> list[Call]:
        """The calls in the folder until the process ends."""
        end = time.monotonic() + processes.PATIENCE_S
        waiting = select.poll()
        waiting.register(self.listener, select.POLLIN)
        waiting.register(sentinel, select.POLLIN)
        try:
            while (ready := dict(waiting.poll(1000))) or time.monotonic() < end:
                if ready.get(self.listener, 0) & select.POLLIN:
                    self._answer()
                elif ready:  # the process has ended
                    return self.calls
            raise AssertionError("the process hangs")
        finally:
            os.close(self.listener)

    def _answer(self) -> None:
        notice = bytearray(80)
        try:
            ioctl(self.listener, _RECEIVE, notice)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):  # the caller was killed
                return
            raise
        number, pid, _, nr, _, _, *arguments = struct.unpack("=QIIiIQ6Q", notice)
        failure = 0
        if (call := self._call(_NUMBERS[nr], pid, arguments)) is not None:
            if call.kind != "mark":
                failure = self.decide(call)
            if not failure:
                self.calls.append(call)
        with suppress(FileNotFoundError):
            ioctl(self.listener, _ANSWER, struct.pack("=Qqi", number, 0, -failure) + struct.pack("=I", not failure))

    def _call(self, name: str, pid: int, args: Sequence[int]) -> Call | None:
        """The call's effect in the folder; None for nothing."""
        if name in ("write", "pwrite64", "writev", "sendfile", "fsync", "fdatasync", "ftruncate", "mmap"):
            return self._of_descriptor(name, pid, args)
        if name in ("unlink", "rmdir", "mkdir", "open", "creat"):
            args, name = [_CWD, *args], {"open": "openat", "mkdir": "mkdirat"}.get(name, name)
        if name == "rename":
            args, name = [_CWD, args[0], _CWD, args[1]], "renameat"
        if name in ("rmdir", "unlink", "unlinkat"):
            kind = "rmdir" if name == "rmdir" or (name == "unlinkat" and args[2] & 0x200) else "unlink"
            path = self._path(pid, args[0], args[1])
            return self._here(kind, path) if not path.startswith("/dev/null/") else Call("mark", path[10:])
        path = "" if name in ("sync", "syncfs", "copy_file_range") else self._path(pid, *args[:2])
        if name == "openat":
            writes = args[2] & os.O_ACCMODE != os.O_RDONLY
            flags = {"create": bool(args[2] & os.O_CREAT), "empty": bool(args[2] & os.O_TRUNC)}
            return self._here("open", path, **flags) if writes else None
        if name == "mkdirat":
            return self._here("mkdir", path)
        if name in ("renameat", "renameat2"):
            call, to = self._here("rename", path), self._path(pid, *args[2:4])
            return call and Call("rename", call.path, os.path.relpath(to, self.folder))
        assert not path.startswith(self.folder), f"{name} of {path} is not understood here"
        return None

    def _of_descriptor(self, name: str, pid: int, args: Sequence[int]) -> Call | None:
        descriptor = args[4] if name == "mmap" else args[0]
        try:
            path = os.readlink(f"/proc/{pid}/fd/{descriptor & 0xFFFFFFFF}")
        except FileNotFoundError:  # an anonymous mapping
            return None
        if not path.startswith(self.folder):
            return None
        assert name != "mmap" or not args[2] & 2, f"a mapping of {path} is written to: not understood here"
        if name in ("fsync", "fdatasync"):
            return self._here("fsync", path)
        if name == "ftruncate":
            return self._here("truncate", path, offset=args[1])
        if name == "mmap":
            return None
        if name == "sendfile":
            data = self._copied(pid, args)
        elif name == "writev":
            parts = struct.iter_unpack("=QQ", _memory(pid, args[1], 16 * args[2]))
            data = b"".join(_memory(pid, *part) for part in parts)
        else:
            data = _memory(pid, args[1], args[2])
        position, flags = _position(pid, args[0])
        at = args[3] if name == "pwrite64" else None if flags & os.O_APPEND else position
        return self._here("write", path, data=data, offset=at)

    def _copied(self, pid: int, args: Sequence[int]) -> bytes:
        position = struct.unpack("=q", _memory(pid, args[2], 8))[0] if args[2] else _position(pid, args[1])[0]
        with open(f"/proc/{pid}/fd/{args[1]}", "rb") as file:
            file.seek(position)
            return file.read(args[3])

    def _path(self, pid: int, folder: int, name: int) -> str:
        text = os.fsdecode(_text(pid, name))
        at = ctypes.c_int32(folder & 0xFFFFFFFF).value
        return os.path.normpath(os.path.join(os.readlink(f"/proc/{pid}/{'cwd' if at == _CWD else f'fd/{at}'}"), text))

    def _here(self, kind: str, path: str, **rest: Any) -> Call | None:
        inside = path == self.folder or path.startswith(f"{self.folder}/")
        return Call(kind, os.path.relpath(path, self.folder), **rest) if inside else None


def _memory(pid: int, place: int, length: int) -> bytes:
    if not length:
        return b""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(place)
        return memory.read(length)


def _text(pid: int, place: int) -> bytes:
    """The bytes up to the next zero, page by page."""
    found = b""
    while b"\0" not in found:
        found += _memory(pid, place + len(found), _PAGE - (place + len(found)) % _PAGE)
    return found[: found.index(b"\0")]


def _position(pid: int, descriptor: int) -> tuple[int, int]:
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()[:2])
    return int(lines["pos"]), int(lines["flags"], 8)
