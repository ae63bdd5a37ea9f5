"""Learning rates and lengths of runs: schedules, warm-ups, epochs, and what a resume makes of them."""

import shutil
from collections import Counter
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import changed, same
from run_files import problems, write_minimal
from trainer_runs import metrics, run_config
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)
from update_cases import batch_of_samples, packed

from rlplus.common.terminal import Terminal
from rlplus.loss import Objective
from rlplus.tools.plan import make_cluster, make_plan
from rlplus.tools.plan.plan_text import show
from rlplus.train.config import Config, TrainConfig, load_config
from rlplus.train.data import PromptSampler
from rlplus.train.learner.learner import learning_rate
from rlplus.train.recipe import Batch, Recipe, Update, set_advantages
from rlplus.train.trainer import open_run, train


def rates(updates: int, **fields: Any) -> list[float]:
    """The rates of that many updates, and of three more."""
    train = TrainConfig(steps=updates, lr=1.0, **fields)
    return [learning_rate(train, made, updates) for made in range(updates + 3)]


SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": lambda optimizer, warmup, updates: get_constant_schedule_with_warmup(optimizer, warmup),
    "linear": get_linear_schedule_with_warmup,
    "cosine": lambda optimizer, warmup, updates: get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, updates, min_lr_rate=0.1
    ),
}


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_are_those_of_transformers(kind: str, warmup: int) -> None:
    """But in the warm-up, which begins above 0, and beyond the end, where their cosine would go up again."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = SCHEDULES[kind](optimizer, warmup, 10)
    want = []
    for _ in range(10):
        want.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    least = {"lr_min_ratio": 0.1} if kind == "cosine" else {}
    got = rates(10, lr_schedule=kind, warmup_steps=warmup, **least)
    assert got[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    assert got[warmup:10] == pytest.approx(want[warmup:])
    assert got[10:] == pytest.approx([{"constant": 1.0, "linear": 0.0, "cosine": 0.1}[kind]] * 3)


def test_a_linear_schedule_has_a_minimum_too() -> None:
    got = rates(4, lr_schedule="linear", lr_min_ratio=0.2)
    assert got == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(("ratio", "updates", "warmup"), [(0.1, 30, 3), (0.1, 31, 4), (0.07, 100, 7), (0.0, 5, 0)])
def test_a_warmup_ratio_counts_updates_rounded_up(ratio: float, updates: int, warmup: int) -> None:
    assert rates(updates, warmup_ratio=ratio) == rates(updates, warmup_steps=warmup)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.steps=null"], "train: want exactly one of steps and epochs; got neither"),
        (["train.epochs=2"], "train: want exactly one of steps and epochs; got both"),
        (
            ["train.warmup_steps=2", "train.warmup_ratio=0.1"],
            "train: want at most one of warmup_steps and warmup_ratio; got warmup_steps 2, warmup_ratio 0.1",
        ),
        *(
            (
                ["train.generated_tokens=99", option],
                "train: lr_schedule cosine and linear and warmup_ratio want the number of updates, which "
                "generated_tokens makes unknown: leave it out",
            )
            for option in ("train.lr_schedule=cosine", "train.lr_schedule=linear", "train.warmup_ratio=0.1")
        ),
        (
            ["train.lr_schedule=cosin"],
            "train.lr_schedule: want 'constant', 'cosine' or 'linear'; got 'cosin' (str); nearest: cosine",
        ),
    ],
)
def test_contradictions(tmp_path: Path, overrides: list[str], line: str) -> None:
    assert problems(write_minimal(tmp_path), *overrides) == [line]


COSINE = {"steps": 3, "prompts_per_update": 2, "lr_schedule": "cosine", "lr_min_ratio": 0.1, "warmup_ratio": 0.3}


class Again(Recipe):
    """Each step's update twice."""

    def updates(self, batch: Batch) -> list[Update]:
        return super().updates(batch) * 2


def lr_of_updates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Learning rates that AdamW steps with from now on."""
    seen: list[float] = []
    step = torch.optim.AdamW.step

    def watched(optimizer: Any, *args: Any, **options: Any) -> Any:
        seen.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    return seen


def test_a_run_steps_with_the_scheduled_rates_and_resumes_in_their_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mini-batches per step, and a warm-up of two updates."""
    want = [0.5e-3, 1e-3, *(1e-3 * (0.1 + 0.9 * (1 + cos(pi * i / 4)) / 2) for i in range(4))]
    config = run_config(tmp_path, train=COSINE, checkpoint={"every": 1, "keep": 9})
    seen = lr_of_updates(monkeypatch)
    whole = train(config)
    assert seen == pytest.approx(want)
    assert [row["actor/lr"] for row in metrics(whole)] == pytest.approx([sum(want[i : i + 2]) / 2 for i in (0, 2, 4)])
    rows = metrics(whole)
    kept = shutil.copytree(whole, tmp_path / "kept")
    seen.clear()
    train(config, resume="step-000001")
    assert seen == pytest.approx(want[2:])
    assert metrics(whole) == rows
    assert same(kept, whole)


@pytest.mark.slow
def test_updates_that_a_recipe_adds_end_at_the_minimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = lr_of_updates(monkeypatch)
    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_recipe", Again)
    train(run_config(tmp_path, train=COSINE))
    assert len(seen) == 12
    assert seen[6:] == pytest.approx([1e-4] * 6)


@pytest.mark.slow
def test_a_run_of_another_length_goes_on_with_its_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(tmp_path, train={"steps": 1, "lr_schedule": "linear"})
    train(config)
    seen = lr_of_updates(monkeypatch)
    train(changed(config, "train", steps=4), resume="newest")
    assert seen == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3])
    assert "its learning rate is that of a run of the new length" in capsys.readouterr().err.replace("\n", " ")


def test_a_skipped_update_keeps_its_rate(tmp_path: Path) -> None:
    with open_run(run_config(tmp_path, train={"steps": 4, "lr_schedule": "linear"})) as run:
        lrs, applied = [], []
        for finite in (True, False, True):
            samples = batch_of_samples()
            set_advantages(samples, run.recipe.algorithm)
            batches = packed(run, samples)
            if not finite:
                batches[-1].old_logprob = torch.full_like(batches[-1].advantage, -torch.inf)
            run.policy.backward(batches, run.policy.loss_of(Objective()))
            lrs.append(run.policy.lr)
            applied.append(run.policy.step())
    assert applied == [True, False, True]
    assert lrs == pytest.approx([1e-3, 0.75e-3, 0.75e-3])


# ---- epochs


@pytest.mark.parametrize(
    ("epochs", "prompts", "batch", "steps"), [(1, 6, 4, 2), (2, 6, 4, 3), (3, 6, 6, 3), (1, 7, 2, 4)]
)
def test_an_epoch_draws_every_prompt(epochs: int, prompts: int, batch: int, steps: int) -> None:
    """In full steps: none is left out, and fewer than a step's prompts come once more."""
    train = TrainConfig(epochs=epochs, prompts_per_step=batch)
    assert train.steps_of(prompts) == steps
    sampler = PromptSampler(prompts, batch, seed=0)
    drawn = Counter(index for _ in range(steps) for index in sampler.next())
    assert min(drawn.values()) == epochs
    assert len(drawn) == prompts
    assert drawn.total() - epochs * prompts < batch


@pytest.mark.slow
def test_a_run_of_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps, learning rates, messages and resume; a finished run may get another epoch."""
    fields: dict[str, Any] = {"steps": None, "epochs": 2, "prompts_per_step": 4, "lr_schedule": "linear"}
    config = run_config(tmp_path, train=fields, checkpoint={"every": 1, "keep": 9})
    seen = lr_of_updates(monkeypatch)
    folder = train(config)
    said = capsys.readouterr().err
    assert "2 epochs of 6 prompts: 3 steps" in said
    assert "100% step 3 of 3  epoch 2.00" in said
    rows = metrics(folder)
    assert [row["epoch"] for row in rows] == pytest.approx([2 / 3, 4 / 3, 2])
    assert seen == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert load_config(folder / "config.yaml") == config
    kept = shutil.copytree(folder, tmp_path / "kept")
    train(config, resume="step-000002")
    assert same(kept, folder)
    assert metrics(folder) == rows
    train(config, resume="newest")
    assert "nothing to do: this run is finished, 3 steps" in capsys.readouterr().err.replace("\n", " ")
    assert len(metrics(train(changed(config, "train", epochs=3), resume="newest"))) == 5


def test_a_run_of_steps_does_not_count_epochs(tmp_path: Path) -> None:
    assert "epoch" not in metrics(train(run_config(tmp_path, train={"steps": 1})))[0]


def test_a_plan_without_the_data_does_not_count_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Config = run_config(tmp_path, train={"steps": None, "epochs": 2})
    show(make_plan(config, make_cluster(1, "a100-80g")), Terminal())
    assert "steps, hours" not in capsys.readouterr().out
    show(make_plan(run_config(tmp_path), make_cluster(1, "a100-80g")), Terminal())
    assert "2 steps, hours" in capsys.readouterr().out
