"""The results of a comparison as data: written as JSON, from which every table and figure follows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import ConfigDict

from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.tools.compare.config import Comparison
from rlplus.tools.report import RunData, load_run
from rlplus.tools.report.charts import DEMONSTRATIONS, DYNAMICS, NOISE, binned
from rlplus.train.evaluation.results import Evaluation, from_json

POINTS = 60  # points of a curve at most
# Reward, entropy, response length; p of demonstrated tokens; noise of a sampled backward pass.
CURVES = (*DYNAMICS[:3], DEMONSTRATIONS[0], NOISE)


@dataclass(frozen=True)
class Outcome:
    """One finished run.

    seconds: time of its steps and its evaluation. versions: the packages that it ran with, and its commit. results: one
    per test set. curves: (steps, values) of some metrics, thinned by means.
    """

    setting: str
    seed: int
    method: str
    rate: float
    steps: int
    generated_tokens: int
    seconds: float
    versions: str
    results: dict[str, Evaluation]
    curves: dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Results:
    """All finished runs of a comparison. rates: mean pass@1 by setting, method and learning rate, of the search.

    search_runs: steps and generated tokens of the same runs. provenance: date and hardware.
    """

    comparison: Comparison
    provenance: dict[str, str]
    rates: dict[str, dict[str, dict[str, float]]]
    search_runs: dict[str, dict[str, dict[str, tuple[int, int]]]]
    outcomes: list[Outcome]

    __pydantic_config__ = ConfigDict(extra="forbid")  # `load` refuses other keys

    def of(self, setting: str, method: str, seeds: range | None = None) -> dict[int, Outcome]:
        """The method's outcomes by seed."""
        return {
            one.seed: one
            for one in self.outcomes
            if (one.setting, one.method) == (setting, method) and (seeds is None or one.seed in seeds)
        }

    def save(self, path: Path) -> None:
        """Write as JSON, one line for each run."""
        parts = {
            "comparison": self.comparison.model_dump(mode="json"),
            "provenance": self.provenance,
            "rates": self.rates,
            "search_runs": self.search_runs,
        }
        head = "".join(f'"{key}": {json.dumps(value, ensure_ascii=False)},\n' for key, value in parts.items())
        lines = ",\n".join(json.dumps(asdict(one), ensure_ascii=False) for one in self.outcomes)
        write_text(path, f'{{{head}"outcomes": [\n{lines}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of `save`. ValueError if it holds something else."""
        if not path.is_file():
            what = "it is a folder" if path.is_dir() else f"no such file (current directory: {Path.cwd()})"
            raise ValueError(f"want results, as `rlplus compare` writes them; got {path}: {what}")
        return from_json(cls, read_text(path), f"want results, as `rlplus compare` writes them, in {path}")


def outcome_of(
    folder: Path, setting: str, seed: int, method: str, rate: float, evaluations: Mapping[str, Evaluation]
) -> Outcome:
    """The result of the run in a folder, without paths of this machine."""
    results = {name: replace(one, model="", asked={}) for name, one in evaluations.items()}
    seconds = sum(one.seconds for one in evaluations.values())
    if not (folder / "metrics.jsonl").is_file():  # the base model
        return Outcome(setting, seed, method, 0.0, 0, 0, seconds, "", results, {})
    data = load_run(folder)
    last = data.metrics[-1]
    return Outcome(
        setting,
        seed,
        method,
        rate=rate,
        steps=last["step"],
        generated_tokens=last["generated_tokens"],
        seconds=round(seconds + sum(step.get("time/step", 0.0) for step in data.metrics), 1),
        versions=_versions(data),
        results=results,
        curves={one.metric: _thinned(*data.curve(one.metric)) for one in CURVES if data.curve(one.metric)[0]},
    )


def _versions(data: RunData) -> str:
    """Packages with their versions, and the commit, of the run's last start."""
    if not data.starts:
        return ""
    start = data.starts[-1]
    packages = [f"{name} {version}" for name, version in start.get("versions", {}).items()]
    return ", ".join([*packages, *(f"commit {commit}" for commit in start.get("commits", {}).values())])


def _thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means over neighbours, at most POINTS of them, to four digits."""
    size = -(-len(steps) // POINTS)
    return binned(steps, size), [float(f"{value:.4g}") for value in binned(values, size)]
