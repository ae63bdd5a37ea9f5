"""Public test benchmarks, known by name: what chooses a checkpoint on one cannot report on it."""

from collections.abc import Sequence
from pathlib import Path

from rlplus.train.config import BENCHMARKS, ValidationConfig, is_test_benchmark
from rlplus.train.data import Example


def known_benchmarks(validation: ValidationConfig, problems: Sequence[Example]) -> list[str]:
    """The test benchmarks among the problems, by what their column, their files and the files' folders are called."""
    found = {*validation.benchmarks}
    found |= {problem.benchmark for problem in problems if is_test_benchmark(problem.benchmark)}
    paths = validation.data.paths if validation.data is not None else []
    found |= {name for name, entry in BENCHMARKS.items() if entry.source in paths}
    for path in map(Path, paths):
        names = [name for name in (path.stem, *path.parent.parts[-2:]) if is_test_benchmark(name)]
        split = f"{path.parent.name}/{path.stem}"  # gsm8k/test
        found |= {*names} or {name for name in [split] if is_test_benchmark(name)}
    return sorted(found)


def refusal(benchmarks: Sequence[str]) -> str:
    """The error when validation uses a test benchmark."""
    return (
        f"validation.data: want problems that are no test set; got {', '.join(benchmarks)}, by which the best "
        "checkpoint would be chosen. validation.allow_test_benchmarks=true does it all the same"
    )
