"""Releases of packages that tests import alone, beside the installed ones."""

import fcntl
import sys
from pathlib import Path

import processes
import pytest


def folder(package: str, version: str) -> Path:
    """Where it can be imported from, without its requirements; installed on first use. Skips the test where pip cannot
    get it."""
    target = Path(sys.prefix) / "releases" / f"{package}-{version}"
    target.parent.mkdir(exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not target.is_dir():
            partial = target.with_name(f"{target.name}-partial")
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--upgrade"]
            pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(partial), f"{package}=={version}"]
            done = processes.run(pip)
            if done.returncode:
                pytest.skip(f"{package} {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            partial.rename(target)
    return target
