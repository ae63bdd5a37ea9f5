"""The runs of a comparison, or runs that exist, and the page of their results."""

import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rlplus.common.commands import terminated_as_exit
from rlplus.common.durable import claimed, locked, write_text
from rlplus.common.terminal import Terminal
from rlplus.tools.compare.config import BASE, Comparison, load_comparison, owned
from rlplus.tools.compare.launches import Run, Runner
from rlplus.tools.compare.outcomes import Results, outcome_of
from rlplus.tools.compare.page import page_of, terminal_tables
from rlplus.tools.compare.past_runs import results_of
from rlplus.tools.report import load_run
from rlplus.train.trainer import processor_name

Lengths = Mapping[str, Mapping[str, dict[str, tuple[int, int]]]]
MARK = ".rlplus-compare"  # only a folder with this file is written to again


def run_comparison(
    path: Path,
    output: Path,
    *,
    presets: Sequence[str] = (),
    seeds: int | None = None,
    settings: Sequence[str] = (),
    first_seed: int | None = None,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    launcher: str | None = None,
    only_report: bool = False,
) -> Path:
    """Make the runs of a comparison that are not finished yet, print its tables, and return the path of its page.

    path: the comparison, or a training configuration, with `presets` as its methods; see `load_comparison`. output/
    receives the runs, results.json and index.html. jobs: runs at a time. launcher: the beginning of the commands, in
    place of "python -m". only_report: from what is finished.
    ValueError for an invalid comparison, before anything starts; RunFailed if a run fails. Finished runs stay, so
    that the same command goes on.
    """
    comparison = load_comparison(path, presets, seeds, settings, first_seed)
    if wrong := owned([override.partition("=")[0] for override in overrides], comparison):
        raise ValueError(f"{', '.join(wrong)}: the comparison gives each run its own, want no override")
    if only_report and not (output.expanduser() / MARK).is_file():
        raise ValueError(f"want the folder of a comparison with --report; {output} is none")
    folder = claimed(output.expanduser(), MARK, "comparison")
    console = Terminal(stderr=True)
    config = path.parent / comparison.run
    given = {} if launcher is None else {"launcher": launcher_words(launcher)}
    runner = Runner(comparison, config, folder, overrides=overrides, jobs=jobs, say=console.print, **given)
    if only_report:
        if not runner.finished():
            raise ValueError(f"want finished runs to report on; there are none in {folder}: leave out --report")
        results = _write(collect(comparison, runner, provenance()), folder, path.stem)
    else:
        runner.check()
        refusal = f"another rlplus compare makes runs in {folder}: wait for its end, or choose another --output"
        with terminated_as_exit(), locked(folder / MARK, refusal):
            results = made(runner, lambda: collect(comparison, runner, provenance()), path.stem)
    return _show(results, folder)


def launcher_words(launcher: str) -> list[str]:
    """The words of a command as a shell reads them; ValueError for none, and for quotes that are not closed."""
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise ValueError(f"want --launcher as a shell reads it; got {launcher!r}: {error}") from error
    if not words:
        raise ValueError(f'want --launcher a command, such as "torchrun --nproc_per_node 8 -m"; got {launcher!r}')
    return words


def made(runner: Runner, collected: Callable[[], Results], title: str) -> Results:
    """The results of all runs, which are made, and written however that ends."""
    try:
        runner.make()
    except BaseException:
        with suppress(Exception):  # the first error is the one to show
            _write(collected(), runner.folder, title)
        raise
    return _write(collected(), runner.folder, title)


def compare_past_runs(arguments: Sequence[str], output: Path, reference: str | None = None) -> Path:
    """Compare runs that exist, see `past_runs.results_of`; print the tables, and return the path of the page.

    arguments: folders of runs, or NAME=FOLDER. output/ receives results.json and index.html.
    """
    results = results_of(arguments, reference, provenance())
    folder = claimed(output.expanduser(), MARK, "comparison")
    page = _show(_write(results, folder, folder.resolve().name), folder)
    Terminal(stderr=True).print(f"The methods differ in: {results.provenance['methods differ in']}")
    return page


def collect(comparison: Comparison, runner: Runner, origin: Mapping[str, str], known: Lengths | None = None) -> Results:
    """The results of the finished runs. origin: their provenance. known: `search_runs` that have no folders here."""
    outcomes = []
    for run, evaluations in runner.finished().items():
        rate = 0.0 if run.method == BASE else runner.config_of(run).train.lr
        outcomes.append(outcome_of(runner.path(run), run.setting, run.seed, run.method, rate, evaluations))
    search_runs = {
        setting: {
            name: ((known or {}).get(setting, {}).get(name))
            or {rate: _length(runner, setting, name, rate) for rate in rates}
            for name, rates in each.items()
        }
        for setting, each in runner.searched.items()
    }
    return Results(comparison, dict(origin), runner.searched, search_runs, outcomes)


def _length(runner: Runner, setting: str, method: str, rate: str) -> tuple[int, int]:
    """Steps and generated tokens of a run of the search, on its first seed."""
    assert runner.comparison.search is not None
    run = Run(setting, runner.comparison.search.seed, method, float(rate))
    last = load_run(runner.path(run)).metrics[-1]
    return last["step"], last["generated_tokens"]


def _write(results: Results, folder: Path, title: str) -> Results:
    """Write results.json and index.html."""
    results.save(folder / "results.json")
    write_text(folder / "index.html", page_of(results, title))
    return results


def _show(results: Results, folder: Path) -> Path:
    """Print the tables and the path of the page, which is returned."""
    Terminal().print(*terminal_tables(results))
    page = folder / "index.html"
    Terminal(stderr=True).print(f"Page: {page}, data: {folder / 'results.json'}")
    return page


def provenance() -> dict[str, str]:
    """Date and hardware."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
    }
