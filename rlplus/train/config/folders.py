"""Folders that a run or an evaluation wrote: what they hold, and whether a report can read them."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rlplus.common.textfiles import read_text

SAMPLES = "samples"  # the folder, in output_dir
RESULTS = "evaluation"  # how the files of results and samples of an evaluation begin
DATA_SUFFIXES = (".jsonl", ".parquet")
RUN = ("config.yaml", "metrics.jsonl")  # a run's files

STARTS = "run.json"  # provenance of the run
PROGRESS = "progress.json"  # the run's present activity
_FACTS = ("versions", "commits", "hardware")  # a start's tables

_DEPTH = 3  # a comparison's runs lie two below it
_NAMED = 6


def is_run(folder: Path) -> bool:
    """Whether training wrote to the folder; `rlplus eval` alone leaves results and samples only."""
    return any((folder / name).is_file() for name in RUN)


def check_report_folder(folder: Path) -> None:
    """ValueError unless a page can be made of the folder: it is a complete run's or has results."""
    _check_known(folder)
    if _has(folder, f"{RESULTS}-*.json") and not is_run(folder):
        return
    if not is_run(folder):
        raise ValueError(
            f"want results of an evaluation, {RESULTS}-BENCHMARK.json; {folder} has samples only: run the same "
            "`rlplus eval` again to finish it, or read them with `rlplus samples`"
        )
    check_run_folder(folder)


def check_run_folder(folder: Path) -> None:
    """ValueError unless the folder has the files of a run that has done a step."""
    for name in RUN:
        if not (folder / name).is_file():
            later = ", which the first step writes" if name == "metrics.jsonl" else ""
            raise ValueError(f"want the folder of a run, with {' and '.join(RUN)}; {folder} has no {name}{later}")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a run's run.json, the first one first; ValueError for a damaged file, or none."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the run's dates, commands and versions are unknown")
    try:
        starts = [dict(start) for start in json.loads(read_text(path))["starts"]]
        return [start | {key: dict(start.get(key, {})) for key in _FACTS} for start in starts]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: want the starts of a run; {error!r}") from error


def check_samples_folder(folder: Path, *, of_step: bool) -> None:
    """ValueError unless the folder has kept samples; of_step: a step's samples."""
    _check_known(folder)
    if not _has(folder / SAMPLES, "*.parquet"):
        why = "log.samples_every says how often: 0 is never" if is_run(folder) else "`rlplus eval` keeps them"
        raise ValueError(f"want samples that were kept; {folder / SAMPLES} has none ({why})")
    if of_step and not _has(folder / SAMPLES, "step-*.parquet"):
        raise ValueError(
            f"want --step for a run that kept samples of its steps; {folder / SAMPLES} has only an evaluation's, "
            "which is printed without --step"
        )


def _check_known(folder: Path) -> None:
    """ValueError for no folder, or one that neither a run nor an evaluation wrote, with those below it."""
    wanted = "want the folder of a run or of an evaluation"
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else f"no such folder (current directory: {Path.cwd()})"
        raise ValueError(f"{wanted}; got {folder}: {what}")
    if not _is_known(folder):
        below = list(islice(_below(folder), _NAMED + 1))
        listed = ", ".join(map(str, below[:_NAMED])) + (", …" if len(below) > _NAMED else "")
        hint = f"below it are {listed}" if below else "nor is there one below it"
        if (comparison := folder / "results.json").is_file():
            hint += f"; `rlplus report {comparison}` is for a comparison"
        raise ValueError(f"{wanted}; {folder} has no {', no '.join(RUN)} and no {RESULTS}-BENCHMARK.json; {hint}")


def _is_known(folder: Path) -> bool:
    return is_run(folder) or _has(folder, f"{RESULTS}-*.json") or _has(folder / SAMPLES, "*.parquet")


def _below(folder: Path) -> Iterator[Path]:
    for depth in range(1, _DEPTH + 1):
        paths = sorted(path for path in folder.glob("/".join("*" * depth)) if path.is_dir())
        yield from (path for path in paths if _is_known(path))


def _has(folder: Path, pattern: str) -> bool:
    return any(folder.glob(pattern))
