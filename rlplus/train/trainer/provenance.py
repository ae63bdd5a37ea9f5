"""The provenance of a run: date, command, versions, commits and hardware of each of its starts, in run.json."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.train.config import read_starts

GIT_PATIENCE_S = 10
PACKAGE = Path(__file__).parents[2]


def note_start(path: Path, step: int, surroundings: Mapping[str, str], devices: Sequence[str]) -> list[str]:
    """Add a start of the run to its run.json; at step 0 it is the first. Returns notes for the user.

    surroundings: the versions and hashes that a resume compares. devices: the name of each rank's device. A damaged
    file is moved aside, since nothing of the run depends on it.
    """
    starts = []
    notes = []
    if step and path.is_file():
        try:
            starts = read_starts(path)
        except ValueError as error:
            aside = path.with_name(f"{path.stem}.damaged{path.suffix}")
            path.replace(aside)
            lost = "dates, commands and versions of the starts before this one are lost"
            notes.append(f"{error}. It is now {aside.name}: {lost}, which changes nothing else")
    starts.append(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
            "versions": dict(surroundings) | {"python": platform.python_version()},
            "commits": commits(),
            "hardware": {
                "ranks": ", ".join(f"{count} × {name}" for name, count in Counter(devices).items()),
                "processor": processor_name(),
                "cores": len(os.sched_getaffinity(0)),
                "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
            },
        }
    )
    write_text(path, json.dumps({"starts": starts}, indent=1, ensure_ascii=False) + "\n")
    return notes


def device_name() -> str:
    """This process's GPU; without one, its processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def commits() -> dict[str, str]:
    """The git commits of the current directory and of this package's source, where git has them under control."""
    found = {"current directory": _commit(Path.cwd())}
    if _git(PACKAGE, "ls-files", "--error-unmatch", "__init__.py") is not None:  # else it is installed in a repository
        found["rlplus"] = _commit(PACKAGE)
    return {place: commit for place, commit in found.items() if commit}


def _commit(folder: Path) -> str | None:
    """The commit that is checked out; "-dirty" behind it where files differ from it."""
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of git; None where it fails or is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor_name() -> str:
    """This machine's processor."""
    try:
        lines = read_text(Path("/proc/cpuinfo")).splitlines()
    except (OSError, ValueError):
        lines = []
    names: list[Any] = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
