"""The process of a `ProcessEngine`: python -m rlplus.rollout.worker PIPE PARENT (a file descriptor, a process id)."""

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from rlplus.errors import log_to_stderr
from rlplus.rollout.process import serve

CHECK_S = 1.0


def _end_with(parent: int) -> None:
    """A killed trainer leaves no engine behind, also one that is busy. (PR_SET_PDEATHSIG ends with a mere thread.)"""
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    log_to_stderr()
    serve(Connection(descriptor))
