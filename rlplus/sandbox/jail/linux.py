"""The C library, and its errors as OSError."""

import ctypes
import os
import platform

libc = ctypes.CDLL(None, use_errno=True)
MACHINES = ("x86_64", "aarch64")  # columns of the tables of numbers, in this order


def machine() -> int:
    """The index in MACHINES; OSError on another machine."""
    if (name := platform.machine()) not in MACHINES:
        raise OSError(0, f"want a machine of {' or '.join(MACHINES)}, for the filter of system calls; got {name}")
    return MACHINES.index(name)


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
