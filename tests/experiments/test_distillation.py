"""Distillation teaches a skill: from a teacher that has it, and from demonstrations that the policy itself can read."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from trainer_runs import metrics

from experiments.demo.demo_run import CONFIG
from experiments.toy import prepare
from experiments.toy.base_model import ToyBase
from rlplus.train.config import load_config
from rlplus.train.trainer import train

SKILLED = ToyBase(first_share=1.0, scratchpad_share=1.0, scratchpad_slip=0.0)  # it always uses its scratchpad
UNSKILLED = ToyBase(scratchpad_share=0.05, reads=True)
DIRECT = 7  # tokens of an answer alone; a scratchpad has 13 for two numbers and 31 for five
EASY_SHARE = 0.75  # among the problems to train on; hard ones are right by chance once in 1024 times


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    prepare(folder / "teacher", 0, SKILLED, problems=1)
    prepare(folder / "student", 0, UNSKILLED, problems=1024)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gkd", "opsd"])
def test_a_model_learns_to_use_a_scratchpad_from_a_teacher_that_does(bases: Path, tmp_path: Path, preset: str) -> None:
    student = bases / "student"
    teacher = {"teacher": str(bases / "teacher/model")} if preset == "gkd" else {"template": "{demonstration}{prompt}"}
    settings: dict[str, Any] = {
        "output_dir": tmp_path / "run",
        "model.path": student / "model",
        "data.path": student / "train.jsonl",
        "rollout.engine": "transformers",
        "rollout.group_size": 2,
        "algorithm.preset": preset,
        "train.generated_tokens": "null",
        "train.steps": 60,
    } | {f"algorithm.recipe.{key}": f'"{value}"' for key, value in teacher.items()}
    train(load_config(CONFIG, [f"{key}={value}" for key, value in settings.items()]))
    rows = metrics(tmp_path / "run")
    assert fmean(row["reward/mean"] for row in rows[:3]) < EASY_SHARE
    assert fmean(row["reward/mean"] for row in rows[-10:]) > (1 + EASY_SHARE) / 2  # so more than half of the hard ones
    assert fmean(row["response_length/mean"] for row in rows[:3]) < DIRECT + 2
    assert fmean(row["response_length/mean"] for row in rows[-10:]) > 2 * DIRECT
