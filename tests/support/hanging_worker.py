"""An engine's process, with a child, that hangs as soon as HANG/now exists, holding the interpreter's lock."""

import ctypes
import os
import runpy
import subprocess
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ["HANG"])


def hold_the_lock() -> None:
    while not (FOLDER / "now").exists():
        time.sleep(0.01)
    (FOLDER / "hangs").touch()
    while True:  # a signal ends it early
        ctypes.PyDLL(None).sleep(3600)


if __name__ == "__main__":
    child = subprocess.Popen(["sleep", "3600"])
    (FOLDER / "child").write_text(str(child.pid))
    threading.Thread(target=hold_the_lock, daemon=True).start()
    runpy.run_module("rlplus.train.rollout.engine_worker", run_name="__main__")
