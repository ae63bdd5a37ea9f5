"""The process of a `ProcessEngine`: python -m rlplus.train.rollout.engine_worker PIPE PARENT, numbers of both."""

import faulthandler
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from rlplus.common.errors import log_to_stderr
from rlplus.train.rollout.process_engine import STACKS_SIGNAL, serve

if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:])
    faulthandler.register(STACKS_SIGNAL)
    keeper = Path(__file__).with_name("keeper.py")
    subprocess.Popen([sys.executable, "-I", "-S", str(keeper), str(parent), str(os.getpid())])
    if os.getppid() == parent:  # else the trainer ended before the keeper could know its number
        log_to_stderr()
        serve(Connection(descriptor))
