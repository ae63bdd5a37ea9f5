"""The processes of one sandbox: how they are started, what they may use, and their end."""

import contextlib
import json
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .jail.namespaces import FILE_BYTES, free_user
from .jail.programs import READY
from .process_table import Process, processes, runnable, tree

KINDS = ("bubblewrap", "namespaces", "limits")
_PROCESSES = 64
_LOOK_S = 0.05  # how often the processes are counted: reading /proc costs milliseconds
_END_S = 0.02  # how often a sandbox is told to end
_LATE_S = 0.2  # a later look than this says nothing of the time before
_WALL_CLOCK_FACTOR = 5  # limit of the wall clock / limit of the CPU time, for a busy machine
_MOST_OUTPUT = 1 << 28  # bytes of all runs together
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/program", "LANG": "C.UTF-8"}
_BWRAP = ("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL")
_AS_USER = ("--unshare-all", "--uid", "65534", "--gid", "65534")
# No user namespace: jail becomes a user of its own, since Linux exempts root from the limit of processes.
_AS_ROOT = (
    "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
    "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID",
)  # fmt: skip
_DEVICES = [text for name in ("null", "random", "urandom") for text in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
_JAIL = Path(__file__).with_name("jail")
_PAGE = os.sysconf("SC_PAGE_SIZE")

log = logging.getLogger(__name__)


class Sandbox:
    """Runs Python programs. memory: bytes, of one process and of all together. seconds: CPU time of all, and time in
    which all sleep.

    kind "auto": bubblewrap or namespaces; as root, who needs no other command for them, namespaces first. Raises
    OSError if this sandbox is unavailable, later also in `run` and `test`: then nothing is known of the code. "auto"
    never falls back to "limits". ValueError for another kind.
    """

    def __init__(self, kind: str, memory: int, seconds: float) -> None:
        if kind not in ("auto", *KINDS):
            raise ValueError(f"want a sandbox of kind auto, {', '.join(KINDS)}; got {kind!r}")
        self._memory = memory
        self._seconds = seconds
        reasons = []
        closed = ("namespaces", "bubblewrap") if os.getuid() == 0 else ("bubblewrap", "namespaces")
        for candidate in closed if kind == "auto" else [kind]:
            self.kind = candidate
            try:
                ((works, text),) = self.run("print(6 * 7)", [""])
            except OSError as error:
                works = False
                text = str(error)
            if works and text == "42\n":
                return
            reasons.append(f"{self.kind}: {text}")
        raise OSError(
            f"no sandbox for programs ({'; '.join(reasons)}): want bubblewrap, or a machine that allows user "
            'namespaces, or the kind "limits", which keeps a program from neither files nor network'
        )

    def run(
        self, code: str, inputs: Sequence[str], function: str | None = None
    ) -> Generator[tuple[bool, str], None, None]:
        """Per input whether the run succeeded, and its output or the reason of its failure.

        function: which gets each input's lines as arguments, in JSON, instead of the program its standard input. A run
        that exceeds a limit is the last. Closing the generator kills all processes.
        """
        with contextlib.ExitStack() as stack:
            process = self._start(stack, {"code": code, "inputs": list(inputs), "function": function})
            _wait_until_ready(process)
            yield from self._results([process], len(inputs))

    def test(self, code: str, before: str, tests: str, function: str | None = None) -> tuple[bool, str]:
        """Whether the code passes the tests, and the reason if not.

        The tests run behind `before` in a sandbox of their own and reach the code through a link: the code finds
        neither them nor the verdict in its process, see jail. function: what the code has to define, also where
        `before` has begun it.
        """
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(end) for end in socket.socketpair()]
            both = {"inputs": [""], "function": function}
            judge = self._start(stack, both | {"code": before, "tests": tests}, links[0])
            tested = self._start(stack, both | {"code": code}, links[1])
            for link in links:
                link.close()  # the tests wait no longer when the other side has ended
            for process in (judge, tested):
                _wait_until_ready(process)
            return next(self._results([judge, tested], 1))

    def _start(
        self, stack: contextlib.ExitStack, job: dict[str, Any], link: socket.socket | None = None
    ) -> "subprocess.Popen[bytes]":
        """A process of jail that does the job; it and its descendants end with the stack."""
        folder = tempfile.mkdtemp()
        stack.callback(_remove, folder)
        with tempfile.TemporaryFile("w+") as file:
            json.dump({"tests": None, "link": link and link.fileno()} | job, file)
            file.seek(0)
            process = subprocess.Popen(
                self._command(folder),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=_ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
                pass_fds=[] if link is None else [link.fileno()],
            )
        stack.callback(self._end, process)
        return process

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """End the jail, whose first process adopts orphans and kills all others before it ends.

        A program may have stopped it. bubblewrap's own process stands before it: killed, it takes the others with it
        unless they are another user's, whom it may not kill; it is killed where it has none, or hidepid hides them.
        """
        while process.poll() is None:
            if self.kind == "bubblewrap":
                for pid in tree(process.pid, processes()).keys() - {process.pid} or [process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                for number in (signal.SIGTERM, signal.SIGCONT):
                    process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()

    def _command(self, folder: str) -> list[str]:
        python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
        packages = [path for path in dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))]
        read = [path for path in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, *packages) if os.path.exists(path)]
        read = [path for path in read if not any(path.startswith(f"{other}/") for other in read)]
        settings = {
            "own": self.kind == "namespaces",
            "root": folder,
            "read": read,
            "packages": packages,
            "memory": self._memory,
            "seconds": int(self._seconds) + 1,
            "processes": None if self.kind == "limits" else _PROCESSES,
            "user": free_user() if self.kind == "bubblewrap" else None,
        }
        command = [python, "-I", "-S", str(_JAIL), json.dumps(settings)]
        if self.kind != "bubblewrap":
            return command
        if (bwrap := shutil.which("bwrap")) is None:
            raise OSError("there is no command bwrap")
        files = [*read, str(_JAIL)]
        above = sorted({str(folder) for path in (*files, "/dev/null") for folder in Path(path).parents} - {"/"})
        inside = [text for path in above for text in ("--perms", "0755", "--dir", path)]
        inside += [text for path in files for text in ("--ro-bind", path, path)]
        memory = ["--perms", "0777", "--size", str(FILE_BYTES), "--tmpfs", "/program", "--chdir", "/program"]
        own = [*_DEVICES, "--proc", "/proc", "--remount-ro", "/proc", "--remount-ro", "/"]
        rights = _AS_USER if settings["user"] is None else _AS_ROOT
        return [bwrap, *_BWRAP, *rights, *inside, *memory, *own, *command]

    def _results(
        self, sandboxes: Sequence["subprocess.Popen[bytes]"], count: int
    ) -> Generator[tuple[bool, str], None, None]:
        """The replies of the first sandbox. The limits hold for all together."""
        process = sandboxes[0]
        assert process.stdout is not None
        received = 0
        partial = b""
        meter = _Meter(self._memory, self._seconds, time.monotonic())
        spent = -time.process_time()  # here, on the output, but not on looking
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while count:
                if selector.select(_LOOK_S):
                    data = os.read(process.stdout.fileno(), 1 << 16)
                    *lines, partial = (partial + data).split(b"\n")
                    received += len(data)
                    for line in lines[:count]:
                        count -= 1
                        yield _reply(line)
                    if not data and count:
                        yield False, _last_words(process)
                        return
                if (now := time.monotonic()) >= meter.looked + _LOOK_S:
                    before = time.process_time()
                    table = processes()
                    used = {pid: entry for each in sandboxes for pid, entry in tree(each.pid, table).items()}
                    if fault := meter.fault(now, used, received, spent + before):
                        yield False, f"over the limit of {fault}"
                        return
                    spent -= time.process_time() - before


class _Meter:
    """The limits, and what the processes of a run have used by looks at them."""

    def __init__(self, memory: int, seconds: float, began: float) -> None:
        self._memory = memory
        self._seconds = seconds
        self._began = began
        self.looked = began
        self._cpu = 0.0
        self._asleep = 0.0
        self._received = 0

    def fault(self, now: float, used: Mapping[int, Process], received: int, spent: float = 0.0) -> str:
        """Name the limit that is exceeded, if any. used: the processes; received, spent: bytes read, CPU time on it.

        Time in which none of them runs, waits for a processor or a disk, or is heard of, counts like CPU time.
        """
        cpu = spent + sum(entry.ticks for entry in used.values()) / os.sysconf("SC_CLK_TCK")
        idle = min(now - self.looked, _LATE_S) - max(0.0, cpu - self._cpu)
        if idle > 0 and received == self._received and not any(map(runnable, used)):
            self._asleep += idle
        self.looked = now
        self._cpu = cpu
        self._received = received
        limits = {
            "CPU time": cpu > self._seconds,
            "time": cpu + self._asleep > self._seconds or now - self._began > _WALL_CLOCK_FACTOR * self._seconds,
            "processes": len(used) > _PROCESSES,
            "memory": sum(entry.pages for entry in used.values()) * _PAGE > self._memory,
            "output": received > _MOST_OUTPUT,
        }
        return next((name for name, passed in limits.items() if passed), "")


def _wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    """OSError if it ends before its first program."""
    assert process.stdout is not None
    if process.stdout.readline() != f"{READY}\n".encode():
        raise OSError(_last_words(process))


def _reply(line: bytes) -> tuple[bool, str]:
    try:
        ended_well, text = json.loads(line)
        return bool(ended_well), str(text)
    except (ValueError, TypeError, RecursionError, MemoryError):  # a program found a way to write here
        return False, "wrote where it should not"


def _last_words(process: "subprocess.Popen[bytes]") -> str:
    """The last line on stderr: of an exception what it says, without the lines that lead there."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        if lines := os.read(process.stderr.fileno(), 1 << 16).decode(errors="replace").strip().splitlines():
            return lines[-1]
    return "the sandbox ended early"


def _remove(folder: str) -> None:
    """Remove the folder. With "limits" a program writes there: folders without rights, or deeper than any recursion.

    Inner folders move to the top, so that each is emptied once and no path is long.
    """
    if not os.path.isdir(folder):  # the program has done it
        return
    todo = [folder]
    moved = 0
    mark = secrets.token_hex(8)
    try:
        while todo:
            os.chmod(place := todo.pop(), 0o700)
            for entry in list(os.scandir(place)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                moved += 1
                todo.append(f"{folder}/{mark}-{moved}")
                os.rename(entry.path, todo[-1])
            if place != folder:
                os.rmdir(place)
        os.rmdir(folder)
    except OSError as error:
        log.warning("the folder of a program stays: %s", error)
