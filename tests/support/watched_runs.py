"""Folders of runs that are followed while they train, at a moment that the test chooses."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from local_http import running
from report_pages import RLPLUS, keep, kept, step_line

from rlplus.tools.watch import FollowedRun, View, WatchServer

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
NOW = 1_800_000_000.0


def run_at(folder: Path, steps: int, *, config: str = RLPLUS, **metrics: float) -> Path:
    """A run that has done so many steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    lines = (json.dumps(step_line(i) | metrics) + "\n" for i in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def says(folder: Path, written: float = NOW, **changes: Any) -> None:
    """Write its progress.json."""
    state = {
        "state": "running", "message": "", "written": written, "begun": NOW, "ranks": 1, "step": 8, "steps": 20,
        "share_done": 0.4, "seconds_left": 7200.0, "phase": "rollouts", "phase_seconds": 95.0, "quiet_seconds": 1.0,
        "done": 37, "total": 64, "unit": "responses", "tokens_per_second": 1240.0,
    }  # fmt: skip
    (folder / "progress.json").write_text(json.dumps(state | changes))


def keeps(folder: Path, step: int, text: str = HOSTILE) -> None:
    """Write a step's samples."""
    keep(folder / "samples", f"step-{step:06d}", kept(step=step, prompt=text, tokens=[text, "<e>"], response=text))


def killed_and_resumed(folder: Path, at: int, steps: int) -> None:
    """Leave what a resume at a step leaves, and then some steps more: lines and samples after it are done again."""
    other = run_at(folder.with_name(f"{folder.name}-again"), steps, **{"time/step": 3.0})
    (other / "metrics.jsonl").replace(folder / "metrics.jsonl")
    shutil.rmtree(other)
    for path in (folder / "samples").glob("*.parquet"):
        if int(path.stem.partition("-")[2]) > at:
            path.unlink()


class Clocks:
    """This process's clock and the calendar, for a `FollowedRun`."""

    def __init__(self) -> None:
        self.passed = 0.0

    @property
    def options(self) -> Mapping[str, Any]:
        return {"clock": lambda: 50.0 + self.passed, "today": lambda: NOW + self.passed}


@contextmanager
def served(*runs: FollowedRun) -> Iterator[WatchServer]:
    """A server on a free port."""
    with running(server := WatchServer(View(runs), 0)):
        yield server
