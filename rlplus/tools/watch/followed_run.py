"""A run that is followed: what is in its folder now, read again where it has changed. Nothing is written there."""

import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlplus.tools.report import RunData
from rlplus.tools.report.run_reader import step_of
from rlplus.tools.report.shaded_samples import Moment, moment_of, step_files
from rlplus.train.config import PROGRESS, SAMPLES

RUN_FILES = (PROGRESS, "config.yaml", "metrics.jsonl")
SILENT_S = 60.0  # a run writes progress.json every 2 s: after such a time without a new one it is gone
MOMENTS = 6  # steps with samples that are shown, the newest ones


def check_watched(folder: Path) -> None:
    """ValueError unless a run has begun in the folder."""
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else f"no such folder (current directory: {Path.cwd()})"
        raise ValueError(f"want the folder of a run, its output_dir; got {folder}: {what}")
    if not any((folder / name).is_file() for name in RUN_FILES):
        below = next((path.parent for name in RUN_FILES for path in sorted(folder.glob(f"*/{name}"))), None)
        hint = "" if below is None else f"; below it is {below}"
        raise ValueError(f"want the folder of a run; {folder} has no {', no '.join(RUN_FILES)}{hint}")


def read_steps(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The complete lines of a file of metrics, and what is wrong with the last one that is damaged."""
    steps: list[dict[str, Any]] = []
    problem = ""
    complete, _, _ = _text(path).rpartition("\n")  # a line that is being written may follow
    for number, line in enumerate(complete.split("\n") if complete else (), 1):
        try:
            steps.append(step_of(line, f"{path}, line {number}"))
        except ValueError as error:
            problem = f"A line of the metrics is left out: {error}"
    return steps, problem


@dataclass(frozen=True)
class Life:
    """The contents of progress.json, and `since`: seconds since it was last written.

    state: "running", "finished", "stopped" or "failed" as the run wrote it; "gone" if it stopped writing; "unknown"
    without the file, which earlier versions did not write.
    """

    state: str
    since: float = 0.0
    now: dict[str, Any] | None = None


class FollowedRun:
    """A run by its label. `update` reads its folder; `changed` counts the updates that found new metrics.

    clock, today: of this process and of the calendar.
    """

    def __init__(
        self,
        label: str,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], float] = time.time,
    ) -> None:
        self.label = label
        self.folder = folder
        self._clock = clock
        self._today = today
        self._versions: tuple[Any, Any] = (None, None)  # files of configuration and metrics, as last read
        self._problem = ""
        self._samples: dict[Path, tuple[Any, Moment | None, list[str]]] = {}
        self._seen: tuple[Any, float] | None = None  # the last version of progress.json, and when it was first seen
        self.data = RunData("", ())
        self.settings: dict[str, Any] = {}
        self.life = Life("unknown")
        self.moments: list[Moment] = []
        self.problems: list[str] = []
        self.changed = 0

    def update(self) -> None:
        versions = _version(self.folder / "config.yaml"), _version(self.folder / "metrics.jsonl")
        if versions != self._versions:
            self._versions = versions
            self.changed += 1
            self._read_metrics()
        self.life = self._read_life()
        self._read_samples()
        damaged = [f"These samples are left out: {what}" for _, _, found in self._samples.values() for what in found]
        self.problems = [text for text in (self._problem, *damaged) if text]

    def _read_metrics(self) -> None:
        try:
            config = _text(self.folder / "config.yaml")
            self.settings = RunData(config, ()).settings
        except (OSError, ValueError):  # its values are for warnings only
            config = ""
            self.settings = {}
        steps: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):  # before the first step
            steps, self._problem = read_steps(self.folder / "metrics.jsonl")
        self.data = RunData(config, tuple(steps), samples=self.folder / SAMPLES)

    def _read_life(self) -> Life:
        try:
            now = json.loads(_text(self.folder / PROGRESS))
            written = float(now["written"])
            state = str(now["state"])
        except (OSError, ValueError, KeyError, TypeError):
            return Life("unknown")
        clock = self._clock()
        age = max(0.0, self._today() - written)
        if self._seen is None:
            self._seen = written, clock - age
        elif written != self._seen[0]:  # it lives, whatever the clock of its machine says
            self._seen = written, clock
        since = clock - self._seen[1]
        if state == "running" and since > SILENT_S:
            state = "gone"
        return Life(state, since, now)

    def _read_samples(self) -> None:
        files = list(step_files(self.folder / SAMPLES).items())[-MOMENTS:]
        before = self._samples
        self._samples = {}
        for path, step in files:
            if (version := _version(path)) is None:  # dropped by a resume just now
                continue
            known = before.get(path)
            if known is None or known[0] != version:
                damaged: list[str] = []
                known = version, moment_of(path, step, damaged), damaged
            self._samples[path] = known
        self.moments = [moment for _, moment, _ in self._samples.values() if moment is not None]

    @property
    def samples_version(self) -> str:
        """A text that changes with the samples that are shown."""
        return str([(path.name, version) for path, (version, _, _) in self._samples.items()])


def opened(path: Path) -> IO[bytes]:
    """The file; OSError where it is none, such as a pipe, which blocks its reader until a writer comes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"want a file; {path} is none")
    return open(descriptor, "rb")


def _text(path: Path) -> str:
    with opened(path) as file:
        return file.read().decode(errors="replace")


def _version(path: Path) -> tuple[int, int, int] | None:
    """A file's inode, size and time; None without the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
