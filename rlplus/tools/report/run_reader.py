"""A run's configuration, metrics, starts and kept samples, read back from its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplus.common.textfiles import read_text
from rlplus.common.yaml_text import parse_yaml
from rlplus.train.config import PROGRESS, SAMPLES, STARTS, check_run_folder, read_starts


@dataclass(frozen=True)
class RunData:
    """The text of a run's config.yaml, one object of metrics per step, and warnings for the readers.

    starts: those in run.json, the first one first; none where it is damaged or missing. samples: the folder of
    kept ones, which may be missing. end: the reason of an early one.
    """

    config: str
    metrics: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...] = ()
    starts: tuple[dict[str, Any], ...] = ()
    samples: Path | None = None
    end: str = ""

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and the metric, at the steps that have it."""
        steps = [step for step in self.metrics if metric in step]
        return [step["step"] for step in steps], [step[metric] for step in steps]

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted keys."""
        return dict(_flat("", parse_yaml(self.config, "config.yaml")))


def load_run(folder: Path) -> RunData:
    """Read the folder of a run. A last line of metrics without its end (a killed run) is left out and noted.

    ValueError if config.yaml or metrics.jsonl is missing, no step is complete, or a line is not an object of numbers
    with "step" and "generated_tokens".
    """
    check_run_folder(folder)
    config = read_text(folder / "config.yaml")
    settings = parse_yaml(config, folder / "config.yaml")
    lines = read_text(folder / "metrics.jsonl")
    complete, _, cut = lines.rpartition("\n")
    metrics = [
        step_of(line, f"{folder / 'metrics.jsonl'}, line {number}")
        for number, line in enumerate(complete.splitlines(), 1)
    ]
    if not metrics:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no complete step yet")
    warnings = []
    if cut:
        step = metrics[-1]["step"]
        warnings.append(f"The last line of metrics.jsonl was cut off after step {step}: the run was killed there.")
    if _chosen_on_tests(settings):
        warnings.append(
            "A test benchmark chose the best checkpoint (validation.allow_test_benchmarks): its results on it are "
            "no estimate for new problems."
        )
    starts: list[dict[str, Any]] = []
    try:
        starts = read_starts(folder / STARTS)
    except ValueError as error:  # the provenance is lost, not the numbers
        warnings.append(str(error))
    return RunData(config, tuple(metrics), tuple(warnings), tuple(starts), folder / SAMPLES, _early_end(folder))


def _early_end(folder: Path) -> str:
    """The message of a run that finished before its last step; empty for others, and without progress.json."""
    try:
        now = json.loads(read_text(folder / PROGRESS))
        return str(now["message"]) if now["state"] == "finished" else ""
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: only this sentence depends on it
        return ""


def step_of(line: str, place: str) -> dict[str, Any]:
    """The metrics in a line; ValueError, with its place, for anything but an object of numbers of a step."""
    try:
        step: dict[str, Any] = json.loads(line)
        if not {"step", "generated_tokens"} <= step.keys():
            raise ValueError(f"got the keys {sorted(step)}")
        if wrong := [key for key, value in step.items() if not isinstance(value, int | float)]:
            raise ValueError(f"got {wrong[0]} {str(step[wrong[0]])[:80]!r}")
    except (ValueError, AttributeError, RecursionError) as error:
        wanted = 'want a JSON object of numbers with "step" and "generated_tokens"'
        got = f"got {line[:80]!r}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place}: {wanted}; {got}") from error
    return step


def _chosen_on_tests(settings: Any) -> bool:
    """Whether a run with this configuration lets a test benchmark choose its best checkpoint."""
    try:
        validation = settings["validation"]
        return bool(validation["every"] and validation["allow_test_benchmarks"])
    except (KeyError, TypeError):  # older, or not as a run wrote it
        return False


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [entry for key, inner in value.items() for entry in _flat(f"{prefix}.{key}".lstrip("."), inner)]
