"""The jail's processes: the outer one, the first of the namespaces, and the driver of programs."""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any

from .linux import check, libc, machine
from .namespaces import FILE_BYTES, enter, give_up_rights, leave_keyring, make_root
from .programs import drive
from .syscalls import install_filter

_FILES = 64
_SIGNALS = 256
_PAUSE_S = 0.001
# These are from linux/prctl.h.
_PDEATHSIG = 1
_DUMPABLE = 4
_NO_NEW_PRIVS = 38
_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    check(libc.prctl(option, value, 0, 0, 0), "prctl")


def _limit(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: settings["seconds"],
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_SIGPENDING: _SIGNALS,  # and timers
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        if value is None:
            continue
        _, ceiling = resource.getrlimit(name)
        room = 1 if name == resource.RLIMIT_CPU else 0  # equal limits would send SIGKILL, not SIGXCPU
        most = sys.maxsize if ceiling == resource.RLIM_INFINITY else ceiling
        soft = min(value, most)
        hard = min(value + room, most)
        resource.setrlimit(name, (soft, hard))


def _first_process(settings: dict[str, Any], user: int | None) -> int:
    """Start the driver, wait for all descendants, return the driver's status; sandbox.py kills those that stay."""
    if settings["own"]:
        make_root(settings["root"], settings["read"])
        os.chdir("/program")
        give_up_rights(user)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _prctl(_NO_NEW_PRIVS, 1)
    _prctl(_SUBREAPER, 1)
    leave_keyring()
    install_filter()
    _limit(settings)
    if (driver := os.fork()) == 0:
        drive()
        os._exit(0)
    return _wait_for_all(driver)


def _end_all(children: int) -> None:
    """Kill all descendants, by process groups where they are not this one's, until none is left; then end.

    Linux's file `children` has the ended ones too, and at least one as long as a descendant lives: whose parent ends is
    adopted at once, before the parent is gone. A chain of processes, each started by one that ends, has only its group
    or its speed to be caught by.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for child in map(int, os.pread(children, 1 << 16, 0).split()):
                with contextlib.suppress(ProcessLookupError):
                    group = os.getpgid(child)
                    os.kill(child if group == os.getpgrp() else -group, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(_PAUSE_S)
    os._exit(1)


def _wait_for_all(child: int) -> int:
    """Wait for all children, adopted ones too, and return the status of one."""
    status = 0
    with contextlib.suppress(ChildProcessError):  # none is left
        while ended := os.wait():
            status = ended[1] if ended[0] == child else status
    return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def _reason() -> Any:
    """A failure to set up in one line on stderr, and the end of this process."""
    try:
        yield
    except OSError as error:
        words = [str(word) for word in (error.filename, error.strerror) if word]
        os.write(2, f"{': '.join(words)}\n".encode())
        os._exit(1)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["packages"]
    os.umask(0o022)  # another user reads the folders
    with _reason():
        machine()
        # OSError where Linux has no such list. The first process hides it from this one when it has a /proc of its own.
        children = os.open("/proc/thread-self/children", os.O_RDONLY)
        user = enter() if settings["own"] else None
        if settings["user"] is not None:
            give_up_rights(settings["user"])
        _prctl(_SUBREAPER, 1)
        _prctl(_DUMPABLE, 0)  # no program looks into this process, or its forks
        signal.signal(signal.SIGTERM, lambda *_: _end_all(children))  # how sandbox.py ends all
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(children)
        os.setpgid(0, 0)
        status = 1
        try:
            with _reason():
                status = _first_process(settings, user)
        finally:
            os._exit(status & 255)
    os._exit(_wait_for_all(child) & 255)  # not only for the child: killed first, it leaves orphans to this process
