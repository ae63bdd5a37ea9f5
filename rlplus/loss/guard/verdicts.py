"""Verdicts on the `triton` backend: the self-check in a child process, and its outcome on disk.

A verdict is valid for a device model, a dtype and the versions of everything between a kernel's source and the device.
It is a file in the folder that RLPLUS_CACHE names, else in $XDG_CACHE_HOME/rlplus, else in ~/.cache/rlplus. If that
cannot be written, each process runs the check itself.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import torch

logger = logging.getLogger(__name__)

LIMIT_S = 600.0  # limit of a check, which compiles about ten kernels: more than a busy machine needs
SAFE = ("-P",) if sys.version_info >= (3, 11) else ()  # keep the current folder out of sys.path
PLACE = str(Path(__file__).parents[3])  # has the package, which a loader may have put into no path of modules
COMMAND = (sys.executable, *SAFE, "-m", "rlplus.loss.selfcheck")
KEPT = ("passed", "refused")
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)  # signals that no faulty kernel causes
NAMING = re.compile("error|assert|fatal|terminate", re.IGNORECASE)  # a library's last words before it ends the process
MISSING = "none that can be imported"
DRIVER = Path("/proc/driver/nvidia/version")


class Verdict(NamedTuple):
    """status: "passed"; "refused"; "unchecked", if the check could not start or was killed; or "out of memory"."""

    status: str
    reason: str


def verdict_on(device: torch.device, dtype: torch.dtype) -> Verdict:
    """The cached verdict, else a check's: seconds, or minutes if Triton's cache is empty. Or OutOfMemoryError.

    Of several processes that ask at the same time, one checks and the others wait.
    """
    key = _key(device, dtype)
    file = cache_file(key)
    with _locked(file):
        if (verdict := read(file, key)) is None:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            verdict = run_check([*COMMAND, uuid, key["dtype"]])
            if verdict.status == "out of memory":
                raise torch.OutOfMemoryError(f"the self-check of backend 'triton': {verdict.reason}")
            if verdict.status in KEPT:
                write(file, key, verdict)
    if verdict.status == "refused" and file is not None and file.exists():
        return verdict._replace(reason=f"{verdict.reason} (kept in {file}; without the file it is checked again)")
    return verdict


# ---- what a verdict holds for


def _key(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability(device)
    kind = {"device": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}"}
    return kind | {"dtype": str(dtype).removeprefix("torch.")} | versions()


@cache
def versions() -> dict[str, str]:
    """Versions of everything that a kernel's result depends on, except the device."""
    try:
        from triton import __version__ as triton
    except (ImportError, OSError):  # OSError: its library does not load
        triton = MISSING
    package = Path(__file__).parents[2]
    sources = hashlib.sha256()
    for file in sorted((*(package / "kernels").glob("*.py"), *(package / "loss").rglob("*.py"))):
        sources.update(file.read_bytes())
    driver = DRIVER.read_text().partition("\n")[0] if DRIVER.is_file() else "unknown"
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton,
        "driver": driver,
        "kernels": sources.hexdigest()[:16],
    }


# ---- the disk


def cache_folder() -> Path | None:
    """The folder of the verdicts; None if the environment names none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("RLPLUS_CACHE") or Path(home) / "rlplus")
    return folder if folder.is_absolute() else None


def cache_file(key: dict[str, str]) -> Path | None:
    """The file of a verdict; None without a folder."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder()
    return folder / f"selfcheck-{name}.json" if folder else None


def read(file: Path | None, key: dict[str, str]) -> Verdict | None:
    """The verdict in the file; None if it is missing, damaged, for something else, or writable by others."""
    if file is None:
        return None
    try:
        with _opened(file, os.O_RDONLY) as stream:
            found = json.loads(stream.read(2**16))
        if found["key"] == key and found["status"] in KEPT:
            return Verdict(found["status"], str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.info("no verdict in %s: %r", file, error)
    return None


def write(file: Path | None, key: dict[str, str], verdict: Verdict) -> None:
    """Write atomically; if the folder is not writable, the next process repeats the check."""
    if file is None:
        return
    new = file.with_suffix(f".{os.getpid()}")
    try:
        with _opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as stream:
            json.dump({"key": key} | verdict._asdict(), stream, indent=1)
        new.replace(file)
    except OSError as error:
        logger.info("the verdict is not kept: %r", error)


def _opened(file: Path, flags: int) -> IO[str]:
    """Open the file; PermissionError if anyone but this user could have written it."""
    descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # a named pipe must not block
    stream = os.fdopen(descriptor, "w" if flags & os.O_WRONLY else "r")
    found = os.fstat(stream.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        stream.close()
        raise PermissionError(f"{file} is not this user's alone")
    return stream


@contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    """Hold the verdict's lock, if the folder is writable."""
    stream = None
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stream = _opened(file.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT)
            fcntl.flock(stream, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if stream is not None:
            stream.close()


# ---- the child process


def run_check(command: Sequence[str], limit_s: float = LIMIT_S) -> Verdict:
    """Run the command as a process; returns its verdict, the last line of its output, or how it ended."""
    try:
        places = (PLACE, *(place or os.getcwd() for place in sys.path))  # the child imports what this process does
        # Files, not pipes: a compiler that the child started could keep a pipe open after its end.
        with _text_file() as said, _text_file() as complained:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=complained, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
            )  # fmt: skip
            try:
                status = child.wait(limit_s)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            said.seek(0)
            complained.seek(0)
            return _heard(status, said.read(), complained.read())
    except subprocess.TimeoutExpired:
        return Verdict("refused", f"it had not ended after {limit_s:g} s")
    except OSError as error:
        return Verdict("unchecked", f"it could not be started: {error}")


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _heard(status: int, said: str, complained: str) -> Verdict:
    if status < 0:
        reason = f"it died of signal {-status} ({signal.strsignal(-status)})"
        if named := [line for line in complained.splitlines() if NAMING.search(line)]:
            reason += f": {named[0].strip()[:1000]}"  # a stack may follow
        return Verdict("unchecked" if -status in FROM_OUTSIDE else "refused", reason)
    *_, last = complained.strip().splitlines() or ["nothing on stderr"]
    if status:
        return Verdict("refused", f"it ended with status {status}: {last}")
    try:
        return Verdict(**json.loads(said.strip().splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        return Verdict("refused", f"want a verdict on its last line; got {said[-200:]!r}")
