"""`rlplus compare`: its file, which runs there are, how they resume, and the numbers of its tables."""

import fcntl
import json
import subprocess
from dataclasses import replace
from itertools import accumulate
from math import ceil
from operator import mul
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any

import numpy as np
import pytest
from comparisons import EXPERIMENTS, FILE, QUICK, calls, launcher_in, prepared, written
from rich.text import Text

from rlplus.common.commands import ending_with_this_process
from rlplus.common.errors import RunFailed
from rlplus.common.textfiles import file_name
from rlplus.tools.cli import main
from rlplus.tools.compare.comparing import MARK, run_comparison
from rlplus.tools.compare.config import BASE, Search, load_comparison
from rlplus.tools.compare.launches import Runner, solved
from rlplus.tools.compare.outcomes import Results, _thinned, outcome_of
from rlplus.tools.compare.page import terminal_tables
from rlplus.tools.compare.prepared import VALIDATION
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import check_report_folder
from rlplus.train.evaluation.estimates import bootstrap
from rlplus.train.evaluation.results import Evaluation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path, FILE)


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    return launcher_in(tmp_path)


@pytest.fixture(scope="module")
def base_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def output(base_models: Path, path: Path) -> Path:
    """The folder of the comparison, with its base models and data."""
    return copytree(base_models, path.parent / "out")


def test_runs_searches_resumes_and_reports(tmp_path: Path, path: Path, output: Path, launcher: str) -> None:
    page = run_comparison(path, output, jobs=2, launcher=launcher)
    results = Results.load(output / "results.json")
    # Searched: SFT, GRPO and SFT+GRPO at three rates; GRPO long takes GRPO's. Reported: the base and four, two seeds.
    assert sorted(calls(tmp_path)) == ["eval"] * (9 + 10) + ["train"] * (9 + 8)
    assert list(results.rates["one"]) == ["SFT", "GRPO", "SFT+GRPO"]
    assert results.search_runs["one"]["SFT+GRPO"] == {"0.001": (7, 70), "0.003": (7, 70), "0.01": (7, 70)}
    assert {one.rate for one in results.outcomes if one.method != BASE} == {3e-3}  # the least of the two best is 1e-3
    quality = {(one.method, one.seed): one.results["trained"].correct[0] for one in results.outcomes}
    assert quality == {
        (method, seed): right
        for seed in (0, 1)
        for method, right in ((BASE, 1), ("SFT", 8), ("GRPO", 8), ("SFT+GRPO", 16), ("GRPO long", 8))
    }
    text = page.read_text()
    assert all(f">{method}<" in text for method in FILE["methods"])
    assert 'data-label="generated tokens">70</td>' in text[text.index("Learning rates") : text.index("<h2>Runs")]
    *_, differences = terminal_tables(results)
    assert str(differences.title).endswith("Difference from GRPO long, points")
    rows = dict(zip(*(list(column.cells) for column in differences.columns[:2]), strict=True))
    assert {name: isinstance(cell, Text) and cell.style == "bold" for name, cell in rows.items()} == {
        BASE: True,
        "SFT": False,
        "GRPO": False,
        "SFT+GRPO": True,
    }
    assert main(["report", str(output / "results.json"), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == text.replace(">compare<", ">out<")
    with pytest.raises(ValueError, match=r"`rlplus report .*results.json` is for a comparison"):
        check_report_folder(output)

    run_comparison(path, output, jobs=2, launcher=launcher)
    assert len(calls(tmp_path)) == 36, "a finished comparison runs nothing again"

    changed = json.loads(json.dumps(FILE))
    changed["methods"]["GRPO"]["overrides"] = {"algorithm.objective.entropy_coef": 0.01}
    run_comparison(written(tmp_path, changed), output, jobs=2, launcher=launcher)
    assert len(calls(tmp_path)) == 36 + 2 * (3 + 2), "what is another run now is made again, and nothing else"

    with pytest.MonkeyPatch.context() as patch:  # a preset of another version, under which a run began or ended
        patch.setitem(ALGORITHMS, "grpo-official", replace(ALGORITHMS["grpo-official"], normalize_std=True))
        run_comparison(tmp_path / "compare.yaml", output, jobs=2, launcher=launcher)
    assert len(calls(tmp_path)) == 46 + 2 * (3 + 2 + 3 + 2 + 2), "GRPO, SFT+GRPO and GRPO long, but not SFT"


@pytest.mark.slow
def test_a_search_goes_beyond_its_rates_until_the_best_is_inside(tmp_path: Path, output: Path, launcher: str) -> None:
    data = json.loads(json.dumps(FILE))
    data["search"] |= {"rates": [6e-3, 3e-3], "further": 5, "seeds": 2}
    run_comparison(written(tmp_path, data), output, presets=["GRPO"], seeds=1, launcher=launcher)
    results = Results.load(output / "results.json")
    assert list(results.rates["one"]["GRPO"]) == ["0.0015", "0.003", "0.006"]
    assert sorted(calls(tmp_path)) == ["eval"] * (3 * 2 + 2) + ["train"] * (3 * 2 + 1)
    assert {one.rate for one in results.outcomes if one.method == "GRPO"} == {3e-3}
    data["search"]["further"] = 0
    run_comparison(written(tmp_path, data), output, presets=["GRPO"], seeds=1, launcher=launcher, only_report=True)
    assert list(Results.load(output / "results.json").rates["one"]["GRPO"]) == ["0.003", "0.006"]


def test_the_rate_of_a_search_is_the_best_over_all_its_seeds_and_problems() -> None:
    search = Search.model_validate({"rates": [1e-4, 3e-4, 1e-3], "further": 2, "seeds": 3, "seed": 1010})
    assert list(search.seed_numbers) == [1010, 1011, 1012]
    assert search.next_rate({1e-4: 0.1, 3e-4: 0.3, 1e-3: 0.2}) is None
    assert search.next_rate({1e-4: 0.4, 3e-4: 0.3, 1e-3: 0.2}) == 3.3e-5
    assert search.next_rate({1e-4: 0.3, 3e-4: 0.3, 1e-3: 0.2}) is None, "one that is inside is as good"
    for close in ({1e-3: 0.1, 1.02e-3: 0.2}, {9e-4: 0.1, 1.01e-3: 0.2, 1.02e-3: 0.3}):
        assert search.model_copy(update={"rates": [*close]}).next_rate(close) is None, "0.001 is not beyond"
    assert search.next_rate({1e-4: 0.1, 3e-4: 0.3, 1e-3: 0.4}) == 3.3e-3
    assert search.next_rate({1e-4: 0.1, 3e-4: 0.3, 1e-3: 0.4, 3.3e-3: 0.5, 1.1e-2: 0.6}) is None, "two were allowed"
    common: dict[str, Any] = dict(
        k=(1,), temperature=1.0, seed=0, mean_response_length=5.0, truncated_share=0.0, mean_reward=None
    )
    few = Evaluation("few", problems=(0,), n=(4,), correct=(4,), statuses={"ok": 4}, **common)
    many = Evaluation("many", problems=(1, 2, 3), n=(4, 4, 4), correct=(0, 0, 2), statuses={"ok": 12}, **common)
    assert solved({"few": few, "many": many}) == pytest.approx((1 + 0 + 0 + 0.5) / 4)


def test_an_interrupted_comparison_keeps_what_is_finished(tmp_path: Path, output: Path, launcher: str) -> None:
    data = json.loads(json.dumps(FILE)) | {"search": None}
    data["methods"]["GRPO"]["overrides"] = {"train.lr": 0.666}  # makes the command fail
    with pytest.raises(RunFailed, match=r"one, GRPO, seed 0: rlplus train failed with exit status 1; from .*train.log"):
        run_comparison(written(tmp_path, data), output, launcher=launcher)
    results = Results.load(output / "results.json")
    assert (BASE, 0) in {(one.method, one.seed) for one in results.outcomes}
    before = calls(tmp_path)
    page = run_comparison(tmp_path / "compare.yaml", output, launcher=launcher, only_report=True)
    assert calls(tmp_path) == before
    assert "No method of this study has finished on all of its seeds yet." in page.read_text()


def test_a_report_without_finished_runs_is_refused(tmp_path: Path, output: Path, launcher: str) -> None:
    """And leaves no folder behind."""
    path, nothing = written(tmp_path, FILE), tmp_path / "nothing"
    with pytest.raises(ValueError, match=f"want the folder of a comparison with --report; {nothing} is none"):
        run_comparison(path, nothing, launcher=launcher, only_report=True)
    assert not nothing.exists()
    with pytest.raises(ValueError, match=f"want finished runs to report on; there are none in {output}"):
        run_comparison(path, output, launcher=launcher, only_report=True)
    assert not (output / "results.json").exists()


@pytest.mark.slow
def test_an_interruption_ends_the_making_of_base_models(tmp_path: Path) -> None:
    data = json.loads(json.dumps(FILE)) | {"search": None}
    endless = {"base": QUICK["base"] | {"sloppy_steps": 10**9}}
    data["settings"]["endless"] = data["settings"]["one"] | {"options": endless}
    data["studies"]["Methods"] |= {"settings": ["one", "endless"], "seeds": 1}

    def interrupt(message: str) -> None:
        raise KeyboardInterrupt(message)

    comparison = load_comparison(written(tmp_path, data))
    runner = Runner(comparison, EXPERIMENTS / "demo.yaml", tmp_path / "out", jobs=2, say=interrupt)
    with pytest.raises(KeyboardInterrupt, match="1 of 2: base model and data of one, seed 0"):
        runner.make()


def test_a_training_configuration_is_compared_by_its_presets(tmp_path: Path, launcher: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text((EXPERIMENTS / "demo.yaml").read_text())
    page = run_comparison(config, tmp_path / "out", presets=["grpo", "dr-grpo"], seeds=2, launcher=launcher)
    assert sorted(calls(tmp_path)) == ["eval"] * 6 + ["train"] * 4
    asked = (tmp_path / "models.txt").read_text().split()
    assert asked.count("runs/demo/seed0/base") == 2, "the configuration's own model is the base"
    assert "Difference from dr-grpo" in page.read_text()
    with pytest.raises(ValueError, match="want --presets, the methods to compare"):
        load_comparison(config)


def test_seeds_on_the_same_problems_are_no_further_problems() -> None:
    values = (np.arange(200) % 5 == 0).astype(float)
    alone = bootstrap([values])
    together = bootstrap([values] * 5, same_problems=True)
    assert together.high - together.low == pytest.approx(alone.high - alone.low, rel=0.1)
    apart = bootstrap([values] * 5)
    assert apart.high - apart.low < 0.6 * (together.high - together.low)


def test_a_changed_evaluation_costs_no_training(tmp_path: Path, output: Path, launcher: str) -> None:
    data = json.loads(json.dumps(FILE)) | {"search": None}
    path = written(tmp_path, data)
    run_comparison(path, output, presets=["GRPO", "SFT"], seeds=1, launcher=launcher)
    before = calls(tmp_path)
    run_comparison(path, output, presets=["GRPO", "SFT"], seeds=1, overrides=["reward.workers=2"], launcher=launcher)
    assert calls(tmp_path) == before
    again = ["evaluation.temperature=0.5"]
    run_comparison(path, output, presets=["GRPO", "SFT"], seeds=1, overrides=again, launcher=launcher)
    assert calls(tmp_path).count("eval") == 2 * before.count("eval")
    # The stand-in for the command trains whenever it is asked; the real one leaves a finished run as it is.
    assert (output / "runs/one/seed-0/GRPO/model/quality").read_text() == "4"


def test_a_damaged_note_of_a_run_deletes_nothing(tmp_path: Path, output: Path, launcher: str) -> None:
    """It would pass for another configuration's, and the run would be made again."""
    path = written(tmp_path, json.loads(json.dumps(FILE)) | {"search": None})
    run_comparison(path, output, presets=["GRPO"], seeds=1, launcher=launcher)
    asked = output / "runs/one/seed-0/GRPO/asked.json"
    whole, before = asked.read_bytes(), calls(tmp_path)
    rate = whole.index(b'"lr": ') + len('"lr": ')
    remedy = rf"Remove {output / 'runs/one/seed-0/GRPO'}, and this run is made again"
    flipped = whole[:rate] + bytes([whole[rate] ^ 1]) + whole[rate + 1 :]
    unsealed = flipped.replace(b"crc32 of this file", b"crc32 of thisfile")
    for damage in (flipped, unsealed, whole[:100], b"[]", b"\xff"):
        asked.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"^{asked} is damaged: .*{remedy}$"):
            run_comparison(path, output, presets=["GRPO"], seeds=1, launcher=launcher)
    assert (asked.parent / "model/quality").exists()
    asked.write_bytes(whole)
    run_comparison(path, output, presets=["GRPO"], seeds=1, launcher=launcher)
    assert calls(tmp_path) == before


def test_a_run_of_a_version_without_a_key_is_the_same_run_where_the_key_says_what_it_did(
    tmp_path: Path, output: Path, launcher: str
) -> None:
    """Its graders took responses that were cut off: a file that says so goes on, and one that does not trains anew."""
    data = json.loads(json.dumps(FILE)) | {"search": None}
    path = written(tmp_path, data | {"overrides": data.get("overrides", {}) | {"reward.cut_off": "grade"}})
    run_comparison(path, output, presets=["GRPO"], seeds=1, launcher=launcher)
    asked, before = output / "runs/one/seed-0/GRPO/asked.json", calls(tmp_path)
    recorded = json.loads(asked.read_text())
    for key in ("cut_off", "box"):
        del recorded["config"]["reward"][key]
    del recorded["checksum"]
    asked.write_text(json.dumps(recorded))
    run_comparison(path, output, presets=["GRPO"], seeds=1, launcher=launcher)
    assert calls(tmp_path) == before
    zero = data | {"overrides": data.get("overrides", {}) | {"reward.cut_off": "zero"}}
    run_comparison(written(tmp_path, zero), output, presets=["GRPO"], seeds=1, launcher=launcher)
    assert calls(tmp_path) != before


def test_two_processes_do_not_share_a_folder(path: Path, tmp_path: Path, launcher: str) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "results.json").write_text("those of the other process")
    with (output / MARK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another rlplus compare makes runs in"):
            run_comparison(path, output, launcher=launcher)
    assert (output / "results.json").read_text() == "those of the other process"


def test_a_command_that_starts_while_all_are_ended_is_ended_too(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(load_comparison(path), EXPERIMENTS / "demo.yaml", tmp_path, launcher=("sh", "-c", "exec sleep 9"))
    start = subprocess.Popen
    enders: list[Thread] = []

    def start_late(*arguments: list[str], **options: object) -> object:
        assert arguments[0][:4] == ending_with_this_process([])  # none outlives a comparison that is killed
        enders.append(Thread(target=runner._stop))
        enders[0].start()
        enders[0].join(0.5)  # it waits for this start
        return start(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start_late)
    (run,) = runner.chain("one", 0, "GRPO")
    runner.path(run).mkdir(parents=True)
    with pytest.raises(
        RunFailed, match=r"one, GRPO, seed 0: rlplus train failed with signal SIGTERM; from .*train.log"
    ):
        runner._command(run, "train", [], [])
    with pytest.raises(RunFailed, match="one, GRPO, seed 0: stopped with another run"):
        runner._command(run, "eval", [], [])
    assert len(enders) == 1


def test_names_of_folders_stay_inside(tmp_path: Path) -> None:
    names = ["a", "a/b", "a b", "..", ".", "SFT+GRPO", "γ = 0"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert not {".", "..", ""} & set(files)
    assert all((tmp_path / name).parent == tmp_path for name in files)


def test_a_search_of_what_a_method_starts_from_comes_first(tmp_path: Path, output: Path, launcher: str) -> None:
    data = json.loads(json.dumps(FILE))
    data["methods"]["late"] = {"preset": "grpo-official", "searched_as": "SFT+GRPO"}
    data["studies"]["Methods"]["methods"] = ["late"]
    run_comparison(written(tmp_path, data), output, seeds=1, launcher=launcher)
    assert list(Results.load(output / "results.json").rates["one"]) == ["SFT", "SFT+GRPO"]


def test_a_wrong_override_is_refused_before_anything_runs(tmp_path: Path, path: Path, launcher: str) -> None:
    with pytest.raises(ValueError, match=r"train\.lrr: unknown key; nearest: train\.lr"):
        run_comparison(path, tmp_path / "out", overrides=["train.lrr=1"], launcher=launcher)
    with pytest.raises(ValueError, match=r"train\.lr: the comparison gives each run its own, want no override"):
        run_comparison(path, tmp_path / "out", overrides=["train.lr=1"], launcher=launcher)
    assert not (tmp_path / "calls.txt").exists()


def test_a_search_trains_a_share_and_looks_at_no_test(path: Path, tmp_path: Path) -> None:
    comparison = load_comparison(path)
    runner = Runner(comparison, EXPERIMENTS / "demo.yaml", tmp_path)
    (run,) = runner.chain("one", 1000, "GRPO", [1e-3])
    config = runner.config_of(run)
    assert (config.train.steps, config.train.generated_tokens, config.train.lr) == (334, 66667, 1e-3)
    assert config.evaluation.data is not None
    assert config.evaluation.data.path == str(tmp_path / "prepared" / "one" / "seed-1000" / VALIDATION)


@pytest.mark.slow
def test_other_seeds_repeat_a_comparison(tmp_path: Path, output: Path, launcher: str) -> None:
    path = written(tmp_path, FILE | {"search": None})
    run_comparison(path, output, presets=["GRPO", "SFT"], seeds=1, first_seed=7, launcher=launcher)
    outcomes = Results.load(output / "results.json").outcomes
    assert [(one.method, one.seed) for one in outcomes] == [(BASE, 7), ("SFT", 7), ("GRPO", 7)]
    assert "No method" not in (output / "index.html").read_text()
    with pytest.raises(ValueError, match="want seeds below 1000, where those of searches begin; got 1000"):
        load_comparison(path, seeds=2, first_seed=999)
    with pytest.raises(ValueError, match="first_seed: want greater than or equal to 0; got -1"):
        load_comparison(path, first_seed=-1)


@pytest.mark.slow
def test_real_runs(tmp_path: Path, output: Path) -> None:
    data = json.loads(json.dumps(FILE)) | {"search": None}
    data["overrides"] |= {"evaluation.samples": 2, "evaluation.k": [1], "train.prompts_per_step": 4}
    for method in data["methods"].values():
        method["overrides"] = {"train.steps": 2, "train.generated_tokens": None}
    run_comparison(written(tmp_path, data), output, seeds=1, jobs=2)
    outcomes = Results.load(output / "results.json").outcomes
    assert {one.method: one.steps for one in outcomes} == {BASE: 0} | dict.fromkeys(FILE["methods"], 2)
    assert all(sum(one.results["trained"].n) == 200 for one in outcomes)
    assert all(one.generated_tokens > 0 for one in outcomes if "GRPO" in one.method)
    assert str(tmp_path) not in (output / "results.json").read_text(), "results can be published"


@pytest.mark.parametrize("steps", [1, 60, 61, 130, 1000])
def test_a_long_curve_is_kept_as_means_of_neighbours(steps: int) -> None:
    """So nothing is lost of its sum, whatever the values between are."""
    at, values = list(range(1, steps + 1)), [float((7 * step) % 10) for step in range(1, steps + 1)]
    places, means = _thinned(at, values)
    size = ceil(steps / 60)
    lengths = [size] * (steps // size) + [steps % size] * bool(steps % size)
    assert len(means) == len(places) == len(lengths) <= 60
    assert sum(map(mul, means, lengths)) == pytest.approx(sum(values), rel=1e-3)
    assert sum(map(mul, places, lengths)) == pytest.approx(sum(at))
    ends = list(accumulate(lengths))
    assert all(end - length < place <= end for place, length, end in zip(places, lengths, ends, strict=True))


def test_the_curves_of_a_run_are_those_of_its_metrics_and_the_noise_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    rows = [{"step": step, "generated_tokens": step, "reward/internal": step / 4} for step in (1, 2, 3)]
    for row in rows[1:]:  # the first step had no gradient
        row["actor/backward_noise"] = row["step"] / 100
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = outcome_of(tmp_path, "one", 0, "GRPO", 1e-3, {}).curves
    assert curves == {
        "reward/internal": ([1, 2, 3], [0.25, 0.5, 0.75]),
        "actor/backward_noise": ([2, 3], [0.02, 0.03]),
    }
