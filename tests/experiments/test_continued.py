"""A comparison that goes on from its results alone."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from comparisons import EXPERIMENTS, FILE, calls, launcher_in, prepared, written

from experiments.continued import Continued, differing, go_on
from rlplus.common.errors import RunFailed
from rlplus.tools.compare.comparing import run_comparison
from rlplus.tools.compare.config import BASE, load_comparison
from rlplus.tools.compare.outcomes import Results


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison in one go. Its runs are gone; results, base models and data are there."""
    folder = tmp_path_factory.mktemp("finished")
    output = prepared(folder)
    run_comparison(folder / "compare.yaml", output, jobs=2, launcher=launcher_in(folder))
    rmtree(output / "runs")
    return folder


@pytest.fixture
def want(finished: Path, tmp_path: Path) -> Results:
    """Its results; the test's folder is a copy of its own."""
    copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "calls.txt").unlink()
    return Results.load(tmp_path / "out/results.json")


def same(results: Results, other: Results) -> bool:
    """Whether the numbers are the same: those of time and place are not."""
    mine, others = (
        replace(each, provenance={}, outcomes=[replace(one, seconds=0.0, versions="") for one in each.outcomes])
        for each in (results, other)
    )
    return mine == others


def test_makes_what_the_results_lack_with_what_it_starts_from_and_ends_as_in_one_go(
    want: Results, tmp_path: Path
) -> None:
    output, known = tmp_path / "out", tmp_path / "known.json"

    def left(results: Results) -> list[str]:
        """The calls of going on from these results, which ends like the comparison."""
        results.save(known)
        (tmp_path / "calls.txt").write_text("")
        got = go_on(tmp_path / "compare.yaml", known, output, jobs=2, launcher=launcher_in(tmp_path).split())
        assert same(got, want)
        assert same(Results.load(output / "results.json"), want)
        rmtree(output / "runs", ignore_errors=True)
        return sorted(calls(tmp_path))

    assert left(want) == []
    gone = [one for one in want.outcomes if (one.method, one.seed) not in (("SFT+GRPO", 1), (BASE, 0))]
    assert left(replace(want, outcomes=gone)) == ["eval"] * 3 + ["train"] * 2, "SFT's model of seed 1 is needed, too"
    searched = {"one": {name: rates for name, rates in want.rates["one"].items() if name != "SFT+GRPO"}}
    lengths = {"one": {name: want.search_runs["one"][name] for name in searched["one"]}}
    calls_of_search, of_seeds = 1 + 3, 2 + 2  # SFT, SFT+GRPO at three rates; SFT, SFT+GRPO of two seeds
    n = calls_of_search + of_seeds
    assert left(replace(want, rates=searched, search_runs=lengths)) == ["eval"] * n + ["train"] * n
    assert left(replace(want, rates={}, search_runs={}, outcomes=[])) == ["eval"] * 19 + ["train"] * 17, "all of it"


def test_the_rates_of_the_results_are_those_of_the_new_runs(want: Results, tmp_path: Path) -> None:
    best = {"SFT": 0.01, "GRPO": 0.002, "SFT+GRPO": 0.004}
    rates = {"one": {name: {"0.0001": 0.1, "0.0003": 0.2, f"{rate}": 0.3} for name, rate in best.items()}}
    search_runs = {"one": {name: dict.fromkeys(each, (7, 70)) for name, each in rates["one"].items()}}
    known = tmp_path / "known.json"
    replace(want, rates=rates, search_runs=search_runs, outcomes=[]).save(known)
    got = go_on(tmp_path / "compare.yaml", known, tmp_path / "out", launcher=launcher_in(tmp_path).split())
    want_rates = best | {BASE: 0.0, "GRPO long": 0.002}
    assert {one.method: one.rate for one in got.outcomes} == want_rates


def test_a_search_that_had_not_ended_and_runs_at_another_rate_than_the_best_are_made_again(tmp_path: Path) -> None:
    output, known = prepared(tmp_path), tmp_path / "known.json"
    file = FILE | {"methods": {"GRPO": {"preset": "grpo-official"}}, "search": {"rates": [1e-3, 3e-3], "further": 1}}
    file["studies"] = {"Methods": {"settings": ["one"], "methods": ["GRPO"], "seeds": 1}}
    path = written(tmp_path, file)
    run_comparison(path, output, launcher=launcher_in(tmp_path))
    want = Results.load(output / "results.json")
    assert [*want.rates["one"]["GRPO"]] == ["0.001", "0.003", "0.009"]

    def left(**changed: object) -> list[str]:
        replace(want, **changed).save(known)  # type: ignore[arg-type]
        rmtree(output / "runs")
        (tmp_path / "calls.txt").write_text("")
        assert same(go_on(path, known, output, launcher=launcher_in(tmp_path).split()), want)
        return calls(tmp_path)

    tried = {"0.001": want.rates["one"]["GRPO"]["0.001"], "0.003": want.rates["one"]["GRPO"]["0.003"]}
    lengths = {"one": {"GRPO": {rate: (7, 70) for rate in tried}}}
    assert left(rates={"one": {"GRPO": tried}}, search_runs=lengths) == ["train", "eval"] * 4, "and then the seed's run"
    other = [replace(one, rate=1e-3) if one.method == "GRPO" else one for one in want.outcomes]
    assert left(outcomes=other) == ["train", "eval"]


def test_what_is_finished_is_kept_when_a_run_fails(want: Results, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    gone = [one for one in want.outcomes if one.method != "GRPO long"]
    replace(want, outcomes=gone, provenance={"processor": "another"}).save(known)
    command = launcher_in(tmp_path).split()
    script = tmp_path / "command.py"
    script.write_text(f'import sys\nif "train.seed=1" in sys.argv:\n    sys.exit("no such luck")\n{script.read_text()}')
    with pytest.raises(RunFailed, match="no such luck"):
        go_on(tmp_path / "compare.yaml", known, tmp_path / "out", launcher=command)
    kept = Results.load(tmp_path / "out/results.json")
    assert {(one.method, one.seed) for one in kept.outcomes} == {
        (one.method, one.seed) for one in want.outcomes if (one.method, one.seed) != ("GRPO long", 1)
    }
    assert kept.provenance["processor"].startswith("another; ")


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("methods", "GRPO", {"preset": "grpo"}, "methods.GRPO"),
        ("settings", "one", {}, "settings.one"),
        ("search", "rates", [1e-3, 1e-2], "search"),
        ("overrides", "train.seed_of_data", 1, "overrides"),
    ],
)
def test_results_that_were_made_in_another_way_are_refused(
    tmp_path: Path, section: str, key: str, value: object, named: str
) -> None:
    other = json.loads(json.dumps(FILE | {"search": FILE["search"] | {"overrides": {"evaluation.data.path": "-"}}}))
    comparison = load_comparison(written(tmp_path, other))
    other[section][key] = value
    known = Results(load_comparison(written(tmp_path, other)), {}, {}, {}, [])
    with pytest.raises(ValueError, match=f"were made in the same way; their comparison differs in {named}$"):
        Continued(known, comparison, tmp_path / "compare.yaml", tmp_path)


def test_a_comparison_with_another_method_takes_over_those_that_it_shares(want: Results, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    want.save(known)
    file = json.loads(json.dumps(FILE))
    file["methods"]["RL-PLUS"] = {"preset": "rlplus"}
    file["studies"] = {"New": {"settings": ["one"], "methods": ["GRPO", "RL-PLUS"], "seeds": 2}}
    written(tmp_path, file)
    (tmp_path / "calls.txt").write_text("")
    got = go_on(tmp_path / "compare.yaml", known, tmp_path / "out", launcher=launcher_in(tmp_path).split())
    assert sorted(calls(tmp_path)) == ["eval"] * (3 + 2) + ["train"] * (3 + 2), "the search and two seeds of RL-PLUS"
    assert [(one.method, one.seed) for one in got.outcomes] == [
        (method, seed) for seed in (0, 1) for method in (BASE, "GRPO", "RL-PLUS")
    ]
    assert got.rates["one"].keys() == {"GRPO", "RL-PLUS"}
    assert got.rates["one"]["GRPO"] == want.rates["one"]["GRPO"]


@pytest.mark.parametrize("name", ["variants", "prefixes"])
def test_further_methods_are_compared_under_the_conditions_of_the_comparison_that_they_continue(name: str) -> None:
    variants, known = (load_comparison(EXPERIMENTS / f"compare/{name}.yaml") for name in (name, "demonstrations"))
    assert differing(known, variants) == ""
    assert {study.seed_numbers for study in (*variants.studies.values(), *known.studies.values())} == {range(100, 120)}
    assert variants.settings == known.settings
    assert all(study.settings == [*known.settings] for study in variants.studies.values())
