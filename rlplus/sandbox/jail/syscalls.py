"""System calls that a program is refused, with the reasons, and the filter (seccomp) that refuses them.

Up to `NEWEST` it is a list of refusals, not of permissions: which calls an ordinary Python needs changes with its
version, the C library and the packages. Calls that are newer than the list do not exist for a program: the C library
has another way for each. `REFUSED` has the numbers on x86-64 and aarch64; calls above 423 have one number.
"""

import ctypes
import errno
import struct

from .linux import check, libc, machine

_REASONS: dict[str, dict[str, tuple[int, int]]] = {
    "memory of no process, which no limit counts": {
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "shmget": (29, 194),
        "msgget": (68, 186),
        "semget": (64, 190),
        "mq_open": (240, 180),
        "setxattr": (188, 5),  # extended attributes of files in memory
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "setxattrat": (463, 463),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "removexattrat": (466, 466),
    },
    "keys are in no namespace: the user's and those of other programs": {
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
    },
    "other namespaces and mounts: rights in them, and files in memory that no limit counts": {
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "open_tree_attr": (467, 467),
    },
    "files by number, past the root directory": {
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
    },
    "other processes' memory and descriptors": {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "process_madvise": (440, 440),
        "pidfd_getfd": (438, 438),
        "kcmp": (312, 272),
    },
    "calls without system calls: a filter does not see them": {
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
    },
    "a table of the whole machine's, which one program can fill for all users": {
        "io_setup": (206, 0),  # fs.aio-max-nr
    },
    "much kernel code that no graded program needs, in which holes were found again and again": {
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),  # also stops the kernel at a chosen place
        "fanotify_init": (300, 262),
        "lookup_dcookie": (212, 18),
        "personality": (135, 92),  # also addresses that are not random
    },
    "the whole machine; rights refuse these, too": {
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "reboot": (169, 142),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "acct": (163, 89),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "syslog": (103, 116),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "vhangup": (153, 58),
    },
}
_ONLY_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154}  # the processor's ports and tables
REFUSED: tuple[dict[str, int], ...] = tuple(
    {name: numbers[index] for calls in _REASONS.values() for name, numbers in calls.items()} | extra
    for index, extra in enumerate((_ONLY_X86, {}))
)
NEWEST = 467  # the last call that was looked at; Linux 6.15
# Calls whose arguments decide. clone3 has its flags in memory, which no filter reads: without it the C library takes
# clone. Of sockets only these families belong to a network namespace, or are needed to ask for addresses.
_CLONE = (56, 220)
_CLONE3 = 435
_MMAP = (9, 222)
_SOCKETS = ((41, 53), (198, 199))
_NEW_NAMESPACES = 0x7E020000
_SHARED_ANONYMOUS = 0x21
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_ARCHITECTURES = (0xC000003E, 0xC00000B7)  # linux/audit.h
_X32 = 0x40000000  # first number of another ABI of x86-64
# These are from linux/seccomp.h.
ALLOW = 0x7FFF0000
KILL = 0x80000000
_ERROR = 0x50000
REFUSE = _ERROR | errno.EPERM
MISSING = _ERROR | errno.ENOSYS
_SET_SECCOMP = 22
_FILTER = 2
# These are from linux/bpf_common.h.
_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_OF = 0x45
_RETURN = 0x06
# Offsets in struct seccomp_data.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16

Line = tuple[int, int, int, int]  # struct sock_filter: code, steps if true, steps if false, value


def _load(place: int) -> Line:
    return (_LOAD, 0, 0, place)


def _end(verdict: int) -> Line:
    return (_RETURN, 0, 0, verdict)


def _if(code: int, value: int, then: list[Line]) -> list[Line]:
    """`then` if what is loaded passes the comparison, else what follows."""
    return [(code, 0, len(then), value), *then]


def _unless(code: int, value: int, then: list[Line]) -> list[Line]:
    return [(code, len(then), 0, value), *then]


def filter_program(index: int) -> list[Line]:
    """The filter of the machine with that index in linux.MACHINES. It kills callers of other machines' calls."""
    clone = [_load(_ARGUMENTS), *_if(_ANY_OF, _NEW_NAMESPACES, [_end(REFUSE)]), _end(ALLOW)]
    mmap = [_load(_ARGUMENTS + 3 * 8), (_AND, 0, 0, _SHARED_ANONYMOUS)]
    mmap += [*_if(_EQUAL, _SHARED_ANONYMOUS, [_end(REFUSE)]), _end(ALLOW)]
    families = [line for family in _FAMILIES for line in _if(_EQUAL, family, [_end(ALLOW)])]
    sockets = [_load(_ARGUMENTS), *families, _end(REFUSE)]
    return [
        _load(_ARCHITECTURE),
        *_unless(_EQUAL, _ARCHITECTURES[index], [_end(KILL)]),
        _load(_NUMBER),
        *_if(_AT_LEAST, _X32, [_end(KILL)]),
        *_if(_AT_LEAST, NEWEST + 1, [_end(MISSING)]),
        *(line for number in REFUSED[index].values() for line in _if(_EQUAL, number, [_end(REFUSE)])),
        *_if(_EQUAL, _CLONE3, [_end(MISSING)]),
        *_if(_EQUAL, _CLONE[index], clone),
        *_if(_EQUAL, _MMAP[index], mmap),
        *(line for number in _SOCKETS[index] for line in _if(_EQUAL, number, sockets)),
        _end(ALLOW),
    ]


def install_filter() -> None:
    """The filter, for this process and all that it starts. Wants PR_SET_NO_NEW_PRIVS."""
    lines = filter_program(machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    check(libc.prctl(_SET_SECCOMP, _FILTER, header, 0, 0), "seccomp")
