"""The weight of demonstrations from step to step: schedules, and the share of gradients that one of them follows."""

import shutil
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same
from run_files import problems, write_minimal
from trainer_runs import metrics, run_config
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl
from update_cases import batch_of_samples, packed

from rlplus.loss import Objective
from rlplus.loss.backends.triton import coefficients
from rlplus.train.algorithm import ALGORITHMS, ExternalSchedule
from rlplus.train.algorithm.external_schedule import external_share
from rlplus.train.config import AlgorithmConfig, load_config
from rlplus.train.learner import Policy
from rlplus.train.recipe import set_advantages
from rlplus.train.trainer import open_run, train


def test_linear_and_cosine_coefficients() -> None:
    """From the objective's to the end, and there it stays."""
    linear, cosine = ExternalSchedule("linear", end=0.5, steps=4), ExternalSchedule("cosine", end=0.0, steps=3)
    assert [linear.coefficient(1.5, step, 1.0) for step in range(6)] == pytest.approx([1.5, 1.25, 1.0, 0.75, 0.5, 0.5])
    want = [2 * (1 + cos(pi * step / 3)) / 2 for step in range(4)]
    assert [cosine.coefficient(2.0, step, 1.0) for step in range(5)] == pytest.approx([*want, 0.0])


def test_a_schedule_changes_the_coefficient_alone() -> None:
    schedule = ExternalSchedule("linear", end=0.0, steps=4)
    algorithm = replace(ALGORITHMS["luffy"], external_schedule=schedule)
    half = algorithm.at_step(2)
    assert half == replace(algorithm, objective=replace(algorithm.objective, external_coef=0.5))
    assert algorithm.at_step(4).objective == replace(algorithm.objective, external="none")
    assert ALGORITHMS["luffy"].at_step(7) is ALGORITHMS["luffy"]


def test_a_share_of_gradients() -> None:
    assert external_share(9.0, 16.0, before=0.3) == pytest.approx(4 / 7)
    assert external_share(0.0, 16.0, before=0.3) == 1.0
    for squares in ((1.0, 0.0), (float("inf"), 1.0), (1.0, float("nan")), (0.0, 0.0)):
        assert external_share(*squares, before=0.3) == 0.3
    assert ExternalSchedule("gradient-norm").coefficient(0.5, 9, 0.25) == 0.125


def test_a_configuration_has_a_schedule(tmp_path: Path) -> None:
    options = ["algorithm.external_schedule.shape=cosine", "algorithm.external_schedule.end=0"]
    options += ["algorithm.external_schedule.steps=300"]
    config = load_config(write_minimal(tmp_path), options)
    assert config.algorithm.resolve().external_schedule == ExternalSchedule("cosine", 0.0, 300)
    assert AlgorithmConfig().resolve().external_schedule is None


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["algorithm.external_schedule.shape=cosine"],
            "algorithm.external_schedule: shape cosine wants end and steps; got end None, steps None",
        ),
        (
            ["algorithm.external_schedule={shape: gradient-norm, end: 0.0}"],
            "algorithm.external_schedule: shape gradient-norm wants neither end nor steps; got end 0.0, steps None",
        ),
        (
            ["algorithm.external_schedule={shape: linear, end: -1.0, steps: 2}"],
            "algorithm.external_schedule: want end a finite number >= 0; got -1.0",
        ),
    ],
)
def test_contradictions(tmp_path: Path, overrides: list[str], line: str) -> None:
    assert problems(write_minimal(tmp_path), *overrides) == [line]


def test_a_run_follows_its_schedule_and_resumes_in_its_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Objective] = []
    loss_of = Policy.loss_of

    def watched(policy: Policy, objective: Objective) -> Any:
        used.append(objective)
        return loss_of(policy, objective)

    monkeypatch.setattr(Policy, "loss_of", watched)
    schedule = {"shape": "linear", "end": 0.0, "steps": 2}
    config = run_config(
        tmp_path,
        train={"steps": 4},
        algorithm={"preset": "grpo-sft", "external_schedule": schedule, "objective": {"entropy_coef": 0.01}},
        checkpoint={"every": 1, "keep": 9},
    )
    folder = train(config)
    rows = metrics(folder)
    assert [row["actor/external_coef"] for row in rows] == [1.0, 0.5, 0.0, 0.0]
    plain = replace(ALGORITHMS["grpo-sft"].objective, entropy_coef=0.01)
    assert used[:2] == [plain, replace(plain, external_coef=0.5)]
    assert used[2:] == [replace(plain, external="none")] * 2
    assert [row["actor/loss_external"] > 0 for row in rows] == [True, True, False, False]
    kept = shutil.copytree(folder, tmp_path / "kept")
    train(config, resume="step-000001")
    assert same(kept, folder)
    assert metrics(folder) == rows


def test_squared_slopes_are_the_logits_gradients(tmp_path: Path) -> None:
    """For both kinds of tokens, without KL and entropy, at a coefficient of 1: in float64 through the logits."""
    with open_run(run_config(tmp_path)) as run:
        samples = batch_of_samples()
        set_advantages(samples, run.recipe.algorithm)
        batches = packed(run, samples)
        objective = replace(run.recipe.algorithm.objective, external_coef=0.25, entropy_coef=0.1)
        outputs = run.policy.backward(batches, run.policy.loss_of(objective))
        got = run.policy.squared_slopes(batches, outputs, objective)
        head = run.policy.engine.module.lm.get_output_embeddings().weight.detach().double()
        hidden: list[torch.Tensor] = []
        for batch in batches:
            run.policy.engine(batch, lambda h, *_, **__: hidden.append(h.detach().double()))
    exact, formula = dict.fromkeys(got, 0.0), dict.fromkeys(got, 0.0)
    for batch, h in zip(batches, hidden, strict=True):
        logits = (h @ head.T).requires_grad_()
        logp = logits.log_softmax(-1).gather(1, batch.target[:, None]).squeeze(1)
        p, old = logp.exp(), logp.exp().detach()
        weight = torch.where(batch.external, 4 * p / (3 * old + 1) * (1 - old).sqrt(), p / old)
        loss = -(batch.token_weight * batch.advantage * weight)
        (slope,) = torch.autograd.grad(loss.sum(), logp, retain_graph=True)
        (dlogits,) = torch.autograd.grad(loss.sum(), logits)
        for kind, rows in (("internal", ~batch.external), ("external", batch.external)):
            exact[kind] += float(dlogits[rows].square().sum())
            formula[kind] += float((slope * (1 - old))[rows].square().sum())
    for kind, value in got.items():
        assert value == pytest.approx(formula[kind], rel=1e-4)
        assert value <= exact[kind] * (1 + 1e-4) <= 2 * value * (1 + 2e-4)


@pytest.mark.slow
def test_a_run_follows_the_gradients_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    algorithm = {"preset": "rlplus", "external_schedule": {"shape": "gradient-norm"}}
    config = run_config(tmp_path, train={"steps": 4}, algorithm=algorithm, checkpoint={"every": 1, "keep": 9})
    folder = train(config)
    rows = metrics(folder)
    coefficients = [row["actor/external_coef"] for row in rows]
    assert coefficients[0] == 1.0
    assert all(0 < coefficient < 1 for coefficient in coefficients[1:])
    assert len(set(coefficients)) == 4
    assert not any("squared" in name for name in rows[0])
    kept = shutil.copytree(folder, tmp_path / "kept")
    train(config, resume="step-000002")
    assert same(kept, folder)
    assert metrics(folder) == rows


def test_a_schedule_compiles_no_kernels() -> None:
    """Coefficients are numbers to Triton, not constants of the program: one program for all steps."""
    objectives = [replace(Objective(), external_coef=value) for value in (1.0, 0.5, 16.0, 1e-3)]
    kinds = [native_specialize_impl(CUDABackend, coefficients(o), False, True, True) for o in objectives]
    assert kinds == kinds[:1] * 4
    assert native_specialize_impl(CUDABackend, (1,), False, True, True) != native_specialize_impl(
        CUDABackend, (2,), False, True, True
    ), "it would tell constants"
