"""Runs that follow each other in one configuration: what each is, what is wrong with it, and where a resume goes on."""

import gc
import json
import os
import re
import signal
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import yaml
from engine_runs import model
from run_files import MINIMAL, problems
from trainer_runs import metrics, run_config

from rlplus.tools.cli import main
from rlplus.train.config import load_config, load_stages
from rlplus.train.learner import Policy
from rlplus.train.trainer import loop, open_run
from rlplus.train.trainer.loop import train_step

TWO: list[dict[str, Any]] = [
    {"algorithm": {"preset": "sft"}, "train": {"epochs": 3, "lr": 5e-5}},
    {"train": {"steps": 7}, "data": {"path": "other.jsonl"}},
]


def write(folder: Path, stages: Any, **sections: Any) -> Path:
    base = MINIMAL | {"train": {"prompts_per_step": 64}} | sections
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base | {"stages": stages}))
    return path


def test_a_stage_is_laid_over_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    first, second = load_stages(
        path, ["train.betas=[0.9, 0.95]", "data.path=mine", "stages.2.train.lr=1e-4", "stages.2.data.limit=9"]
    )
    assert (first.output_dir, second.output_dir) == ("out/stage-1", "out/stage-2")
    assert first.model.scratch is not None
    assert (second.model.scratch, second.model.path) == (None, "out/stage-1/model")
    assert second.model.dtype == "float32"
    assert (first.algorithm.preset, second.algorithm.preset) == ("sft", "rlplus")
    assert (first.train.epochs, first.train.lr, second.train.steps, second.train.lr) == (3, 5e-5, 7, 1e-4)
    assert first.train.prompts_per_step == second.train.prompts_per_step == 64
    assert first.train.betas == second.train.betas == (0.9, 0.95)
    assert (first.data.path, second.data.path) == ("mine", "other.jsonl")
    assert (first.data.limit, second.data.limit, second.data.demonstration) == (None, 9, "solution")
    assert load_config(path) == load_stages(path)[1]


def test_sft_is_followed_by_the_authors_grpo() -> None:
    """Their script's, whose loss the paper does not state (docs/systems.md)."""
    stages = load_stages(processes.ROOT / "experiments/sft+grpo.yaml")
    assert [stage.algorithm.preset for stage in stages] == ["sft", "grpo-official"]


def test_one_stage_has_a_folder_too(tmp_path: Path) -> None:
    (only,) = load_stages(write(tmp_path, [{"train": {"steps": 2}}]))
    assert only.output_dir == "out/stage-1"


@pytest.mark.parametrize(
    ("stages", "overrides", "lines"),
    [
        (
            [*TWO[:1], {"train": {"steps": 1, "lrr": 1.0}}],
            [],
            ["stages.2.train.lrr: unknown key; nearest: stages.2.train.lr"],
        ),
        (
            [*TWO[:1], {"train": {"steps": "x"}}],
            [],
            ["stages.2.train.steps: want a valid integer; got 'x' (str)"],
        ),
        (TWO, ["stages.1.train.lr=fast"], ["stages.1.train.lr: want a valid number; got 'fast' (str)"]),
        (TWO, ["train.lrr=1"], ["train.lrr: unknown key; nearest: train.lr"]),
        (TWO, ["train.max_nonfinite=x"], ["train.max_nonfinite: want a valid integer; got 'x' (str)"]),
        (TWO, ["stages.1.train.steps=4"], ["stages.1.train: want exactly one of steps and epochs; got both"]),
        (TWO, ["stages.1.stages=[]"], ["stages.1.stages: unknown key; nearest: stages.1.stages"]),
        (
            TWO,
            ["stages.2.rollout.group_size=1"],
            [
                "stages.2: algorithm.preset rlplus gives one place of each group to a demonstration: "
                "want rollout.group_size >= 2; got 1"
            ],
        ),
        (
            TWO,
            ["stages.2.model.path=x", "stages.1.output_dir=y"],
            [
                "stages.1.output_dir: leave it out, it is stage-1 in that of the file",
                "stages.2.model.path: leave it out, the stage starts from the model of stage 1",
            ],
        ),
    ],
)
def test_problems_name_the_stage(tmp_path: Path, stages: Any, overrides: list[str], lines: list[str]) -> None:
    assert problems(write(tmp_path, stages), *overrides) == lines


@pytest.mark.parametrize(
    ("stages", "override", "message"),
    [
        ([], "data.limit=1", "stages: want a list of sections of keys and values; got '[]'"),
        ({"train": {}}, "data.limit=1", "stages: want a list of sections of keys and values; got"),
        (
            TWO,
            "stages.3.train.lr=1",
            "want an override of stage 1 or 2 as stages.1.key=value; got 'stages.3.train.lr=1'",
        ),
        (TWO, "stages.train.lr=1", "want an override of stage 1 or 2 as"),
        (
            [{"train": {"steps": 1}}, {"train": {"steps": 2}}],
            "train.steps=3",
            "override 'train.steps=3' would have no effect: every stage has a value, want stages.1.train.steps=",
        ),
    ],
)
def test_what_is_no_list_or_changes_nothing_is_refused(
    tmp_path: Path, stages: Any, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_stages(write(tmp_path, stages), [override])


# ---- runs


@pytest.fixture
def two_stages(tmp_path: Path) -> Path:
    """Supervised on all prompts, and GRPO with demonstrations on other ones."""
    base = yaml.safe_load(run_config(tmp_path).to_yaml())
    other = [{"prompt": f"{i}*2=", "answer": str(2 * i), "demonstration": f"<{2 * i}>"} for i in range(4)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    base["train"] |= {"steps": None}
    base["stages"] = [
        {
            "algorithm": {"preset": "sft"},
            "train": {"epochs": 1, "lr_schedule": "cosine", "warmup_ratio": 0.5},
        },
        {"train": {"steps": 3}, "data": {"path": str(tmp_path / "other.jsonl")}},
    ]
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(base))
    return path


@pytest.mark.slow
def test_a_kill_in_the_second_stage_resumes_there(
    two_stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies: list[Any] = []
    build = Policy.__init__

    def watched(policy: Policy, *args: Any, **options: Any) -> None:
        assert all(reference() is None for reference in policies), "the last stage's model is still in memory"
        build(policy, *args, **options)
        policies.append(weakref.ref(next(policy.engine.module.parameters())))

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "__init__", watched)
        assert main(["train", str(two_stages), f"output_dir={tmp_path / 'whole'}"]) == 0
    assert len(policies) == 2
    whole = tmp_path / "whole"
    rows = [metrics(whole / name) for name in ("stage-1", "stage-2")]
    assert [len(part) for part in rows] == [2, 3]
    assert "reward/internal" not in rows[0][0]
    started = yaml.safe_load((whole / "stage-2/config.yaml").read_text())
    assert started["model"]["path"] == f"{whole}/stage-1/model"
    assert not torch.equal(*(model(whole / name)["model.norm.weight"] for name in ("stage-1", "stage-2")))
    score, calls = loop.score, []

    def kill_in_the_second(samples: Sequence[Any], *rest: Any) -> None:
        calls.append(len(samples))
        if len(calls) == 2 + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        score(samples, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.trainer.loop.score", kill_in_the_second)
        assert main(["train", str(two_stages), f"output_dir={tmp_path / 'parts'}"]) == 143
    parts = tmp_path / "parts"
    assert (parts / "stage-2/checkpoints/latest").read_text() == "step-000001"
    first = (parts / "stage-1/model/model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["train", str(two_stages), f"output_dir={parts}"]) == 2
    assert f"stage 2: {parts}/stage-2 already holds a run, at step-000001" in capsys.readouterr().err.replace("\n", "")
    assert main(["train", str(two_stages), f"output_dir={parts}", "--resume"]) == 0
    assert (parts / "stage-1/model/model.safetensors").stat().st_mtime_ns == first
    for name, part in zip(("stage-1", "stage-2"), rows, strict=True):
        one, other = model(whole / name), model(parts / name)
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert metrics(parts / name) == part
    assert main(["eval", str(two_stages), f"output_dir={parts}"]) == 2
    assert "want evaluation.data" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("thawing")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_model_outlives_its_run(tmp_path: Path, zero: int) -> None:
    config = run_config(tmp_path, train={"steps": 1, "zero_stage": zero})
    with open_run(config) as run:
        train_step(run, None)
        model = weakref.ref(run.policy.engine.module)
    del run
    gc.collect()
    assert model() is None


@pytest.mark.slow
def test_a_kill_in_the_first_stage_resumes_there_and_goes_on(
    two_stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, calls = loop.score, []

    def kill(samples: Sequence[Any], *rest: Any) -> None:
        calls.append(len(samples))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        score(samples, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.trainer.loop.score", kill)
        assert main(["train", str(two_stages)]) == 143
    assert not (tmp_path / "run/stage-2").exists()
    assert main(["train", str(two_stages), "--resume"]) == 0
    assert len(metrics(tmp_path / "run/stage-2")) == 3


def test_a_plan_has_each_stage_and_names_it(two_stages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before there is a model of the first: with that from which the first one starts."""
    options = ["plan", str(two_stages), "--gpu", "a100-80g", "--gpus", "1"]
    assert main(options) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^Stage (\d)$", said, flags=re.MULTILINE) == ["1", "2"]
    assert said.count("It fits.") == 2
    assert main([*options, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["stages"]
    assert [plan["fits"] for plan in plans] == [True, True]
    assert plans[0]["engine_memory"] == {}
    assert main([*options, "stages.2.train.sequence_parallel=2"]) == 2
    assert "stage 2: want train.sequence_parallel a divisor of the 1 ranks; got 2" in capsys.readouterr().err


def test_files_of_every_stage_are_looked_for_first(
    two_stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").unlink()
    assert main(["train", str(two_stages)]) == 2
    assert "stage 2: want a data file; got data.path" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
