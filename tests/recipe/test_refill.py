"""Refill: which groups are kept, on which rank, and in a run."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_runs import same, torchrun
from trainer_runs import metrics, run_config

from rlplus.common.errors import RunFailed
from rlplus.train.algorithm import Refill
from rlplus.train.config import TrainConfig
from rlplus.train.data import Example, Sample
from rlplus.train.data.prompts import RESPONSE_ID
from rlplus.train.recipe import Batch, refill_batch
from rlplus.train.recipe.self_teaching import SelfDistillRecipe
from rlplus.train.trainer import Interrupted, train

STEP, UPDATE = 8, 4  # prompts


@pytest.mark.parametrize(
    ("options", "rewards", "kept"),
    [
        ({}, [0, 0, 0, 1], True),
        ({}, [1, 1, 1, 1], False),
        ({}, [0, 0, 0, 0], False),
        ({}, [0.5, 0.5], False),
        ({}, [0.5, 0.25], True),
        ({}, [1], False),
        ({}, [], False),  # none could be graded
        ({"low": 0.2, "high": 0.8}, [1, 0, 0, 0, 0], True),
        ({"low": 0.2, "high": 0.8}, [1, 0, 0, 0, 0, 0], False),
        ({"low": 0.2, "high": 0.8}, [0, 1, 1, 1, 1], True),
        ({"low": 0.2, "high": 0.8}, [0, 1, 1, 1, 1, 1], False),
    ],
)
def test_a_group_is_kept_for_its_rollouts_rewards(options: dict[str, Any], rewards: list[float], kept: bool) -> None:
    assert Refill(**options).keeps(rewards) is kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.8, "high": 0.2}, "want low <= high; got 0.8 and 0.2"),
        ({"low": "0"}, "low\n.*valid number"),
        ({"high": float("nan")}, "high\n.*finite number"),
        ({"max_draws": 0}, "max_draws\n.*greater than or equal to 1"),
        ({"max_draws": 1.5}, "max_draws\n.*valid integer"),
        ({"max_draws": True}, "max_draws\n.*valid integer"),
        ({"fill": 1}, "fill\n.*valid boolean"),
    ],
)
def test_values_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Refill(**options)


# ---- ranks, played by threads


@dataclass
class Ranks:
    """Stands in for `agree` and `torch.distributed`: each thread is a rank."""

    world: int

    def __post_init__(self) -> None:
        self.here, self.values = threading.local(), [None] * self.world
        self.barrier = threading.Barrier(self.world)

    def get_rank(self) -> int:
        return int(self.here.rank)

    def get_world_size(self) -> int:
        return self.world

    def gathered(self, value: Any) -> list[Any]:
        self.values[self.here.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self.here.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.world) as threads:
            return [future.result() for future in [threads.submit(as_rank, rank) for rank in range(self.world)]]


def groups_of(seed: int) -> list[list[int]]:
    """Rewards of the four rollouts of group after group."""
    random = Random(seed)
    shares = [random.choice((0.02, 0.3, 0.98)) for _ in range(10 * STEP)]
    return [[int(random.random() < share) for _ in range(4)] for share in shares]


def draws_of(
    rewards: Sequence[Sequence[int]], rank: int, world: int, demonstrations: bool = True
) -> Callable[[], Batch]:
    """This rank's part of draw after draw. A prompt is its group's number, a response that and its member's number.

    A demonstration is in every other group."""
    position = iter(range(0, len(rewards), STEP))

    def draw() -> Batch:
        start = next(position)
        mine = range(start, start + STEP)[rank::world]
        samples = []
        for number, group in enumerate(mine):
            samples += [
                Sample([group], [group, member], number, False, False, None, r)
                for member, r in enumerate(rewards[group])
            ]
            if group % 2 and demonstrations:
                samples.append(Sample([group], [9], number, True, False, None, 1.0))
        shown = {group: (group, RESPONSE_ID) for group in mine}
        return Batch([Example(group, (group,), "", None, teacher_prompt=shown[group]) for group in mine], samples, 1.5)

    return draw


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_has_the_first_groups_that_teach_something(
    monkeypatch: pytest.MonkeyPatch, world: int, seed: int
) -> None:
    """In the same mini-batches on any number of ranks, as many on each, and no more of them moved than that takes."""
    ranks = Ranks(world)
    monkeypatch.setattr("rlplus.train.recipe.refill.agree", ranks)
    monkeypatch.setattr("rlplus.train.recipe.refill.dist", ranks)
    rewards = groups_of(seed)
    config = TrainConfig(steps=1, prompts_per_step=STEP, prompts_per_update=UPDATE)
    results = ranks.run(lambda rank: refill_batch(draws_of(rewards, rank, world), Refill(), config))

    mixed = [group for group, row in enumerate(rewards) if 0 < sum(row) < 4]
    draws = mixed[STEP - 1] // STEP + 1
    assert draws > 1
    kept = sum(group < draws * STEP for group in mixed)
    moved = 0
    for start in range(0, STEP, UPDATE):
        want, got = mixed[start : start + UPDATE], []
        for result in results:
            share = UPDATE // world
            first = start // UPDATE * share
            got += [example.index for example in result.batch.examples[first : first + share]]
        assert sorted(got) == want
        homes = Counter(group % world for group in want)
        moved += sum(max(0, count - UPDATE // world) for count in homes.values())
    foreign = 0
    for rank, (batch, *counts) in enumerate(results):
        assert counts == [draws, kept]
        assert batch.seconds == 1.5 * draws
        foreign += sum(example.index % world != rank for example in batch.examples)
        for number, example in enumerate(batch.examples):
            members = [sample for sample in batch.samples if sample.group == number]
            assert [tuple(sample.prompt) for sample in members] == [example.prompt] * (4 + example.index % 2)
            assert [sample.reward for sample in members][:4] == rewards[example.index]
        assert len(batch.samples) == sum(4 + example.index % 2 for example in batch.examples)
    assert foreign == moved


def test_a_step_without_enough_groups_says_how_many_were_found() -> None:
    rewards = [[0, 1] if group == 3 else [0, 0] for group in range(100)]
    config = TrainConfig(steps=1, prompts_per_step=STEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlplus.train.recipe.refill.agree", ranks := Ranks(1))
        patch.setattr("rlplus.train.recipe.refill.dist", ranks)
        with pytest.raises(RunFailed, match=r"want 8 groups .* a mean in \[0, 1\]; found 1 in 3 draws of 8 prompts"):
            ranks.run(lambda rank: refill_batch(draws_of(rewards, rank, 1), Refill(max_draws=3), config))


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_dropped_groups_fill_a_step(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    ranks = Ranks(world)
    monkeypatch.setattr("rlplus.train.recipe.refill.agree", ranks)
    monkeypatch.setattr("rlplus.train.recipe.refill.dist", ranks)
    rewards = [[0, 1] if group in (3, 17) else [0, 0] for group in range(100)]
    config = TrainConfig(steps=1, prompts_per_step=STEP)
    options = Refill(max_draws=3, fill=True)
    results = ranks.run(lambda rank: refill_batch(draws_of(rewards, rank, world), options, config))
    assert sorted(example.index for result in results for example in result.batch.examples) == [0, 1, 2, 3, 4, 5, 6, 17]
    for batch, *counts in results:
        assert counts == [3, 2], "the metrics tell how many taught something"
        rollouts = [sample for sample in batch.samples if not sample.demonstration]
        got = [(batch.examples[sample.group].index, sample.reward) for sample in rollouts]
        assert got == [(example.index, reward) for example in batch.examples for reward in rewards[example.index]]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("fill", [False, True])
def test_a_teacher_is_shown_a_response_of_the_group_of_several_draws_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, fill: bool
) -> None:
    """`shows: response` of self-distill: the first other correct one of the same prompt, wherever the group moved."""
    ranks = Ranks(world)
    monkeypatch.setattr("rlplus.train.recipe.refill.agree", ranks)
    monkeypatch.setattr("rlplus.train.recipe.refill.dist", ranks)
    rewards, end = groups_of(0), -1
    config = TrainConfig(steps=1, prompts_per_step=STEP, prompts_per_update=UPDATE)
    options = Refill(max_draws=2 if fill else 10, fill=fill, low=0.4 if fill else 0.0)
    algorithm = {"preset": "sdpo", "recipe": {"template": "{prompt}{demonstration}"}}
    recipes = [SelfDistillRecipe(run_config(tmp_path, algorithm=algorithm)) for _ in range(world)]

    def collected(rank: int) -> Batch:
        recipes[rank].ends = [end]
        draw = draws_of(rewards, rank, world, demonstrations=False)
        return recipes[rank].collect(lambda: refill_batch(draw, options, config).batch)

    batches = ranks.run(collected)
    assert len({sample.prompt[0] // STEP for batch in batches for sample in batch.samples}) > 1, "several draws"
    shown = 0
    for batch in batches:
        for sample in batch.samples:
            group, member = sample.response
            right = [other for other, reward in enumerate(rewards[group]) if reward == 1 and other != member]
            assert sample.teacher_prompt == ([group, group, right[0]] if right else None)
            shown += bool(right)
    assert 0 < shown < 4 * STEP
    assert sum(recipe.metrics()["distill/shown"][0] for recipe in recipes) == shown


# ---- in a run

SECTIONS: dict[str, Any] = {
    "algorithm": {"preset": "dapo", "refill": {"max_draws": 9}},
    "rollout": {"max_response_length": 5},
    "train": {"steps": 20},
}


def draw_rewards(samples: Sequence[Sample], *_: Any) -> None:
    """Rewards that an untrained model gets now and then, so that half of the groups have different ones."""
    for sample in samples:
        sample.reward = float(sum(sample.response) % 7 == 0)


def test_a_refilled_run_trains_on_nothing_else_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a step is given up after its second draw."""
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    rows = metrics(train(run_config(tmp_path, "whole", **SECTIONS)))
    assert len(rows) == 20
    for row in rows:
        kept = row["batch/kept"] * row["batch/draws"] * 4
        assert kept == pytest.approx(round(kept))
        assert 4 <= round(kept) <= 4 * row["batch/draws"]
        assert row["actor/active_rows"] == row["actor/updated"] == 1
    again = next(step for step, row in enumerate(rows) if step > 1 and row["batch/draws"] > 1)

    config, refills = run_config(tmp_path, "parts", **SECTIONS | {"train": {"steps": again + 3}}), []

    def refill_and_kill(*arguments: Any) -> Any:
        refills.append(refill_batch(*arguments))
        if len(refills) == again + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return refills[-1]

    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.trainer.loop.refill_batch", refill_and_kill)
        with pytest.raises(Interrupted):
            train(config)
    assert (Path(config.output_dir) / "checkpoints/latest").read_text() == f"step-{again:06d}"
    train(config, resume="newest")
    assert metrics(Path(config.output_dir)) == rows[: again + 3]


def test_a_run_that_finds_too_few_groups_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def solved_later(samples: Sequence[Sample], *_: Any) -> None:
        for member, sample in enumerate(samples):
            sample.reward = float(len(refills) > 2 or member % 2)

    refills: list[int] = []
    monkeypatch.setattr("rlplus.train.trainer.loop.score", solved_later)
    original = refill_batch
    monkeypatch.setattr("rlplus.train.trainer.loop.refill_batch", lambda *rest: refills.append(1) or original(*rest))
    config = run_config(tmp_path, **SECTIONS)
    with pytest.raises(RunFailed, match=r"want 4 groups .* found 0 in 9 draws of 4 prompts"):
        train(config)
    assert (Path(config.output_dir) / "checkpoints/latest").read_text() == "step-000002"


GRADER = """
def of_any_text(text, answer):
    return float(sum(map(ord, text)) % 3 == 0)
"""


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    monkeypatch.chdir(tmp_path)
    folders = []
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            reward = {"kind": None, "pattern": None, "function": "grader:of_any_text"}
            section = {"steps": steps, "prompts_per_update": 2}
            config = run_config(tmp_path, name, **SECTIONS | {"reward": reward, "train": section})
            torchrun(config, "--resume=auto")
        folders.append(Path(config.output_dir))
    assert any(row["batch/draws"] > 1 for row in metrics(folders[0]))
    assert same(*folders)
    assert metrics(folders[0]) == metrics(folders[1])
