"""Namespaces of our own: users (unless it is root), processes, network, mounts; a root directory, and no rights."""

import contextlib
import ctypes
import errno
import os
import struct

from .linux import check, libc, machine

FILE_BYTES = 1 << 26  # limit of one file, and of all in /program
_FILES = FILE_BYTES >> 12  # and folders and links in /program: empty ones have no bytes, but a kilobyte of the kernel's
_NOBODY = 65534
_FIRST_USER = 1 << 31
_WANTED = 1 << 6 | 1 << 7 | 1 << 21  # CAP_SETGID, CAP_SETUID and CAP_SYS_ADMIN of linux/capability.h
_NEW_USER = 0x10000000  # linux/sched.h
_NEW_REST = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # linux/sched.h
_READ_ONLY = 1
_NO_SETUID = 2
_NO_DEVICES = 4
_NO_EXEC = 8
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_DETACH = 2  # sys/mount.h
# The same on both machines.
_MOUNT_SETATTR = 442
_HERE = -100  # AT_FDCWD
_ALL_BELOW = 0x8000  # AT_RECURSIVE
_PIVOT_ROOT = (155, 41)
# These are from linux/keyctl.h.
_KEYCTL = (250, 219)
_JOIN_SESSION_KEYRING = 1


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text and text.encode() for text in (source, target, kind)]
    check(libc.mount(*texts, ctypes.c_ulong(flags), data and data.encode()), f"mount {target}")


def _make_read_only(target: str) -> None:
    """Make the mount and all below it read-only. A remount, all that Linux before 5.12 has, leaves out those below."""
    attributes = struct.pack("=4Q", _READ_ONLY | _NO_SETUID, 0, 0, 0)
    if libc.syscall(_MOUNT_SETATTR, _HERE, target.encode(), _ALL_BELOW, attributes, ctypes.c_size_t(len(attributes))):
        if ctypes.get_errno() == errno.ENOSYS:
            raise OSError(errno.ENOSYS, f"want Linux 5.12 or later (mount_setattr); got {os.uname().release}")
        check(-1, "mount_setattr")


def _has(user: int) -> bool:
    """Whether the user namespace has this user and group: a container's may have the lowest 65,536 only."""
    for kind in ("uid_map", "gid_map"):
        with open(f"/proc/self/{kind}") as lines:
            ranges = [[int(word) for word in line.split()] for line in lines]
        if not any(first <= user < first + count for first, _, count in ranges):
            return False
    return True


def free_user() -> int | None:
    """A user for a program, if this process is root and may become another. Every program gets another one, since the
    limit of processes is per user."""
    free = _FIRST_USER + (int.from_bytes(os.urandom(4), "little") >> 2)
    return free if os.getuid() == 0 and _has(free) and _rights() & _WANTED == _WANTED else None


def _rights() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


def enter() -> int | None:
    """The user to become; None in a user namespace. OSError if the machine allows neither."""
    user = os.getuid()
    group = os.getgid()
    free = free_user()
    if free is not None and libc.unshare(_NEW_REST) == 0:
        return free
    check(libc.unshare(_NEW_USER | _NEW_REST), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def make_root(root: str, read: list[str]) -> None:
    """Make `root` the root directory: in memory, with the readable folders and the writable /program."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=755")
    for source in (*read, "/dev/null", "/dev/random", "/dev/urandom"):
        target = root + source
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            continue
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT))
        _mount(source, target, None, _BIND | _RECURSIVE)
    os.makedirs(f"{root}/proc")
    os.makedirs(f"{root}/program")
    _make_read_only(root)
    room = f"size={FILE_BYTES},nr_inodes={_FILES}"
    _mount("tmpfs", f"{root}/program", "tmpfs", _NO_SETUID | _NO_DEVICES, f"{room},mode=777")
    with contextlib.suppress(OSError):  # some containers do not allow it: then there is no /proc
        _mount("proc", f"{root}/proc", "proc", _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_EXEC)
    os.chdir(root)
    check(libc.syscall(_PIVOT_ROOT[machine()], b".", b"."), "pivot_root")
    check(libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def give_up_rights(user: int | None) -> None:
    """Switch to that user and drop all capabilities."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def leave_keyring() -> None:
    """Join a new session keyring: the parent's keys, which no namespace hides, are neither readable nor revocable.

    Where Linux has no keys, or a container refuses this call, a program cannot make it either.
    """
    serial = libc.syscall(_KEYCTL[machine()], _JOIN_SESSION_KEYRING, None, 0, 0, 0)
    if serial < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        check(serial, "a new session keyring")
