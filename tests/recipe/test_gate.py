"""The gated recipe: whose demonstrations are trained on, with which loss, and that a run resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_cases import (
    check_gradient,
    drawn_batch,
    packed_updates,
    recipe_of,
    resumed,
    sampled_loss,
    shown,
    tokens_of,
)
from torch import Tensor

from rlplus.train.recipe.gate import GateRecipe
from rlplus.train.trainer import Run


@pytest.mark.parametrize("solved", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_the_gate_shows_what_was_solved_too_rarely(run: Run, tmp_path: Path, solved: int, keep: bool) -> None:
    algorithm = {"preset": "hpt", "recipe": {"solved": solved, "keep": keep}}
    recipe = recipe_of(tmp_path, algorithm=algorithm, train={"prompts_per_step": 5, "prompts_per_update": 5})
    drawn = drawn_batch([[0, 0], [1, 0], [0, 0], [1, 1], [0, 0]], without=[2])
    drawn.samples = [sample for sample in drawn.samples if sample.group != 4]  # the grader failed on them
    gated = [0, 1] if solved else [0]
    collected = recipe.collect(lambda: drawn)
    recipe.credit(collected)
    (update,) = recipe.updates(collected)
    assert shown(update.samples) == gated
    for group in range(5):
        rollouts = [s for s in update.samples if s.group == group and not s.demonstration]
        assert len(rollouts) == (0 if group == 4 or (group in gated and not keep) else 2)
    assert recipe.metrics() == {"gate/demonstrated": (len(gated), 5)}


@pytest.mark.parametrize("keep", [False, True])
def test_rlplus_takes_demonstrations_through_the_gate(run: Run, tmp_path: Path, keep: bool) -> None:
    """Into the group: it stands out among rollouts that failed; alone, its advantage is its reward."""
    algorithm = {"preset": "rlplus", "normalize_std": False, "recipe": {"name": "gate", "keep": keep}}
    recipe = recipe_of(tmp_path, algorithm=algorithm)
    collected = recipe.collect(lambda: drawn_batch([[0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 0, 1]]))
    recipe.credit(collected)
    advantages = {s.group: s.advantage for s in collected.samples if s.demonstration}
    assert advantages == {0: 0.75 if keep else 1.0}
    assert [s.advantage for s in collected.samples if s.group == 1] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_hpt_is_its_two_losses_in_one_update(run: Run, tmp_path: Path) -> None:
    algorithm = {"preset": "hpt", "objective": {"external_coef": 0.3}}
    recipe = recipe_of(tmp_path, algorithm=algorithm)
    drawn = drawn_batch([[0, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]])
    drawn.examples[1] = replace(drawn.examples[1], demonstration=(7, 8, 9, 10, 11))
    collected = recipe.collect(lambda: drawn)
    recipe.credit(collected)
    (update,) = recipe.updates(collected)

    def loss(lm: Any) -> Tensor:
        limit = run.config.rollout.max_response_length
        rollouts = [s for s in update.samples if not s.demonstration]
        demonstrations = [tokens_of(lm, s) for s in update.samples if s.demonstration]
        entropies = [tokens_of(lm, s)[1] for s in update.samples]
        supervised = torch.cat([logp for logp, _ in demonstrations]).mean()
        return sampled_loss(lm, rollouts, limit) - 0.3 * supervised - 1e-3 * torch.cat(entropies).mean()

    assert len([s for s in update.samples if s.demonstration]) == 2
    check_gradient(run, packed_updates(run, update), loss)


def test_superrl_is_grpo_and_the_likelihood_of_what_failed(run: Run, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm={"preset": "superrl"})
    collected = recipe.collect(lambda: drawn_batch([[0, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]]))
    recipe.credit(collected)
    (update,) = recipe.updates(collected)

    def loss(lm: Any) -> Tensor:
        rewards = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.float64)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        rollouts = [tokens_of(lm, s)[0].mean() for s in update.samples if not s.demonstration]
        demonstrations = [tokens_of(lm, s)[0].mean() for s in update.samples if s.demonstration]
        return -(advantages.flatten() * torch.stack(rollouts)).mean() - torch.stack(demonstrations).mean()

    check_gradient(run, packed_updates(run, update), loss)


RLPLUS = {"preset": "rlplus", "recipe": {"name": "gate", "keep": True}}


@pytest.mark.parametrize("algorithm", [{"preset": "hpt"}, pytest.param(RLPLUS, marks=pytest.mark.slow)])
def test_a_run_goes_through_the_gate_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """The prompts that no rollout solved, all of which have a demonstration, and no others."""
    rows = resumed(tmp_path, monkeypatch, algorithm, GateRecipe, steps=10)
    for row in rows:
        assert row["gate/demonstrated"] == row["batch/solve_none"]
        assert (row.get("actor/prob_external", 0.0) > 0) == (row["batch/solve_none"] > 0)
        assert "reward/external" not in row
    assert len({row["gate/demonstrated"] for row in rows}) > 2
