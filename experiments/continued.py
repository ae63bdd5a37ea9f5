"""Goes on with a comparison of which only the results are left: `python -m experiments.continued COMPARISON RESULTS`.

For a comparison of many hours on machines that one has for a few: results.json is kept, and the next machine makes what
it lacks, in runs/compare/<name of the comparison>. Ctrl-C and SIGTERM end it with the results so far. Also for a
comparison with other methods in the same settings, which takes over those that it shares. The results say which
comparison they are of, and that is checked. Training configuration and version must be the same; they are not in the
results. Processors round differently, so that a base model made anew differs a little.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlplus.common.commands import terminated_as_exit
from rlplus.common.durable import claimed, locked
from rlplus.tools.cli import guarded
from rlplus.tools.compare.comparing import MARK, collect, made, provenance
from rlplus.tools.compare.config import BASE, Comparison, best_rate, load_comparison
from rlplus.tools.compare.launches import Run, Runner
from rlplus.tools.compare.outcomes import Outcome, Results


class Continued(Runner):
    """Makes what `known` lacks: reported runs, and a method's whole search in a setting."""

    def __init__(self, known: Results, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if other := differing(known.comparison, self.comparison):
            raise ValueError(f"want results that were made in the same way; their comparison differs in {other}")
        self.known = known
        self._outcomes = {(one.setting, one.method, one.seed): one for one in known.outcomes if self._keeps(one)}

    def results(self) -> Results:
        """The known runs that the comparison asks for and those finished since, in its order."""
        was, now = self.known.provenance, provenance()
        origin = {key: now[key] if was.get(key, now[key]) == now[key] else f"{was[key]}; {now[key]}" for key in now}
        lengths = {
            setting: {method: each for method, each in methods.items() if self._known_scores(setting, method)}
            for setting, methods in self.known.search_runs.items()
        }
        new = collect(self.comparison, self, origin, lengths)
        found = self._outcomes | {(one.setting, one.method, one.seed): one for one in new.outcomes}
        outcomes = [found[key] for run in self.all() if (key := (run.setting, run.method, run.seed)) in found]
        return replace(new, outcomes=outcomes)

    def _make_all(self, runs: Sequence[Run]) -> None:
        lacking = [run for run in runs if run.rate or (run.setting, run.method, run.seed) not in self._outcomes]
        super()._make_all([*dict.fromkeys(each for run in lacking for each in _from_the_first(run))])

    def _tries(self, setting: str, method: str, rates: Sequence[float]) -> list[Run]:
        return [] if self._known_scores(setting, method) else super()._tries(setting, method, rates)

    def _scores(self, setting: str, method: str, rates: Sequence[float]) -> dict[float, float]:
        return self._known_scores(setting, method) or super()._scores(setting, method, rates)

    def _known_scores(self, setting: str, method: str) -> dict[float, float]:
        """The scores of a search that has ended; empty otherwise."""
        found = self.known.rates.get(setting, {}).get(method, {})
        scores = {float(rate): score for rate, score in found.items()}
        search = self.comparison.search
        return scores if scores and search is not None and search.next_rate(scores) is None else {}

    def _keeps(self, one: Outcome) -> bool:
        """Whether a run of the results is one of this comparison: a method of it, at the rate that its search found."""
        if one.method == BASE or self.comparison.search is None:
            return True
        if one.method not in self.comparison.methods:
            return False
        chain = [self._searched(part) for part in self.comparison.chain(one.method)]
        scores = [self._known_scores(one.setting, part) for part in chain]
        return all(scores) and best_rate(scores[-1]) == one.rate


def differing(known: Comparison, wanted: Comparison) -> str:
    """The names of what both have and is not the same, but for the studies."""
    parts = [key for key in ("run", "overrides", "search") if getattr(known, key) != getattr(wanted, key)]
    for kind in ("settings", "methods"):
        was, now = getattr(known, kind), getattr(wanted, kind)
        parts += [f"{kind}.{name}" for name in was.keys() & now.keys() if was[name] != now[name]]
    return ", ".join(sorted(parts))


def _from_the_first(run: Run) -> list[Run]:
    """The run after those that it starts from, whose models are needed."""
    return [*(_from_the_first(run.before) if run.before else []), run]


def go_on(comparison: Path, known: Path, output: Path, **options: Any) -> Results:
    """Make what the results in `known` lack; write all, also when a run fails or a signal ends it."""
    found = load_comparison(comparison)
    runner = Continued(Results.load(known), found, comparison.parent / found.run, output, **options)
    runner.check()
    mark = claimed(output, MARK, "comparison") / MARK
    with terminated_as_exit(), locked(mark, f"another process makes runs in {output}"):
        return made(runner, runner.results, comparison.stem)


def main() -> int:
    """Go on, and say how many runs there are; -> the exit status, as of rlplus' commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("results", type=Path, help="results.json of an earlier machine")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default 1")
    given = parser.parse_args()
    output = Path("runs/compare") / given.comparison.stem

    def go() -> None:
        if given.jobs < 1:
            raise ValueError(f"want --jobs at least 1; got {given.jobs}")
        print(f"{len(go_on(given.comparison, given.results, output, jobs=given.jobs).outcomes)} runs, in {output}")

    return guarded("experiments.continued", go)


if __name__ == "__main__":
    raise SystemExit(main())
