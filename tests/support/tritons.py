"""Releases of Triton beside the installed one: those that supported releases of torch pin."""

import fcntl
import sys
from pathlib import Path

import processes
import pytest

PINNED = {  # tests/integrations/test_resolution.py asks the index for them
    "3.6.0": "torch 2.11.0",
    "3.7.0": "torch 2.12.0",
    "3.7.1": "torch 2.12.1 and 2.13.0",
}


def folder(version: str) -> Path:
    """Where that Triton can be imported from, alone; installed on first use. Skips the test where pip cannot get it."""
    target = Path(sys.prefix) / "tritons" / version
    target.parent.mkdir(exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not target.is_dir():
            partial = target.with_name(f"{version}-partial")
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--upgrade"]
            pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(partial), f"triton=={version}"]
            done = processes.run(pip)
            if done.returncode:
                pytest.skip(f"triton {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            partial.rename(target)
    return target
