"""`rlplus compare`: several methods from the same base model, over seeds, in one table."""

import os
import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlplus.compare.config import BASE, Comparison, load_comparison
from rlplus.compare.page import terminal_tables, write_page
from rlplus.compare.results import Outcome, Results, collect
from rlplus.compare.runs import Runner
from rlplus.terminal import Terminal
from rlplus.trainer import commits, processor_name

__all__ = ["BASE", "MARK", "Comparison", "Outcome", "Results", "Runner", "load_comparison", "run_comparison"]

MARK = ".rlplus-compare"  # only a folder with this file is written to again


def run_comparison(
    path: Path,
    output: Path,
    *,
    presets: Sequence[str] = (),
    seeds: int | None = None,
    settings: Sequence[str] = (),
    overrides: Sequence[str] = (),
    jobs: int = 1,
    launcher: str | None = None,
    only_report: bool = False,
) -> Path:
    """Make the runs of a comparison that are not finished yet, print its tables, and return the path of its page.

    path: the comparison, or a training configuration, with `presets` as its methods; see `load_comparison`. output/
    receives the runs, results.json and index.html. jobs: runs at a time. launcher: the beginning of the commands, in
    place of "python -m". only_report: from what is finished.
    ValueError for a comparison that is none, before anything starts; RunFailed if a run fails. What is finished stays,
    so that the same command goes on.
    """
    comparison = load_comparison(path, presets, seeds, settings)
    folder = _claim(output.expanduser())
    console = Terminal(stderr=True)
    config = path.parent / comparison.run
    runner = Runner(
        comparison, config, folder, overrides=overrides, jobs=jobs, launcher=launcher, say=console.print
    )  # fmt: skip
    try:
        if not only_report:
            with _terminated_as_exit():
                runner.make()
    finally:
        results = collect(comparison, runner, _provenance())
        results.save(folder / "results.json")
        page = folder / "index.html"
        write_page(page, results, comparison, title=path.stem)
    Terminal().print(*terminal_tables(results, comparison))
    console.print(f"Page: {page}, data: {folder / 'results.json'}")
    return page


def _claim(folder: Path) -> Path:
    """The folder, created if needed. An earlier comparison's files may be replaced, others may not."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"want a folder as output; got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MARK).exists() and any(folder.iterdir()):
        raise ValueError(f"want an empty folder, or an earlier comparison's, as output; got {folder}, which is neither")
    (folder / MARK).touch()
    return folder


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM end the comparison like an exception, so that the running commands are ended too."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _provenance() -> dict[str, str]:
    installed = {distribution.name: distribution.version for distribution in distributions()}
    packages = [name for name in ("rlplus", "torch", "transformers", "deepspeed", "vllm") if name in installed]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": ", ".join(f"{name} {installed[name]}" for name in packages),
        "commits": ", ".join(f"{place} {commit}" for place, commit in commits().items()),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
    }
