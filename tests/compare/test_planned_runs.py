"""Runs, memory and time that a comparison will take, and the shipped one for a GPU, shrunken to a CPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparisons import EXPERIMENTS

from rlplus.tools.cli import main
from rlplus.tools.compare.comparing import run_comparison
from rlplus.tools.compare.config import load_comparison
from rlplus.tools.compare.launches import Runner
from rlplus.tools.compare.outcomes import Results
from rlplus.tools.compare.planned_runs import plan_comparison
from rlplus.tools.plan import make_cluster, make_plan
from rlplus.train.config import ScratchModel, load_config
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.pretrained import make_scratch_model, write_model

GSM8K = EXPERIMENTS.parent / "configs/compare/gsm8k.yaml"
SIX = ("SFT+GRPO", "GRPO", "LUFFY", "ReLIFT", "p/p_ω", "RL-PLUS")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a tiny model, whose tokenizer has a template for chats."""
    folder, tokenizer = tmp_path / "model", byte_tokenizer()
    scratch = ScratchModel(hidden_size=32, layers=1, heads=1, intermediate_size=64)
    write_model(make_scratch_model(scratch, tokenizer, seed=0), str(folder))
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def run_file(folder: Path, model: str, **train: object) -> Path:
    data = {
        "output_dir": str(folder / "run"),
        "model": {"path": model, "dtype": "float32"},
        "data": {"path": "train.jsonl", "demonstration": "demonstration"},
        "reward": {"kind": "exact_match"},
        "rollout": {"engine": "transformers", "max_response_length": 64},
        "evaluation": {"data": {"path": "test.jsonl"}},
        "train": {"steps": 90, "prompts_per_step": 8, "generated_tokens": None} | train,
    }
    return write(folder / "run.yaml", data)


COMPARISON = {
    "run": "run.yaml",
    "settings": {"all": {}, "short": {"overrides": {"rollout.max_response_length": 32}}},
    "methods": {
        "SFT": {"preset": "sft", "overrides": {"train.steps": 30}},
        "GRPO": {"preset": "grpo"},
        "SFT+GRPO": {"preset": "grpo", "after": "SFT"},
    },
    "studies": {
        "First": {"settings": ["all", "short"], "methods": ["GRPO"], "seeds": 5},
        "Second": {"settings": ["all"], "methods": ["GRPO", "SFT+GRPO"], "seeds": 2},
    },
    "search": {"rates": [1e-4, 1e-3, 1e-2], "seeds": 2, "share": 0.1, "overrides": {"evaluation.data.path": "v.jsonl"}},
}


NO_BASE = "want model.path, the base model that is evaluated and .*; got model.scratch, whose random weights"


def test_the_plan_of_a_comparison_counts_every_run_once(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = run_file(tmp_path, model), write(tmp_path / "compare.yaml", COMPARISON)
    cluster = make_cluster(1, "a100-80g")
    comparison = load_comparison(path)
    planned = plan_comparison(comparison, Runner(comparison, run, tmp_path), cluster)
    found = {(each.setting, each.method): each for each in planned}
    assert {key: (e.runs, e.tries, e.plan.steps, e.tried_steps) for key, e in found.items()} == {
        ("all", "GRPO"): (5, 6, 90, 9),
        ("short", "GRPO"): (5, 6, 90, 9),
        ("all", "SFT"): (2, 6, 30, 3),
        ("all", "SFT+GRPO"): (2, 6, 90, 9),
    }
    for key, changes in (
        (("all", "SFT+GRPO"), ["algorithm.preset=grpo"]),
        (("all", "SFT"), ["algorithm.preset=sft", "train.steps=30"]),
        (("short", "GRPO"), ["algorithm.preset=grpo", "rollout.max_response_length=32"]),
    ):
        plan, each = make_plan(load_config(run, changes), cluster), found[key]
        assert (each.plan.memory.peak, each.plan.seconds) == (plan.memory.peak, plan.seconds)
        assert plan.steps is not None
        steps = each.runs * plan.steps + each.tries * plan.steps / 10
        assert each.hours == pytest.approx(steps * plan.seconds["total"] / 3600)
    assert not (tmp_path / "runs").exists()

    assert main(["plan", str(path), "--gpus", "1", "--gpu", "a100-80g"]) == 0
    shown = capsys.readouterr().out
    assert "Together 38 runs, 0 hours: one run at a time." in shown
    assert main(["plan", str(path), "--gpus", "1", "--gpu", "24g", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["runs"], row["hours"]) for row in rows if row["setting"] == "all"] == [
        ("GRPO", 5, None),  # the speed of such a GPU is not known
        ("SFT", 2, None),
        ("SFT+GRPO", 2, None),
    ]
    assert main(["plan", str(path), "--gpus", "1", "--gpu", "1g"]) == 1
    assert "GRPO in short does not fit: " in capsys.readouterr().out


def test_tries_of_a_method_with_another_ones_rate_are_what_others_start_from(tmp_path: Path, model: str) -> None:
    methods = {
        "X": {"preset": "sft"},
        "Z": {"preset": "sft", "searched_as": "X"},
        "Y": {"preset": "grpo", "after": "Z"},
    }
    studies = {"One": {"settings": ["all"], "methods": ["X", "Z", "Y"], "seeds": 1}}
    path = write(tmp_path / "compare.yaml", COMPARISON | {"methods": methods, "studies": studies})
    comparison = load_comparison(path)
    planned = plan_comparison(
        comparison, Runner(comparison, run_file(tmp_path, model), tmp_path), make_cluster(1, "24g")
    )
    assert {each.method: (each.runs, each.tries, each.tried_steps) for each in planned} == {
        "X": (1, 3 * 2, 9),
        "Z": (1, 2, 9),  # once a seed, at the rate of X
        "Y": (1, 3 * 2, 9),
    }


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--data"], "--data is for a training configuration; .*compare.yaml is a comparison"),
        ({"studies": {}}, [], "does not describe a comparison:\nstudies: "),
        (
            {"settings": {"all": {"prepare": "experiments.toy:prepare"}, "short": {}}},
            [],
            "settings.all: experiments.toy:prepare makes its model, which is not known before: no plan",
        ),
        ({}, ["train.lrr=1"], r"train\.lrr: unknown key; nearest: train\.lr"),
        ({}, ["train.prompts_per_update=3"], "all, Base, seed 0: (?s:.*)prompts_per_update"),
        ({}, ["model.path=null", "model.scratch={hidden_size: 8, layers: 1, heads: 1}"], NO_BASE),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path,
    model: str,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    options: list[str],
    message: str,
) -> None:
    run_file(tmp_path, model)
    path = write(tmp_path / "compare.yaml", COMPARISON | changes)
    assert main(["plan", str(path), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_model_from_scratch_is_no_base(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before a run has a folder: an evaluation of the base would look for a model of the name None."""
    path = run_file(tmp_path, model)
    path.write_text(path.read_text().replace(f"path: {model}", "scratch: {hidden_size: 8, layers: 1, heads: 1}"))
    assert main(["compare", str(path), "--presets", "grpo,sft", "--output", str(tmp_path / "out")]) == 2
    assert re.search(NO_BASE, capsys.readouterr().err)
    assert not (tmp_path / "out/runs").exists()


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ('torchrun "-m', "want --launcher as a shell reads it; got 'torchrun \"-m': No closing quotation"),
        ("torchrun \\", "want --launcher as a shell reads it; got 'torchrun \\\\': No escaped character"),
        (" ", "want --launcher a command, such as \"torchrun --nproc_per_node 8 -m\"; got ' '"),
    ],
)
def test_a_launcher_is_a_command(
    launcher: str, message: str, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file(tmp_path, model)
    path = write(tmp_path / "compare.yaml", COMPARISON)
    assert main(["compare", str(path), "--launcher", launcher, "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(f"rlplus compare: {message}\n")


@pytest.mark.slow
def test_the_comparison_on_gsm8k_runs_shrunken_to_a_cpu(tmp_path: Path, model: str) -> None:
    """The six methods of the paper's regime, through training, export, evaluation and tables."""
    rows = [{"prompt": f"{i}+{i}?", "answer": str(2 * i), "demonstration": f"\\boxed{{{2 * i}}}"} for i in range(16)]
    for name, part in (("train", rows[:8]), ("validation", rows[8:12]), ("test", rows[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    data = yaml.safe_load(GSM8K.read_text()) | {"search": None}
    data["run"] = str(GSM8K.parent / data["run"])
    small = {
        "model.dtype": "float32",
        "model.gradient_checkpointing": False,
        "data.system_prompt": None,
        "validation.data.system_prompt": None,
        "evaluation.data.system_prompt": None,
        "data.path": str(tmp_path / "train.jsonl"),
        "validation.data.path": str(tmp_path / "validation.jsonl"),
        "evaluation.data.path": str(tmp_path / "test.jsonl"),
        "rollout.engine": "transformers",
        "rollout.sleep": False,
        "rollout.max_response_length": 16,
        "train.steps": 2,
        "train.prompts_per_step": 4,
        "train.prompts_per_update": 2,
        "train.tokens_per_micro_batch": 1024,
        "validation.every": 2,
    }
    data["overrides"] |= small
    comparison = load_comparison(path := write(tmp_path / "small.yaml", data), presets=SIX)
    assert set(SIX) <= set(comparison.methods)
    run_comparison(path, tmp_path / "out", presets=SIX, seeds=1, overrides=[f"model.path={model}"])
    results = Results.load(tmp_path / "out/results.json")
    steps = {one.method: one.steps for one in results.outcomes}
    assert steps == {"Base": 0} | dict.fromkeys((*SIX, "SFT"), 2)
    assert all(sum(part.n) == 16 for one in results.outcomes for part in one.results.values())
