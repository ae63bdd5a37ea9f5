"""Processes that tests start, which end with the test, and waiting for them."""

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

# Ends a test that hangs. No verdict depends on it: what a loaded machine takes minutes for is still right.
PATIENCE_S = 1800.0
LONG_S = 8 * PATIENCE_S  # for half an hour of processor time or more, beside other work
ROOT, SUPPORT = Path(__file__).parents[2], Path(__file__).parent
MARK = "RLPLUS_TEST_PROCESS"
_count = itertools.count()


@contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own; at the end it and all that it started are killed."""
    mark = f"{os.getpid()}-{next(_count)}"
    environment = {**(os.environ if env is None else env), MARK: mark}
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        while left := _alive(process, mark):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.01)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def run(command: Sequence[str], patience_s: float = PATIENCE_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with captured output, for a command that ends by itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with started(command, **pipes) as process:
        out, error = process.communicate(timeout=patience_s)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def ranks(command: Sequence[str], count: int) -> list[str]:
    """The output of each of so many processes of one torch.distributed group."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    here |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack:
        group = [
            stack.enter_context(started(command, os.environ | here | {"RANK": str(rank)}, stdout=subprocess.PIPE))
            for rank in range(count)
        ]
        return [process.communicate(timeout=PATIENCE_S)[0] for process in group]


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[str] | None = None, every_s: float = 0.01
) -> None:
    """Wait until the condition holds; AssertionError, with stderr, if the process ends first, or if it never holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {(process.communicate()[1] or '')[-4000:]}")
        assert time.monotonic() < end, "never came true"
        time.sleep(every_s)


def has_name(name: str) -> bool:
    """Whether a process has this name, an ended one included."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                if (entry / "comm").read_text(errors="replace") == f"{name}\n":
                    return True
    return False


def free_port() -> int:
    """A port to listen on. It is below those that Linux gives to connections, which could take it before it is used."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, max(given_out, 20_000)), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("none of 100 ports is free")


def _alive(process: subprocess.Popen[str], mark: str) -> list[int]:
    """The process, its descendants, and every other one with its mark: in another session or with a dead parent.

    The mark alone is not enough: a program that sets its title overwrites the environment that others see.
    """
    children: dict[int, list[int]] = {}
    alive, marked = set(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                pid = int(entry.name)
                children.setdefault(int(parent), []).append(pid)
                if state != "Z":
                    alive.add(pid)
                    if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                        marked.append(pid)
    found, waiting = set(), [*marked, process.pid]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return sorted(found & alive)
