"""Runs untrusted programs inside a sandbox. Started by path, by sandbox.py, with nothing of the parent's environment.

    python -I -S jail.py '{"own": true, "root": FOLDER, "read": [FOLDER, ...], "packages": [FOLDER, ...],
                           "memory": BYTES, "seconds": CPU TIME, "processes": NUMBER}' < JOB

own: enter namespaces of users (unless it is root), processes, network and mounts. There FOLDER becomes the root
directory, with the folders of `read`, read-only, and an empty, writable /program in memory. Otherwise bubblewrap has
done that, or there are no namespaces.

JOB is JSON: {"code": text, "inputs": [text, ...], "function": name or null, "link": descriptor or null, "tests": text
or null}. The code runs once for each input, in a fork, and reads it from stdin; with `function`, that function gets its
lines as arguments. For each run it writes one line: [true, output] or [false, reason].

A link connects two sandboxes, so that code shares no process with the tests that judge it. In the one without `tests`
the code runs and answers; in the other the tests run behind their own code, and that one's [true, ""] is the verdict.
What they use of the answering one (`function`, which their own code may have begun, and names that are only there) they
get by value if it is a number, a text or a collection of these. Anything else is a proxy (`_Remote`), which is equal to
nothing but itself: no `__eq__` of the code is ever asked.
"""

import builtins
import contextlib
import ctypes
import json
import numbers
import os
import platform
import re
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

OUTPUT_LIMIT = 1 << 20  # bytes of one run
FILE_BYTES = 1 << 26  # of one file, and of all in /program
_FILES, _LOOK_S, _INPUT = 64, 0.01, ".input"
_NOBODY, _FIRST_USER = 65534, 1 << 20
_NEW_USER, _NEW_REST = 0x10000000, 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # linux/sched.h
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH, _KEPT, _RELATIME, _RELATIME_FOUND = 2, 2 | 4 | 8 | 1024 | 2048, 1 << 21, 4096  # mount(2), statvfs(3)
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _SUBREAPER = 1, 4, 38, 36  # linux/prctl.h
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Memory of no process, which nothing counts: memfd_create, memfd_secret, shmget, msgget, files in memory that a
# namespace of its own lets a program mount (unshare, mount, fsopen); with mmap if it is shared and anonymous. By
# machine: AUDIT_ARCH, mmap, the others.
_UNCOUNTED = {
    "x86_64": (0xC000003E, 9, (319, 447, 29, 68, 272, 165, 430)),
    "aarch64": (0xC00000B7, 222, (279, 447, 194, 186, 97, 40, 430)),
}
_SHARED_ANONYMOUS, _X32 = 0x21, 0x40000000  # flags of mmap; the first number of another ABI of x86-64
_SET_SECCOMP, _FILTER, _ALLOW, _REFUSE = 22, 2, 0x7FFF0000, 0x50001  # linux/seccomp.h; EPERM
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # linux/bpf_common.h
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text and text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), data and data.encode()), f"mount {target}")


def _enter_namespaces() -> int | None:
    """The user to become; None in a user namespace. OSError if the machine allows neither.

    Every program gets another user, since the limit of processes is per user.
    """
    user, group = os.getuid(), os.getgid()
    if user == 0 and _libc.unshare(_NEW_REST) == 0:
        return _FIRST_USER + os.getpid()
    _check(_libc.unshare(_NEW_USER | _NEW_REST), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def _make_root(root: str, read: list[str]) -> None:
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
        had = os.statvfs(target).f_flag  # a user's namespace may not drop these
        flags = had & _KEPT | (_RELATIME if had & _RELATIME_FOUND else 0)
        _mount(source, target, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | flags)
    os.makedirs(f"{root}/proc")
    os.makedirs(f"{root}/program")
    _mount("tmpfs", f"{root}/program", "tmpfs", _NO_SETUID | _NO_DEVICES, f"size={FILE_BYTES},mode=777")
    _mount("none", root, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | _NO_DEVICES)
    with contextlib.suppress(OSError):  # some containers do not allow it: then there is no /proc
        _mount("proc", f"{root}/proc", "proc", _NO_SETUID | _NO_DEVICES | 8)
    os.chdir(root)
    if number := _PIVOT_ROOT.get(platform.machine()):
        _check(_libc.syscall(number, b".", b"."), "pivot_root")
        _check(_libc.umount2(b".", _DETACH), "umount")
    else:
        os.chroot(".")
    os.chdir("/")


def _give_up_rights(user: int | None) -> None:
    """Switch to that user and drop all capabilities."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _refuse_uncounted_memory() -> None:
    """A filter of system calls, for this process and all that it starts. No-op on other machines than the two known."""
    if (numbers := _UNCOUNTED.get(platform.machine())) is None:
        return
    architecture, mmap, refused = numbers
    checks = [(_EQUAL, number) for number in refused] + [(_AT_LEAST, _X32)]
    left = range(len(checks) + 4, 4, -1)  # steps from each check to the refusal
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 0, len(checks) + 6, architecture),
        (_LOAD, 0, 0, 0),  # the number of the call
        *((code, steps, 0, number) for (code, number), steps in zip(checks, left, strict=True)),
        (_EQUAL, 0, 3, mmap),
        (_LOAD, 0, 0, 40),  # its flags
        (_AND, 0, 0, _SHARED_ANONYMOUS),
        (_EQUAL, 1, 0, _SHARED_ANONYMOUS),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    _check(_libc.prctl(_SET_SECCOMP, _FILTER, header, 0, 0), "seccomp")


def _limit(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: settings["seconds"],
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        if value is None:
            continue
        _, ceiling = resource.getrlimit(name)
        room = 1 if name == resource.RLIMIT_CPU else 0  # with equal limits SIGKILL takes the place of SIGXCPU
        most = sys.maxsize if ceiling == resource.RLIM_INFINITY else ceiling
        soft, hard = min(value, most), min(value + room, most)
        resource.setrlimit(name, (soft, hard))


def _run(job: dict[str, Any], given: str, end: int) -> None:
    """Run the code, in the fork; results go to descriptor `end`."""
    program = job["function"] is None and job["link"] is None
    scope: dict[str, Any] = {"__name__": "__main__" if program else "program"}
    scope |= {"exit": sys.exit, "quit": sys.exit}  # Python's start without -S has them
    code = compile(job["code"], "program.py", "exec")
    sys.argv = ["program.py"]
    sys.setrecursionlimit(100_000)
    os.dup2(end if program else os.open(os.devnull, os.O_WRONLY), 1)
    exec(code, scope)
    if job["tests"] is not None:
        scope.pop(job["function"], None)
        _test(scope, job["tests"], job["link"])
    elif job["link"] is not None:
        _serve(scope, job["link"])
    sys.stdout.flush()
    if program or job["link"] is not None:
        return
    function = getattr(scope["Solution"](), job["function"]) if "Solution" in scope else scope[job["function"]]
    with os.fdopen(end, "w") as file:
        file.write(json.dumps(function(*map(json.loads, given.split("\n")))))


# What crosses a link: JSON, with a collection as a list behind its type's name.
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, bytearray, dict)}


def _encode(value: Any, number: Callable[[Any], int]) -> Any:
    """number: of an object that stays in the code's process."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, *(_encode(part, number) for part in (value.items() if kind is dict else value))]
    return ["object", number(value)]


def _decode(data: Any, found: Callable[[int], Any]) -> Any:
    """found: the object of a number, or its proxy."""
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind == "object":
        return found(*parts)
    return _COLLECTIONS[kind]([_decode(part, found) for part in parts])


def _serve(scope: dict[str, Any], link: int) -> None:
    """Answer the tests' process until it ends: names of the code, attributes, calls."""
    objects: list[Any] = []
    sys.set_int_max_str_digits(0)

    def number(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    operations: dict[str, Callable[..., Any]] = {
        "names": lambda *names: {name: scope[name] for name in names if name in scope},
        "attribute": getattr,
        "call": lambda function, positional, named: function(*positional, **named),
    }
    with os.fdopen(link) as requests, os.fdopen(os.dup(link), "w") as replies:
        for line in requests:
            try:
                operation, *arguments = (_decode(part, objects.__getitem__) for part in json.loads(line))
                reply = [True, _encode(operations[operation](*arguments), number)]
            except Exception as error:
                reply = [False, [type(error).__name__, str(error)]]
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


class _Remote:
    """Proxy of an object in the code's process."""

    def __init__(self, number: int, ask: Callable[..., Any]) -> None:
        self._number, self._ask = number, ask

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", self, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._ask("call", self, positional, named)


def _test(scope: dict[str, Any], tests: str, link: int) -> None:
    """Run the tests, with proxies of what they use and `scope` does not have."""
    requests, replies = os.fdopen(link, "w"), os.fdopen(os.dup(link))
    sys.set_int_max_str_digits(0)

    def number(value: Any) -> int:
        if not isinstance(value, _Remote):
            raise TypeError(f"want plain values and the code's own objects as arguments; got a {type(value).__name__}")
        return value._number

    def ask(*request: Any) -> Any:
        line = ""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            requests.write(json.dumps([_encode(part, number) for part in request]) + "\n")
            requests.flush()
            line = replies.readline()
        if not line:
            raise EOFError("the code ended before its tests")
        well, answer = json.loads(line)
        if well:
            return _decode(answer, lambda number: _Remote(number, ask))
        name, text = answer
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise RuntimeError(f"{name}: {text}")

    own = scope.keys() | vars(builtins).keys()
    scope |= ask("names", *sorted(set(re.findall(r"\w+", tests)) - own))
    exec(compile(tests, "tests.py", "exec"), scope)


def _one(job: dict[str, Any], given: str, replies: int) -> list[Any]:
    """[true, output] or [false, reason] of one run, which does not get the descriptor `replies`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.close(replies)
            os.dup2(_nameless_file(given), 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdin = os.fdopen(0)
            _run(job, given, writing)
            code = 0
        except SystemExit as stop:  # as for a program of its own
            sys.stdout.flush()
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(writing, f"{type(error).__name__}: {error}".encode()[:500])
        finally:
            os._exit(code)
    os.close(writing)
    output = b""
    status: int | None = None
    while len(output) <= OUTPUT_LIMIT:
        if select.select([reading], [], [], 0 if status is not None else _LOOK_S)[0]:
            if not (data := os.read(reading, 1 << 16)):
                break
            output += data
        elif status is not None:  # a process that it left running still has the pipe
            break
        else:
            ended, found = os.waitpid(child, os.WNOHANG)
            status = found if ended else None
    os.close(reading)
    if len(output) > OUTPUT_LIMIT:
        return [False, "too much output"]
    if status is None:
        _, status = os.waitpid(child, 0)
    text = output.decode(errors="replace")
    if os.WIFSIGNALED(status):
        return [False, f"ended by {signal.Signals(os.WTERMSIG(status)).name}"]
    return [True, text] if os.WEXITSTATUS(status) == 0 else [False, text[-500:] or "it did not end well"]


def _nameless_file(text: str) -> int:
    """A descriptor that gives the text, from a file that no folder lists."""
    descriptor = os.open(_INPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(_INPUT)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _drive() -> None:
    job = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    for given in job["inputs"]:
        replies.write(json.dumps(_one(job, given, replies.fileno())) + "\n")
        replies.flush()


def _first_process(settings: dict[str, Any], user: int | None) -> int:
    """Start the driver, wait for all descendants, return the driver's status; sandbox.py kills those that stay."""
    if settings["own"]:
        _make_root(settings["root"], settings["read"])
        os.chdir("/program")
        _give_up_rights(user)
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")
    _refuse_uncounted_memory()
    _limit(settings)
    if (driver := os.fork()) == 0:
        _drive()
        os._exit(0)
    return _wait_for_all(driver)


def _wait_for_all(child: int) -> int:
    """Wait for all children, adopted ones too, and return the status of one."""
    status = 0
    with contextlib.suppress(ChildProcessError):  # none is left
        while ended := os.wait():
            status = ended[1] if ended[0] == child else status
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["packages"]
    user = _enter_namespaces() if settings["own"] else None
    # sandbox.py ends this process last: what was started while the others were being killed is still found below it.
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(_DUMPABLE, 0, 0, 0, 0), "prctl")  # no program looks into this process, or its forks
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _first_process(settings, user)
        except OSError as error:
            os.write(2, f"{error.strerror}\n".encode())
        finally:
            os._exit(status & 255)
    os._exit(_wait_for_all(child) & 255)  # not only for the child: killed first, it leaves orphans to this process


if __name__ == "__main__":
    main()
