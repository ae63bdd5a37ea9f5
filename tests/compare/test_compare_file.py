"""The file of a comparison: what is refused, what options choose of it, and the shipped ones."""

import json
from pathlib import Path

import pytest
import yaml
from comparisons import EXPERIMENTS, FILE, written

from rlplus.common.errors import RunFailed
from rlplus.tools.cli.compare import _names
from rlplus.tools.compare.comparing import MARK, run_comparison
from rlplus.tools.compare.config import BASE, load_comparison
from rlplus.tools.compare.launches import Runner
from rlplus.tools.compare.outcomes import Results
from rlplus.tools.compare.prepared import NOTE

GSM8K = EXPERIMENTS.parent / "configs/compare/gsm8k.yaml"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods.GRPO.preset": "grop"}, "methods.GRPO: preset: got 'grop'; nearest: grpo"),
        ({"methods.SFT.after": "SFT+GRPO"}, "comes after itself"),
        ({"studies.Methods.methods": ["GRPPO"]}, "studies.Methods.methods: no such name in methods: 'GRPPO'"),
        ({"studies.Methods.settings": ["onne"]}, "studies.Methods.settings: no such name in settings: 'onne'; nearest"),
        ({"settings.one": {"options": {"noise": 0.1}}}, "options are those of a function: want prepare, too"),
        ({"settings.one.prepare": "toy.py"}, "settings.one.prepare: want"),
        ({"settings.two": {}}, "want evaluation.data.path, problems that no test has"),
        ({"serach": {}}, "serach: unknown key; nearest: search$"),
        ({"methods.GRPO.overides": {}}, r"methods\.GRPO\.overides: unknown key; nearest: methods\.GRPO\.overrides"),
        ({"methods.GRPO.x": {}}, r"methods\.GRPO\.x: unknown key$"),
        ({"search.rates": [1e-3, 1e-3]}, "want rates that differ"),
        ({"overrides": {"train.seed": 1}}, "overrides: train.seed is the comparison's"),
        ({"methods.GRPO.overrides": {"train.lr": 1}}, "methods.GRPO.overrides: train.lr is the comparison's"),
        (
            {"studies.Methods.reference": "PPO"},
            "reference: want one of its methods, or Base; got 'PPO'",
        ),
        ({"studies.Methods.methods": []}, "studies.Methods.methods: "),
        ({"methods.SFT.searched_as": "GRPO long"}, "GRPO long itself takes its rate from another method"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    data = json.loads(json.dumps(FILE))
    for key, value in change.items():
        *parents, last = key.split(".")
        section = data
        for part in parents:
            section = section[part]
        section[last] = value
    with pytest.raises(ValueError, match=message):
        load_comparison(written(tmp_path, data))


def test_settings_and_presets_choose(tmp_path: Path) -> None:
    shipped = load_comparison(EXPERIMENTS / "compare" / "paper.yaml", ["GRPO", "RL-PLUS", "cispo"], 2, ["noisy"])
    methods = shipped.studies["Methods"]
    assert (methods.settings, methods.methods, methods.seeds) == (["noisy"], ["cispo", "GRPO", "RL-PLUS"], 2)
    assert shipped.methods["cispo"].preset == "cispo"
    assert list(load_comparison(EXPERIMENTS / "compare" / "paper.yaml", ["GRPO", "RL-PLUS"]).studies) == [
        "Methods",
        "Model sizes",
    ]
    with pytest.raises(ValueError, match="no such name in settings: 'nosy'; nearest: noisy"):
        load_comparison(EXPERIMENTS / "compare" / "paper.yaml", settings=["nosy"])
    with pytest.raises(ValueError, match="no such name in methods and presets: 'GRPPO'; nearest: "):
        load_comparison(EXPERIMENTS / "compare" / "paper.yaml", presets=["GRPPO"])
    (training := tmp_path / "run.yaml").write_text("model: {path: x}\n")
    with pytest.raises(ValueError, match=r"^want --presets one of rlplus, .*; got 'grppo'; nearest: grpo$"):
        load_comparison(training, presets=["grpo", "grppo"])


def test_empty_names_between_commas_are_left_out() -> None:
    assert (_names("--presets", "GRPO, SFT,"), _names("--presets", None)) == (["GRPO", "SFT"], [])
    for empty in ("", " ,"):  # not all of them
        with pytest.raises(ValueError, match="want names between commas with --presets; got '"):
            _names("--presets", empty)


@pytest.mark.parametrize(
    ("place", "overrides", "message"),
    [
        ("search", {"evaluation.samplse": 2}, "SFT, seed 1000, lr 0.001: (?s:.*)evaluation.samplse: unknown key"),
        (
            "methods.SFT",
            {"train.epochs": 1, "train.steps": None, "train.generated_tokens": None},
            "SFT, seed 1000, lr 0.001: a search",
        ),
    ],
)
def test_a_search_without_a_configuration_is_refused_before_anything_is_made(
    tmp_path: Path, place: str, overrides: dict[str, object], message: str
) -> None:
    data = json.loads(json.dumps(FILE))
    section = data["search"] if place == "search" else data["methods"]["SFT"]
    section["overrides"] = overrides
    data["studies"]["Methods"]["methods"] = ["SFT+GRPO"]  # SFT is only its start
    with pytest.raises(ValueError, match=message):
        run_comparison(written(tmp_path, data), tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == [MARK]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prepare": "nowhere:prepare"}, "settings.one: cannot import nowhere:prepare, not from the current folder"),
        ({"prepare": "experiments.toy:repair"}, "settings.one: cannot import .* has no attribute 'repair'"),
        ({"prepare": "experiments.toy:SET"}, "settings.one: want a function; experiments.toy:SET is a str"),
        ({"options": {"bsae": {}}}, "settings.one: options: got an unexpected keyword argument 'bsae'; want .*base: "),
        ({"options": {"base": {"task": {"hrad": 3}}}}, "settings.one: options.base.task.hrad: Unexpected keyword"),
        ({"options": {"base": {"scratchpad_share": 15}}}, "options.base: want scratchpad_share a probability; got 15"),
        ({"options": {"base": {"seed": 3}}}, "options.base.seed: Unexpected keyword"),  # the seeds are the studies'
        ({"options": {"base": {"batch": 0.5}}}, "options.base.batch: want a valid integer"),
        ({"options": {"base": {"reads": True, "task": {"hard": 8}}}}, "want at most 7 numbers with reads; got 8"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_made(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    data = json.loads(json.dumps(FILE))
    data["settings"]["one"] |= change
    with pytest.raises(ValueError, match=message):
        run_comparison(written(tmp_path, data), tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == [MARK]


def test_runs_without_problems_to_evaluate_on_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = yaml.safe_load((EXPERIMENTS / "demo.yaml").read_text())
    del run["evaluation"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    message = r"seed 0: want evaluation\.data or evaluation\.benchmarks, the problems to evaluate on; got neither"
    with pytest.raises(ValueError, match=message):
        run_comparison(tmp_path / "run.yaml", tmp_path / "out", presets=["grpo", "rlplus"], seeds=1)
    assert [each.name for each in (tmp_path / "out").iterdir()] == [MARK]


FUNCTION = """
def prepare(folder, seed, lines=1, **more):
    (folder / "model").mkdir()
    if more.get("full"):
        raise OSError(28, "No space left on device")
    for name in ("train", "validation", "test")[:more.get("files", 3)]:
        (folder / f"{name}.jsonl").write_text(f"{seed} {lines}" * lines)
"""


def test_any_function_prepares_a_setting_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without annotations its options are as they stand in the file; others make the files anew."""
    (tmp_path / "my_data.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    data = json.loads(json.dumps(FILE))

    def prepared(**options: int) -> str:
        data["settings"]["one"] = {"prepare": "my_data:prepare", "options": options}
        preparation = Runner(load_comparison(written(tmp_path, data)), EXPERIMENTS / "demo.yaml", tmp_path).preparation(
            "one", 3
        )
        assert preparation is not None
        assert not preparation.is_made()
        preparation.make()
        assert preparation.is_made()
        return (preparation.folder / "test.jsonl").read_text()

    assert prepared(lines=2) == "3 23 2"
    assert prepared() == "3 1"
    with pytest.raises(RunFailed, match=r"my_data:prepare has not written validation\.jsonl, test\.jsonl into "):
        prepared(files=1)
    full = r"base model and data of one, seed 3: my_data:prepare failed in .*/seed-3: \[Errno 28\] No space left"
    with pytest.raises(OSError, match=full):
        prepared(full=1)
    assert not (tmp_path / "prepared/one/seed-3" / NOTE).exists()


def test_every_run_of_the_shipped_comparison_has_a_configuration(tmp_path: Path) -> None:
    comparison = load_comparison(EXPERIMENTS / "compare" / "paper.yaml", seeds=1)
    runner = Runner(comparison, EXPERIMENTS / "compare" / comparison.run, tmp_path)
    runs = runner.all()
    assert {run.method for run in runs} == {BASE, *comparison.methods}
    for run in runs:
        runner.config_of(run)
    tokens = {run.method: runner.config_of(run).train.generated_tokens for run in runs if run.method != BASE}
    assert set(tokens.values()) == {200_000, 2_000_000, None}
    assert {name for name, count in tokens.items() if count is None} == {"SFT"}
    steps = {run.method: runner.config_of(run).train.steps for run in runs if "× 10" in run.method}
    assert all(256 * 7 * count > 2_000_000 for count in steps.values()), (
        "tokens end a run, also of the shortest responses"
    )
    sizes = [comparison.settings[name] for name in comparison.studies["Model sizes"].settings]
    assert [one.options["base"].pop("hidden", 64) for one in sizes] == [48, 64, 96]  # type: ignore[union-attr]
    assert sizes[0] == sizes[1] == sizes[2]


def test_the_comparison_at_one_rate_has_the_settings_and_methods_of_the_other(tmp_path: Path) -> None:
    paper, one = (load_comparison(EXPERIMENTS / "compare" / f"{name}.yaml") for name in ("paper", "one-rate"))
    assert (one.run, one.overrides, one.search) == (paper.run, paper.overrides, None)
    assert one.settings == {name: paper.settings[name] for name in paper.studies["Methods"].settings}
    quarters = {"a quarter of the weight": "RL-PLUS", "a quarter of MIS alone": "without the exploration weight"}
    assert {name: method for name, method in one.methods.items() if name not in quarters} == {
        name: paper.methods[name] for name in one.methods if name not in quarters
    }
    for name, whole in quarters.items():
        assert one.methods[name].preset == paper.methods[whole].preset
        assert one.methods[name].overrides == {"algorithm.objective.external_coef": 0.25}
    runner = Runner(one, EXPERIMENTS / "compare" / one.run, tmp_path)
    assert {runner.config_of(run).train.lr for run in runner.all()} == {1e-3}


@pytest.mark.parametrize(
    "name", ["demonstrations", "distillation", "prefixes", "segments", "updates", "variants", "words"]
)
def test_a_comparison_is_the_one_whose_results_are_committed(name: str, tmp_path: Path) -> None:
    """It was fixed before its runs: docs/decisions has each."""
    folder = EXPERIMENTS / "compare"
    comparison = load_comparison(folder / f"{name}.yaml")
    Runner(comparison, folder / comparison.run, tmp_path).check()
    assert comparison == Results.load(folder / f"results/{name}.json").comparison


def test_every_search_of_the_comparison_for_a_gpu_has_a_configuration(tmp_path: Path) -> None:
    comparison = load_comparison(GSM8K)
    runner, search = Runner(comparison, GSM8K.parent / comparison.run, tmp_path), comparison.search
    assert search is not None
    for method in comparison.methods:
        *_, searched = runner.chain("", search.seed, method, search.rates)
        config, reported = (runner.config_of(run) for run in (searched, runner.chain("", 0, method)[-1]))
        assert (config.train.lr, config.train.steps, reported.train.steps) == (1e-5, 100, 300)
        assert config.evaluation.data.path != reported.evaluation.data.path
