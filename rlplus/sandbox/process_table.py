"""The processes of this machine, from /proc."""

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple


class Process(NamedTuple):
    """A process: CPU time in clock ticks, its reaped children's included; state as in ps; memory in pages."""

    parent: int
    ticks: int
    state: str
    pages: int


def processes() -> dict[int, Process]:
    """All processes by id."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                used = sum(map(int, fields[11:15]))
                table[int(name)] = Process(int(fields[1]), used, fields[0].decode(), int(fields[21]))
    return table


def tree(root: int, table: Mapping[int, Process]) -> dict[int, Process]:
    """`root` and its descendants, of those in the table."""
    children: dict[int, list[int]] = {}
    for process, entry in table.items():
        children.setdefault(entry.parent, []).append(process)
    found = {}
    todo = [root]
    while todo:
        process = todo.pop()
        if process in table:
            found[process] = table[process]
        todo += children.get(process, [])
    return found


def cpu_seconds(root: int) -> float:
    """CPU time that `root` and its descendants have used, in seconds; 0 if there is no such process."""
    return sum(entry.ticks for entry in tree(root, processes()).values()) / os.sysconf("SC_CLK_TCK")


def runnable(process: int) -> bool:
    """Whether a thread of the process runs or waits for a processor or a disk."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return True
    return False
