"""Ends an engine's process group with the first of two processes: keeper.py TRAINER ENGINE (process ids).

A process of its own, in that group: it also ends an engine that is stopped or that keeps the interpreter's lock, and
the engine's children. It watches processes, so the thread that started the engine may end (PR_SET_PDEATHSIG would take
that for the trainer's end). Runs as a script: it imports nothing that takes time or memory.
"""

import os
import select
import signal
import sys


def keep(processes: list[int]) -> None:
    """Return when the first of the processes ends."""
    try:
        select.select([os.pidfd_open(process) for process in processes], [], [])
    except ProcessLookupError:  # it has ended already
        return


if __name__ == "__main__":
    keep([int(process) for process in sys.argv[1:]])
    os.killpg(0, signal.SIGKILL)
