"""The sandbox for a model's programs: no network, no files but Python's, limits on all resources.

Kinds: "bubblewrap" (the command bwrap) and "namespaces" (jail.py, by Linux's user namespaces or as root). Both give a
program only a read-only Python and an empty folder in memory, and kill everything it started. "limits" has no
namespaces: a program has the user's files and network, and is limited in time, memory, processes and output.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from ..supervisor import processes  # noqa: TID252  worker.py loads the package under another name
from .jail import FILE_BYTES

KINDS = ("bubblewrap", "namespaces", "limits")
_PROCESSES = 64
_LOOK_S = 0.05  # how often the processes are counted: reading /proc costs milliseconds
_WALL_CLOCK_FACTOR = 5  # the limit of the wall clock over that of the CPU time
_MOST_OUTPUT = 1 << 28  # bytes of all runs together
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/program", "LANG": "C.UTF-8"}
_BWRAP = (
    "--unshare-all",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    "--cap-drop",
    "ALL",
    "--uid",
    "65534",
    "--gid",
    "65534",
)
_JAIL = Path(__file__).with_name("jail.py")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Sandbox:
    """Runs code, see jail.py. memory: bytes, of one process and of all together. seconds: CPU time of all.

    OSError where no sandbox of that kind ("auto": none but "limits") can be made.
    """

    def __init__(self, kind: str, memory: int, seconds: float) -> None:
        self._memory, self._seconds = memory, seconds
        reasons = []
        for candidate in KINDS[:2] if kind == "auto" else [kind]:
            self.kind = candidate
            try:
                ((works, text),) = self.run("print(6 * 7)", [""])
            except OSError as error:
                works, text = False, str(error)
            if works and text == "42\n":
                return
            reasons.append(f"{self.kind}: {text}")
        raise OSError(
            f"no sandbox for programs ({'; '.join(reasons)}): want bubblewrap, or a machine that allows user "
            'namespaces, or reward.sandbox "limits", which keeps a program from neither files nor network'
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
            yield from self._results([process], len(inputs))

    def test(self, code: str, before: str, tests: str, function: str | None = None) -> tuple[bool, str]:
        """Whether the code passes the tests, and the reason if not.

        The tests run behind `before` in a sandbox of their own and reach the code through a link: the code finds
        neither them nor the verdict in its process, see jail.py. function: what the code has to define, also where
        `before` has begun it.
        """
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(end) for end in socket.socketpair()]
            both = {"inputs": [""], "function": function}
            judge = self._start(stack, both | {"code": before, "tests": tests}, links[0])
            tested = self._start(stack, both | {"code": code}, links[1])
            for link in links:
                link.close()  # the tests wait no longer when the other side has ended
            return next(self._results([judge, tested], 1))

    def _start(
        self, stack: contextlib.ExitStack, job: dict[str, Any], link: socket.socket | None = None
    ) -> "subprocess.Popen[bytes]":
        """A process of jail.py that does the job; it and its descendants end with the stack."""
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with tempfile.TemporaryFile("w+") as file:
            json.dump({"tests": None, "link": link and link.fileno()} | job, file)
            file.seek(0)
            process = subprocess.Popen(
                self._command(folder),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
                pass_fds=[] if link is None else [link.fileno()],
            )
        stack.callback(_end, process)
        return process

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
        }
        command = [python, "-I", "-S", str(_JAIL), json.dumps(settings)]
        if self.kind != "bubblewrap":
            return command
        if (bwrap := shutil.which("bwrap")) is None:
            raise OSError("there is no command bwrap")
        inside = [text for path in (*read, str(_JAIL)) for text in ("--ro-bind", path, path)]
        memory = ["--size", str(FILE_BYTES), "--tmpfs", "/program", "--chdir", "/program"]
        own = ["--dev", "/dev", "--proc", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"]
        return [bwrap, *_BWRAP, *inside, *memory, *own, *command]

    def _results(
        self, sandboxes: Sequence["subprocess.Popen[bytes]"], count: int
    ) -> Generator[tuple[bool, str], None, None]:
        """The replies of the first sandbox. The limits are those of all together."""
        process = sandboxes[0]
        assert process.stdout is not None
        began, received, partial = time.monotonic(), 0, b""
        look = began + _LOOK_S
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
                if (now := time.monotonic()) >= look:
                    look = now + _LOOK_S
                    if fault := self._fault([each.pid for each in sandboxes], now - began, received):
                        yield False, fault
                        return

    def _fault(self, roots: Sequence[int], waited: float, received: int) -> str:
        """Name the limit that is exceeded, if any."""
        table = processes()
        used = [entry for root in roots for _, entry in _tree(root, table)]
        limits = {
            "CPU time": sum(entry.ticks for entry in used) / os.sysconf("SC_CLK_TCK") > self._seconds,
            "time": waited > _WALL_CLOCK_FACTOR * self._seconds,
            "processes": len(used) > _PROCESSES,
            "memory": sum(entry.pages for entry in used) * _PAGE > self._memory,
            "output": received > _MOST_OUTPUT,
        }
        return next((f"over the limit of {name}" for name, passed in limits.items() if passed), "")


def _reply(line: bytes) -> tuple[bool, str]:
    try:
        ended_well, text = json.loads(line)
        return bool(ended_well), str(text)
    except (ValueError, TypeError, RecursionError):  # a program found a way to write here
        return False, "wrote where it should not"


def _last_words(process: "subprocess.Popen[bytes]") -> str:
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        if said := os.read(process.stderr.fileno(), 500).decode(errors="replace").strip():
            return said
    return "the sandbox ended early"


def _tree(root: int, table: dict[int, Any]) -> list[tuple[int, Any]]:
    """`root` and its descendants in a table of all processes."""
    children: dict[int, list[int]] = {}
    for process, entry in table.items():
        children.setdefault(entry.parent, []).append(process)
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        if process in table:
            found.append((process, table[process]))
        todo += children.get(process, [])
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill all descendants, then the process, which adopts orphans.

    One look may miss an orphan that is adopted while it reads /proc, so two in a row have to find none, and the same
    processes without a visible parent: hidepid hides some for good.
    """
    quiet, before = 0, None
    while quiet < 2:
        table = processes()
        others = [pid for pid, entry in _tree(process.pid, table) if pid != process.pid and entry.state != "Z"]
        orphans = {pid for pid, entry in table.items() if entry.parent not in table}
        quiet = 0 if others or orphans != before else quiet + 1
        before = orphans
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
