"""A comparison that goes on from its results alone."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
from comparisons import FILE, calls, launcher_in, prepared, written

from experiments.continued import Continued, go_on
from rlplus.compare import BASE, Results, load_comparison, run_comparison
from rlplus.errors import RunFailed


def whole(folder: Path) -> Results:
    """Results of the comparison in one go. Its runs are gone; base models and data are there."""
    output = prepared(folder)
    run_comparison(folder / "compare.yaml", output, jobs=2, launcher=launcher_in(folder))
    (folder / "calls.txt").unlink()
    rmtree(output / "runs")
    return Results.load(output / "results.json")


def same(results: Results, other: Results) -> bool:
    """Whether the numbers are the same: those of time and place are not."""
    mine, others = (
        replace(each, provenance={}, outcomes=[replace(one, seconds=0.0, versions="") for one in each.outcomes])
        for each in (results, other)
    )
    return mine == others


def test_makes_what_the_results_lack_with_what_it_starts_from_and_ends_as_in_one_go(tmp_path: Path) -> None:
    want, output, known = whole(tmp_path), tmp_path / "out", tmp_path / "known.json"

    def left(results: Results) -> list[str]:
        """The calls of going on from these results, which ends like the comparison."""
        results.save(known)
        (tmp_path / "calls.txt").write_text("")
        got = go_on(tmp_path / "compare.yaml", known, output, jobs=2, launcher=launcher_in(tmp_path))
        assert same(got, want)
        assert same(Results.load(output / "results.json"), want)
        rmtree(output / "runs", ignore_errors=True)
        return sorted(calls(tmp_path))

    assert left(want) == []
    gone = [one for one in want.outcomes if (one.method, one.seed) not in (("SFT+GRPO", 1), (BASE, 0))]
    assert left(replace(want, outcomes=gone)) == ["eval"] * 3 + ["train"] * 2, "SFT's model of seed 1 is needed, too"
    searched = {"one": {name: rates for name, rates in want.rates["one"].items() if name != "SFT+GRPO"}}
    lengths = {"one": {name: want.search_runs["one"][name] for name in searched["one"]}}
    assert left(replace(want, rates=searched, search_runs=lengths)) == ["eval"] * 4 + ["train"] * 4, "SFT, three rates"
    assert left(replace(want, rates={}, search_runs={}, outcomes=[])) == ["eval"] * 19 + ["train"] * 17, "all of it"


def test_the_rates_of_the_results_are_those_of_the_new_runs(tmp_path: Path) -> None:
    want = whole(tmp_path)
    best = {"SFT": 0.01, "GRPO": 0.002, "SFT+GRPO": 0.004}
    rates = {"one": {name: {"0.0001": 0.1, "0.0003": 0.2, f"{rate}": 0.3} for name, rate in best.items()}}
    search_runs = {"one": {name: dict.fromkeys(each, (7, 70)) for name, each in rates["one"].items()}}
    known = tmp_path / "known.json"
    replace(want, rates=rates, search_runs=search_runs, outcomes=[]).save(known)
    got = go_on(tmp_path / "compare.yaml", known, tmp_path / "out", launcher=launcher_in(tmp_path))
    want_rates = best | {BASE: 0.0, "GRPO long": 0.002}
    assert {one.method: one.rate for one in got.outcomes} == want_rates


def test_what_is_finished_is_kept_when_a_run_fails(tmp_path: Path) -> None:
    want, known = whole(tmp_path), tmp_path / "known.json"
    gone = [one for one in want.outcomes if one.method != "GRPO long"]
    replace(want, outcomes=gone, provenance={"processor": "another"}).save(known)
    command = launcher_in(tmp_path)
    script = tmp_path / "command.py"
    script.write_text(f'import sys\nif "train.seed=1" in sys.argv:\n    sys.exit("no such luck")\n{script.read_text()}')
    with pytest.raises(RunFailed, match="no such luck"):
        go_on(tmp_path / "compare.yaml", known, tmp_path / "out", launcher=command)
    kept = Results.load(tmp_path / "out/results.json")
    assert {(one.method, one.seed) for one in kept.outcomes} == {
        (one.method, one.seed) for one in want.outcomes if (one.method, one.seed) != ("GRPO long", 1)
    }
    assert kept.provenance["processor"].startswith("another; ")


def test_results_of_another_comparison_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    other = json.loads(json.dumps(FILE))
    other["methods"]["GRPO"]["overrides"] = {"algorithm.objective.entropy_coef": 0.01}
    results = Results(load_comparison(written(tmp_path, other)), {}, {}, {}, [])
    with pytest.raises(ValueError, match="want the results of the same comparison; the file describes another one"):
        Continued(results, load_comparison(written(tmp_path, FILE)), path, tmp_path)
