"""The interleaved recipe: which demonstrations wait, which are taken when, and that a run resumes with them."""

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

from rlplus.train.recipe.interleaved import InterleavedRecipe
from rlplus.train.trainer import Run

RELIFT = {"preset": "relift", "recipe": {"batch": 5}}


def test_the_newest_demonstrations_of_unsolved_prompts_come_first(run: Run, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm=RELIFT, train={"prompts_per_step": 4, "prompts_per_update": 2})
    steps = []
    for step, (rewards, without) in enumerate(
        [
            ([[0, 0], [1, 0], [0, 0], [0, 0]], [2]),  # 0 and 3 wait: 2 has no demonstration
            ([[0, 0], [0, 0], [0, 1], [1, 1]], []),  # and 4, 5
            ([[1, 0], [0, 0], [0, 0], [1, 0]], []),  # and 9, 10, which makes six
            ([[0, 0], [0, 0], [0, 0], [0, 0]], []),  # and 12 to 15: five with the one that is left
        ]
    ):
        drawn = drawn_batch(rewards, first=4 * step, without=without)
        assert recipe.collect(lambda drawn=drawn: drawn) is drawn
        recipe.credit(drawn)
        updates = recipe.updates(drawn)
        steps.append((shown(updates[2].samples) if len(updates) > 2 else None, recipe.metrics()))
        assert all(update.algorithm == recipe.algorithm for update in updates)
        assert [len(update.samples) for update in updates[:2]] == [4, 4]
        assert not any(shown(update.samples) for update in updates[:2])
    assert [taken for taken, _ in steps] == [None, None, [0, 4, 5, 9, 10], [3, 12, 13, 14, 15]]
    counts = [(seen["sft/waiting"][0], seen["sft/updates"][0]) for _, seen in steps]
    assert counts == [(2, 0), (4, 0), (1, 1), (0, 1)]


def test_a_prompt_whose_rollouts_were_not_graded_does_not_count_as_unsolved(run: Run, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm=RELIFT)
    drawn = drawn_batch([[0, 0], [0, 0]])
    drawn.samples = drawn.samples[2:]  # the grader failed on the first prompt's
    recipe.collect(lambda: drawn)
    assert [example.index for _, example in recipe.waiting] == [1]


def test_a_state_of_demonstrations_that_wait_does_not_change_with_later_steps(run: Run, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm=RELIFT)
    recipe.collect(lambda: drawn_batch([[0], [0]]))
    state = recipe.state()
    recipe.collect(lambda: drawn_batch([[0], [0]], first=2))
    recipe.restore(state)
    assert [example.index for _, example in recipe.waiting] == [0, 1]
    recipe.collect(lambda: drawn_batch([[0]], first=4))
    assert [place for place, _ in recipe.waiting] == [(-1, 0), (-1, 1), (-2, 0)]
    assert len(state[1]) == 2


def test_relift_is_its_two_losses(run: Run, tmp_path: Path) -> None:
    """Rollouts: no clip, no std, a fixed divisor. Demonstrations: the mean over tokens. Each with an entropy bonus."""
    recipe = recipe_of(tmp_path, algorithm={"preset": "relift", "recipe": {"batch": 2}})
    drawn = drawn_batch([[0, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]])
    drawn.examples[1] = replace(drawn.examples[1], demonstration=(7, 8, 9, 10, 11))  # the mean is one of tokens
    recipe.collect(lambda: drawn)
    recipe.credit(drawn)
    rollouts, supervised = recipe.updates(drawn)
    assert shown(supervised.samples) == [1, 2]

    def loss(lm: Any) -> Tensor:
        logp, entropy = (
            torch.cat(parts) for parts in zip(*(tokens_of(lm, s) for s in supervised.samples), strict=True)
        )
        limit = run.config.rollout.max_response_length
        sampled = torch.cat([tokens_of(lm, sample)[1] for sample in rollouts.samples])
        bonus = 1e-3 * (sampled.mean() + entropy.mean())
        return sampled_loss(lm, rollouts.samples, limit) - logp.mean() - bonus

    check_gradient(run, packed_updates(run, rollouts, supervised), loss)


@pytest.mark.slow
def test_a_run_interleaves_its_updates_and_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer grows by the prompts that no rollout solved and shrinks by updates of five."""
    rows = resumed(tmp_path, monkeypatch, RELIFT, InterleavedRecipe)
    waiting = 0.0
    for row in rows:
        waiting += 4 * row["batch/solve_none"] - 5 * row["sft/updates"]
        assert row["sft/waiting"] == waiting < 5
        assert (row.get("actor/prob_external", 0.0) > 0) == (row["sft/updates"] == 1)
        assert "reward/external" not in row
    assert 5 <= sum(row["sft/updates"] for row in rows) < 20
