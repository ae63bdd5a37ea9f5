"""`rlplus compare` of runs that exist: methods and seeds among them, a comparison's numbers, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_evaluations import evaluation
from report_pages import step_line
from trainer_runs import run_config

from rlplus.tools.cli import main
from rlplus.tools.compare import page
from rlplus.tools.compare.config import BASE, Comparison
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.compare.past_runs import TITLE, results_of
from rlplus.train.evaluation.results import save_results

RIGHT = {("grpo", 3): [2, 4, 0, 8], ("grpo", 7): [1, 4, 1, 8], ("rlplus", 3): [5, 4, 2, 8], ("rlplus", 7): [6, 4, 2, 8]}
BASE_RIGHT = [1, 0, 0, 7]


def run_in(folder: Path, preset: str, seed: int, right: list[int], name: str = "", **sections: Any) -> Path:
    """The files of a run and of its evaluation."""
    sections["train"] = {"seed": seed} | sections.get("train", {})
    config = run_config(folder, name or f"{preset}-{seed}", algorithm={"preset": preset}, **sections)
    run = Path(config.output_dir)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(step_line(i))}\n" for i in (1, 2)))
    save_results(run, {"test": evaluation(right, name="test", seed=seed, model=f"{run}@abc", asked={"data": "x@1"})})
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two presets on seeds 3 and 7, out of order, and a base model that was only evaluated."""
    found = [str(run_in(tmp_path, *key, right)) for key, right in reversed(RIGHT.items())]
    save_results(tmp_path / "base", {"test": evaluation(BASE_RIGHT, name="test", seed=0)})
    return [*found, str(tmp_path / "base")]


def test_numbers_are_those_of_a_comparison_that_had_made_the_runs(runs: list[str], tmp_path: Path) -> None:
    """Built by hand: the same tables, differences and intervals; nothing of this machine is in the file."""
    folder = tmp_path / "out"
    assert main(["compare", *runs, "--output", str(folder), "--reference", "grpo"]) == 0
    found = Results.load(folder / "results.json")
    outcomes = [
        Outcome("", i, name, 0.0, 2, 2000, 0.0, "", {"test": evaluation(right, name="test", seed=seed)}, {})
        for i, seed in enumerate((3, 7))
        for name, right in ((BASE, BASE_RIGHT), *((name, RIGHT[name, seed]) for name in ("grpo", "rlplus")))
    ]
    study = {"settings": [""], "methods": ["rlplus", "grpo"], "seeds": 2, "reference": "grpo"}
    data = {"run": "x", "methods": {name: {"preset": name} for name in study["methods"]}, "studies": {TITLE: study}}
    expected = Results(Comparison.model_validate(data), {}, {}, {}, outcomes)
    tables = [page.setting_tables(each, each.comparison.studies[TITLE], "") for each in (found, expected)]
    assert tables[0] == tables[1]
    solved, seeds, differences = tables[0]
    titles = ["Problems solved, %", "Seed by seed, pass@1, %", "Difference from grpo, points"]
    assert [table.title for table in (solved, seeds, differences)] == titles
    assert seeds.header == ["method", "seed 3", "seed 7"]
    assert (found.provenance["seeds"], found.provenance["methods differ in"]) == ("3, 7", "algorithm.preset")
    assert str(tmp_path) not in (folder / "results.json").read_text()
    assert "rlplus" in (folder / "index.html").read_text()
    assert main(["report", str(folder / "results.json"), "-o", str(tmp_path / "again.html")]) == 0


def test_methods_are_what_differs_in_more_than_seed_and_logs(tmp_path: Path) -> None:
    """Two learning rates of one preset are two methods; logs and checkpoints make none. Names may be given."""
    slow, fast = (
        str(run_in(tmp_path, "grpo", 0, [4, 4], name=name, train={"lr": rate}))
        for name, rate in (("slow", 1e-6), ("fast", 2e-6))
    )
    assert list(results_of([slow, fast], None, {}).comparison.methods) == ["grpo lr=1e-06", "grpo lr=2e-06"]
    named = results_of([f"slow={slow}", f"fast={fast}"], None, {})
    assert list(named.comparison.methods) == ["slow", "fast"]
    assert named.provenance["methods differ in"] == "train.lr"
    logged = run_in(tmp_path, "grpo", 1, [4, 4], log={"samples_every": 1}, checkpoint={"keep": 7}, train={"lr": 1e-6})
    found = results_of([slow, str(logged)], None, {})
    study = found.comparison.studies[TITLE]
    assert (study.methods, study.seeds, found.provenance["methods differ in"]) == (["grpo"], 2, "nothing")


def test_without_a_base_model_there_is_no_row_of_it(runs: list[str]) -> None:
    results = results_of(runs[:-1], None, {})
    tested = page.tested_in(results, results.comparison.studies[TITLE], "")
    assert list(tested.methods) == ["rlplus", "grpo"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no results", "want runs that were evaluated; .*grpo-7 has no evaluation-BENCHMARK.json: run `rlplus eval`"),
        ("seed", "want the same seeds of every method, .*; rlplus has 3, 7; grpo has 3"),
        ("twice", "want one run per method and seed; .*grpo-3 and .*grpo-3 are both grpo, seed 3"),
        ("problems", "want one evaluation of test for all runs; .*grpo-7 and .*rlplus-7 differ in problems"),
        ("data", "want one evaluation of test for all runs; .*grpo-7 and .*rlplus-7 differ in rows of the data"),
        ("rule", "want one evaluation of test for all runs; .*grpo-7 and .*rlplus-7 differ in reward.cut_off"),
        ("benchmark", "want runs evaluated on the same benchmarks; .*rlplus-7 has test; .*grpo-7 has more, test"),
        ("base", "want the results of one base model at most; got .*base, .*base"),
        ("alone", "want runs that were trained; .*base has only results of an evaluation"),
        ("reference", "^want --reference one of rlplus, grpo, Base; got 'grppo'; nearest: grpo$"),
        ("mistyped", "want folders of runs, as FOLDER or NAME=FOLDER; got no/such, which is no folder"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs: list[str], fault: str, message: str) -> None:
    seven, grpo = next(run for run in runs if run.endswith("grpo-7")), [run for run in runs if "grpo" in run]
    result = evaluation(RIGHT["grpo", 7], name="test", seed=7, asked={"data": "y@1"})
    changed = {
        "problems": {"test": replace(result, problems=(0, 1, 2, 4))},
        "data": {"test": replace(result, asked={"data": "x@2"})},
        "rule": {"test": replace(result, asked={"data": "x@1", "reward.cut_off": "zero"})},
        "benchmark": {"test": result, "more": replace(result, name="more")},
    }
    if fault == "no results":
        (Path(seven) / "evaluation-test.json").unlink()
    if fault in changed:
        save_results(Path(seven), changed[fault])
    given = {
        "seed": [run for run in runs if run != seven],
        "twice": [*runs, next(run for run in grpo if run != seven)],
        "base": [*runs, runs[-1]],
        "alone": runs[-1:],
        "mistyped": [*runs, "no/such"],
    }.get(fault, runs)
    with pytest.raises(ValueError, match=message):
        results_of(given, "grppo" if fault == "reference" else None, {})


def test_options_of_training_are_refused(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--seeds", "3"]) == 2
    assert "--seeds is for runs to be made; " in capsys.readouterr().err
    assert main(["compare", "configs/compare/gsm8k.yaml", "--reference", "GRPO"]) == 2
    assert "--reference is for runs that exist" in capsys.readouterr().err
