"""The replay recipe: which rollouts are kept, which return and how often, their loss, and that a run resumes."""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engine_runs import whole_groups
from recipe_cases import check_gradient, packed_updates, recipe_of, resumed, sampled_loss, tokens_of
from torch import Tensor
from trainer_runs import run_config

from rlplus.train.data import Example, Sample
from rlplus.train.recipe import Ask, Batch, Recipe
from rlplus.train.recipe.replay import Remembered, ReplayRecipe, _draw
from rlplus.train.reward import Score
from rlplus.train.reward.scorer import score
from rlplus.train.trainer import Run, open_run

EXGRPO = {"preset": "exgrpo", "recipe": {"start": 0.0}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that is built and never trained."""
    with open_run(run_config(tmp_path_factory.mktemp("run"), algorithm=EXGRPO)) as run:
        yield run


def step(
    recipe: Recipe, drawn: Sequence[int], right: dict[int, int], logprob: float = -1.0
) -> tuple[list[int], dict[int, Ask], Batch]:
    """A step: the first so many of each prompt's rollouts are right; each has a tenth less logprob than the one before.

    Returns the prompts of the step, what is asked of each, and its samples.
    """
    places = recipe.prompts(drawn)
    examples = [Example(place, (place + 1, 40 + place, 7), "", None) for place in places]
    asks = recipe.ask(examples)
    samples = []
    for group, (place, ask) in enumerate(zip(places, asks, strict=True)):
        for i in range(ask.rollouts):
            reward = float(i < right.get(place, 0))
            prompt, response, logprobs = examples[group].prompt, [9, 10 + i, 20 + place], [logprob - 0.1 * i] * 3
            samples.append(Sample(prompt, response, group, False, False, logprobs, reward=reward))
        if ask.replayed is not None:
            samples.append(ask.replayed)
            samples[-1].group = group
    batch = Batch(examples, samples, 0.0, places)
    assert recipe.collect(lambda: batch) is batch
    return places, dict(zip(places, asks, strict=True)), batch


def test_prompts_that_were_solved_in_part_return_with_what_solved_them(run: Run, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm=EXGRPO)  # groups of 4, at most half of a step's prompts
    drawn = [0, 1, 2, 3]
    places, asks, _ = step(recipe, drawn, {0: 1})  # the first that is right starts it
    assert sorted(places) == drawn
    assert all(ask == Ask(4, False) for ask in asks.values())
    assert recipe.metrics() == {"replay/waiting": (0, 1), "replay/share": (0, 4)}
    step(recipe, drawn, {0: 1, 1: 2, 2: 4}, logprob=-2.0)
    assert recipe.metrics()["replay/waiting"] == (2, 1)
    places, asks, batch = step(recipe, [1, 4, 5, 6], {0: 1, 1: 3, 4: 2}, logprob=-1.5)
    assert sorted(places) == [0, 1, 4, 5], "0 in the place of the last one; 1 is there anyway"
    assert recipe.metrics() == {"replay/waiting": (3, 1), "replay/share": (1, 4)}
    assert {place: ask.rollouts for place, ask in asks.items()} == {0: 3, 1: 4, 4: 4, 5: 4}
    (replayed,) = (sample for sample in batch.samples if sample.demonstration)
    assert (replayed.prompt, list(replayed.response), replayed.reward) == ((1, 40, 7), [9, 10, 20], 1.0)
    assert list(replayed.behavior_logprob or ()) == [-2.0] * 3, "those that it was sampled with"
    assert replayed.engine_logprob is None
    # 0 was solved by two of four now, and is kept with the likelier of both rollouts, as 1 is; then all solve 1.
    assert isinstance(recipe, ReplayRecipe)
    assert recipe.solved == {0: 2, 1: 3, 4: 2}
    assert [(place, list(recipe.remembered[place].logprob)) for place in (0, 1, 4)] == [
        (i, [-1.5] * 3) for i in (0, 1, 4)
    ]
    step(recipe, [0, 1, 4, 7], {0: 1, 1: 4}, logprob=-9.0)
    assert recipe.solved == {0: 1, 4: 2}, "what none solved stays what it was"
    assert list(recipe.remembered[0].logprob) == [-1.5] * 3


def test_a_rollout_that_was_right_in_part_is_not_kept(run: Run, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm=EXGRPO)
    assert isinstance(recipe, ReplayRecipe)
    recipe.started = True
    samples = [Sample((1,), [9], 0, False, False, [-1.0], reward=reward) for reward in (0.9, 0.0)]
    recipe.collect(lambda: Batch([], samples, 0.0, [0]))
    assert (recipe.solved, recipe.remembered) == ({}, {})


def test_nothing_is_kept_before_enough_is_right(run: Run, tmp_path: Path) -> None:
    """As many as .35 of a step are not more than that; the step that has more only starts it."""
    recipe = recipe_of(tmp_path, algorithm={"preset": "exgrpo"}, rollout={"max_response_length": 8, "group_size": 5})
    assert isinstance(recipe, ReplayRecipe)
    for right, started, kept in (((3, 4, 0, 0), False, 0), ((3, 5, 0, 0), True, 0), ((1, 0, 0, 0), True, 1)):
        step(recipe, [0, 1, 2, 3], dict(enumerate(right)))
        assert (recipe.started, len(recipe.remembered)) == (started, kept)


def test_a_rollout_in_a_checkpoint_of_0_3_0_is_read() -> None:
    one = Remembered([9, 10], [-0.5, -1.0], 1.0)
    older = pickle.dumps(one, protocol=0).replace(
        b"rlplus.train.recipe.replay\nRemembered\n", b"rlplus.train.recipe.replay\nKept\n"
    )
    assert b"Kept" in older
    assert pickle.loads(older) == one


def test_prompts_are_drawn_by_how_often_they_were_solved() -> None:
    """exp(-(k - n/2)^2 / 2) over the numbers k that there are, then any prompt of that number: Pearson's chi-square."""
    buckets, draws, random = {1: [0], 2: [1, 2], 4: [3, 4, 5], 6: [6], 7: [7]}, 20_000, Random(0)
    counts = Counter(_draw({solved: list(alike) for solved, alike in buckets.items()}, 8, random) for _ in range(draws))
    weights = {solved: exp(-((solved - 4) ** 2) / 2) for solved in buckets}
    expected = {
        place: draws * weights[solved] / sum(weights.values()) / len(alike)
        for solved, alike in buckets.items()
        for place in alike
    }
    chi_square = sum((counts[place] - want) ** 2 / want for place, want in expected.items())
    assert chi_square < 7 + 5 * (2 * 7) ** 0.5
    assert expected[3] > 4 * expected[1]
    for group_size in (76, 1024):  # where all weights but the ratios to the nearest round to 0
        assert _draw({0: [0], group_size: [1]}, group_size, random) in (0, 1)
        assert {_draw({0: [0], 1: [1]}, group_size, random) for _ in range(20)} == {1}
    left = dict(buckets)
    assert sorted(_draw(left, 8, random) for _ in range(8)) == list(range(8)), "each once"
    assert not left


def test_as_many_return_as_the_share_allows_and_none_twice(run: Run, tmp_path: Path) -> None:
    """In other places of the step each time; the same from a state, which later steps have not changed."""
    sections: dict[str, Any] = {"train": {"prompts_per_step": 8}, "data": {"path": "-"}}
    recipe = recipe_of(tmp_path, algorithm=EXGRPO, **sections)
    for first in (0, 0, 8):
        step(recipe, range(first, first + 8), dict.fromkeys(range(100), 2))
    state, seen = recipe.state(), []
    for first in (16, 24):
        places, asks, _ = step(recipe, range(first, first + 8), dict.fromkeys(range(100), 2))
        returned = [i for i, place in enumerate(places) if asks[place].replayed is not None]
        assert len(set(places)) == 8
        assert len(returned) == 4
        assert all(places[i] < first for i in returned)
        seen.append((places, returned))
    assert seen[0][1] != seen[1][1]
    again = recipe_of(tmp_path, algorithm=EXGRPO, **sections)
    again.restore(state)
    assert step(again, range(16, 24), dict.fromkeys(range(100), 2))[0] == seen[0][0]


def test_exgrpo_is_its_loss(run: Run, tmp_path: Path) -> None:
    """f(w) = w / (w + .1), w = p / p_then, in place of the ratio; no std, a fixed divisor, a bonus for entropy."""
    recipe = recipe_of(tmp_path, algorithm=EXGRPO)
    for drawn in ([0, 1, 2, 3], [0, 1, 2, 3]):
        step(recipe, drawn, {0: 2, 1: 1}, logprob=-0.7)
    _, _, batch = step(recipe, [2, 3, 4, 5], {2: 2, 0: 1})
    recipe.credit(batch)
    (update,) = recipe.updates(batch)
    replayed = [sample for sample in update.samples if sample.demonstration]
    assert len(replayed) == 2
    limit = run.config.rollout.max_response_length

    def loss(lm: Any) -> Tensor:
        rollouts = [sample for sample in update.samples if not sample.demonstration]
        total = sampled_loss(lm, rollouts, limit, update.samples)
        for sample in replayed:
            group = [other.reward for other in update.samples if other.group == sample.group]
            then = torch.tensor(sample.behavior_logprob, dtype=torch.float64)
            w = (tokens_of(lm, sample)[0] - then).exp()
            total = total - (sample.reward - sum(group) / len(group)) * (w / (w + 0.1)).sum() / (8 * limit)
        return total - 1e-3 * torch.cat([tokens_of(lm, sample)[1] for sample in update.samples]).mean()

    check_gradient(run, packed_updates(run, update), loss)


def test_what_is_replayed_is_neither_sampled_nor_graded_again(run: Run) -> None:
    example = Example(0, (65, 66), "7", None)
    replayed = Sample((65, 66), [67], 0, True, False, None, 1.0, behavior_logprob=[-0.5], scored=True)
    config = run.config
    samples = whole_groups(run.engine.engine, [example], [Ask(3, False, replayed=replayed)], config, run.respond, 0)
    assert [sample.demonstration for sample in samples] == [False] * 3 + [True]
    graded: list[str] = []

    def scorer(texts: list[str], answers: list[str], columns: list[Any], **_: Any) -> list[Any]:
        graded.extend(texts)
        return [Score(0.0, "ok") for _ in texts]

    score(samples, [example], scorer, str)  # type: ignore[arg-type]
    assert len(graded) == 3
    assert [sample.status for sample in samples] == ["ok"] * 4
    assert [sample.reward for sample in samples] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_a_run_replays_and_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four prompts at most, as far as any wait; each with one external member, which was right."""
    rows = resumed(tmp_path, monkeypatch, EXGRPO, ReplayRecipe)
    assert {row["replay/share"] for row in rows} == {0.0, 0.25, 0.5}
    for row in rows:
        assert ("reward/external" in row) == (row["replay/share"] > 0)
        assert row.get("reward/external", 1) == 1
        assert (row.get("actor/prob_external", 0.0) > 0) == (row["replay/share"] > 0)
        assert row["replay/waiting"] <= 6
