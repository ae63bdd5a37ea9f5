"""The tests of decision 077 on made-up results, and its comparison as it was fixed."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from experiments import form
from experiments.significance import holm
from rlplus.tools.compare.config import BASE, Comparison, load_comparison
from rlplus.tools.compare.launches import Runner
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.train.evaluation.results import Evaluation

PATH = Path(__file__).parents[2] / "experiments/compare/form.yaml"
OTHER = "without the first number"
COMPARISON = {
    "run": "run.yaml",
    "settings": {"own": {}, OTHER: {}},
    "methods": {"GRPO": {"preset": "grpo"}, "RL-PLUS": {"preset": "rlplus"}},
    "studies": {"Forms": {"settings": ["own", OTHER], "methods": ["GRPO", "RL-PLUS"], "seeds": 12}},
}
EASY = 10
HARD = {("own", "GRPO"): [0, 1] * 6, ("own", "RL-PLUS"): [9, 4] * 6, (OTHER, "RL-PLUS"): [0, 2, 0] * 4}


def outcome(setting: str, method: str, seed: int, hard: int) -> Outcome:
    """Ten samples each of an easy and a hard problem."""
    common: dict[str, Any] = dict(k=(1,), temperature=1.0, seed=seed, mean_response_length=5.0, truncated_share=0.0)
    trained = Evaluation("trained", (0, 1), (10, 10), (EASY, hard), statuses={"ok": 20}, mean_reward=None, **common)
    return Outcome(setting, seed, method, 1e-3, 1, 1, 1.0, "", {"trained": trained}, {})


def made(seeds: int) -> Results:
    outcomes = [outcome(*place, seed, hard) for place, each in HARD.items() for seed, hard in enumerate(each[:seeds])]
    return Results(Comparison.model_validate(COMPARISON), {}, {}, {}, outcomes)


def test_each_difference_has_its_permutation_test_and_holm_over_all_three() -> None:
    found = form.differences_of(made(12))
    own, other, grpo = HARD["own", "RL-PLUS"], HARD[OTHER, "RL-PLUS"], HARD["own", "GRPO"]
    raw = []
    for got, (first, second) in zip(found, ((own, other), (own, grpo), (other, grpo)), strict=True):
        differences = [a - b for a, b in zip(first, second, strict=True)]
        assert got.mean == pytest.approx(sum(differences) / 12 / 20)
        assert got.above == sum(each > 0 for each in differences)
        sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=12)]
        raw.append(sum(abs(each) >= abs(sum(differences)) for each in sums) / len(sums))
        assert got.p == raw[-1]
    assert [each.corrected for each in found] == holm(raw)
    assert next(row[2:] for row in form.difference_rows(made(12))) == ("12 of 12", "0.0005", "0.0015")


def test_fewer_than_ten_seeds_have_no_verdict() -> None:
    assert [(each.p, each.corrected) for each in form.differences_of(made(9))] == [(None, None)] * 3
    assert next(row[1:] for row in form.difference_rows(made(9))) == ("+30.6", "9 of 9", "", "")
    assert all(each.p is not None for each in form.differences_of(made(10)))


def test_seeds_that_lack_a_run_are_left_out() -> None:
    results = made(12)
    results.outcomes.remove(results.of(OTHER, "RL-PLUS")[3])
    assert {name: [one.seed for one in each] for name, each in form.complete(results).items()} == {
        name: [0, 1, 2, *range(4, 12)] for name in form.RUNS
    }
    results.outcomes[:] = [one for one in results.outcomes if one.setting == "own"]
    with pytest.raises(ValueError, match="want a seed with the runs"):
        form.complete(results)


def test_runs_that_find_the_skill_are_apart_from_the_others() -> None:
    rows = {name: cells for name, *cells in form.run_rows(made(12))}
    assert rows[form.OWN] == ["82.5", "6 of 12 (21 to 79 %)", "95.0", "70.0"]
    assert rows[form.GRPO] == ["52.5", "0 of 12 (0 to 26 %)", "", "52.5"]


def test_both_tables_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(12).save(tmp_path / "results.json")
    monkeypatch.setattr("sys.argv", ["form", str(tmp_path / "results.json")])
    form.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| {' | '.join(form.RUN_HEADER)} |"
    assert f"| {form.OWN} − {form.OTHER} | +29.2 | 12 of 12 | 0.0005 | 0.0015 |" in lines


def test_the_comparison_is_as_it_was_fixed(tmp_path: Path) -> None:
    """By docs/decisions/077, written before its runs."""
    comparison = load_comparison(PATH)
    runner = Runner(comparison, PATH.parent / comparison.run, tmp_path)
    runner.check()
    assert comparison.search is None
    parts = (form.CELLS, form.OTHER_METHODS, form.RATES, form.WITH_RESPONSES)
    wanted = {place for part in parts for place in part.values()} | {("own responses", "SFT")}
    assert {(run.setting, run.method) for run in runner.all() if run.method != BASE} == wanted
    assert sorted({run.seed for run in runner.all()}) == [*range(200, 220)]
    settings = dict(comparison.settings)
    responses = settings.pop("own responses")
    assert responses.prepare == "experiments.toy.own_responses:prepare"
    assert responses.options == {"base": comparison.settings["own"].options["base"]}
    demonstrators = {name: setting.options.pop("demonstrator", {}) for name, setting in settings.items()}
    other, reversed_ = {"copies": False}, {"order": "backward"}
    exact = {"own": {}, OTHER: other, "reversed": reversed_}
    assert demonstrators == {name: each | {"noise": 0.2} for name, each in exact.items()} | {
        f"{name} and exact": each for name, each in exact.items()
    }
    assert len({repr(setting) for setting in settings.values()}) == 1, "all else is the same"
    for run in runner.all():
        train = runner.config_of(run).train
        rate = {"half": 5e-4, "twice": 2e-3}.get(run.method.removesuffix(" the rate").rpartition(" ")[2], 1e-3)
        assert (train.lr, train.generated_tokens) == (rate, None if run.method == "SFT" else 200_000)
        if run.method != "SFT":
            assert (train.prompts_per_step, train.prompts_per_update) == (32, None)


def test_at_their_own_rates_all_else_is_the_same(tmp_path: Path) -> None:
    fixed, searched = load_comparison(PATH), load_comparison(PATH.with_name("form-rates.yaml"))
    runner = Runner(searched, PATH.parent / searched.run, tmp_path)
    runner.check()
    reported = {(run.setting, run.method) for run in runner.all() if run.method != BASE}
    assert reported == {*form.RUNS.values()}
    assert sorted({run.seed for run in runner.all()}) == [*range(200, 220)]
    assert (searched.run, searched.overrides) == (fixed.run, fixed.overrides)
    for name, setting in searched.settings.items():
        assert setting.options.pop("validation") == "all"
        assert setting == fixed.settings[name]
    assert all(fixed.methods[name] == method for name, method in searched.methods.items())
    assert searched.search is not None
    assert searched.search.rates == [5e-4, 1e-3, 2e-3]
    assert searched.search.seed_numbers == range(1000, 1006)
    assert searched.search.share == 1


def test_each_part_has_its_own_seeds_and_its_own_correction() -> None:
    places = form.CELLS | form.RATES
    outcomes = [
        outcome(*place, seed, (7 * number + 3 * seed) % 11)
        for number, place in enumerate(dict.fromkeys(places.values()))
        for seed in range(12 if place in form.CELLS.values() else 4)
    ]
    results = Results(Comparison.model_validate(COMPARISON), {}, {}, {}, outcomes)
    found = form.differences_of(results, "cells")
    assert [(each.of, each.less) for each in found] == [*form.CELL_DIFFERENCES]
    assert [each.corrected for each in found] == holm([each.p for each in found if each.p is not None])
    assert form.difference_rows(results, "rates") == []
    assert [len(each) for each in form.complete(results, "rates").values()] == [4] * 9
