"""A file with the samples of an unfinished evaluation, so that a killed one resumes where it stopped."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRecord:
    """One graded sample of an evaluation.

    problem: the number of the problem's first row. sample: the index among the problem's samples. prompt: token ids.
    response: the text that was graded; tokens: its length, the end token included. reward: NaN if the grader failed.
    status and detail: see rlplus.reward.Score.
    """

    benchmark: str
    problem: int
    sample: int
    prompt: Sequence[int]
    answer: str
    response: str
    tokens: int
    truncated: bool
    reward: float
    status: str
    detail: str


@dataclass(frozen=True)
class Call:
    """The samples of the problems [start, stop) of a benchmark, from one call of the engine. seconds: its duration."""

    benchmark: str
    start: int
    stop: int
    seconds: float
    samples: list[SampleRecord]


class Kept:
    """The finished calls, one JSON line each, after a first line that identifies the evaluation.

    identity: a hash of everything that determines the samples; the file of another evaluation is overwritten, with a
    warning. path None: nothing is kept.
    """

    def __init__(self, path: Path | None, identity: str = "") -> None:
        self._path = path
        self._places: dict[tuple[str, int, int], int] = {}
        if path is None:
            return
        end = self._read_places(path, identity) if path.is_file() else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(end)  # a line that was cut off with the process
            if not end:
                file.write(json.dumps({"identity": identity}).encode() + b"\n")

    def _read_places(self, path: Path, identity: str) -> int:
        """Store the place of each line; returns the end of the last whole one, 0 for another evaluation's file."""
        with path.open("rb") as file:
            first = file.readline()
            if first != json.dumps({"identity": identity}).encode() + b"\n":
                logger.warning("%s is of another model, data or settings: the evaluation starts anew", path)
                return 0
            end = file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    break
                call = json.loads(line)
                self._places[call["benchmark"], call["start"], call["stop"]] = end
                end += len(line)
        if self._places:
            logger.info("resuming with the %d calls in %s", len(self._places), path)
        return end

    def read(self, benchmark: str, start: int, stop: int) -> Call | None:
        """The call if it is in the file, else None."""
        place = self._places.get((benchmark, start, stop))
        if self._path is None or place is None:
            return None
        with self._path.open("rb") as file:
            file.seek(place)
            values = json.loads(file.readline())
        return Call(**values | {"samples": [SampleRecord(**sample) for sample in values["samples"]]})

    def write(self, call: Call) -> None:
        """Append the call; it is on the disk when this returns."""
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                self._places[call.benchmark, call.start, call.stop] = file.tell()
                file.write(json.dumps(asdict(call)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"could not write {self._path}: {error.strerror or error}") from error
