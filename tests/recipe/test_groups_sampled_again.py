"""Groups that a recipe samples again in a step: what replaces what, what is counted, noise, failures."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import draw_rewards
from trainer_runs import metrics, run_config

from rlplus.train.data import Sample
from rlplus.train.recipe import Ask, Batch, Recipe
from rlplus.train.rollout import Completion
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import open_run, train
from rlplus.train.trainer.engine import EngineFailed
from rlplus.train.trainer.loop import Step, train_step

SIZE = 4
Calls = list[list[tuple[tuple[int, ...], int]]]


def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, list[list[Sample]]]:
    """Have a run draw its rewards; -> the prompts and numbers of responses of each call, and the scored samples."""
    asked: Calls = []
    scored: list[list[Sample]] = []
    generate = TransformersEngine.generate

    def score(samples: Sequence[Sample], *rest: Any) -> None:
        draw_rewards(samples, *rest)
        scored.append(list(samples))

    def noting(engine: Any, requests: Any, sampling: Any) -> Any:
        asked.append([(tuple(request.prompt), request.n) for request in requests])
        assert all(request.max_tokens <= 8 for request in requests)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", noting)
    monkeypatch.setattr("rlplus.train.trainer.loop.score", score)
    return asked, scored


def test_a_step_trains_on_the_groups_that_were_sampled_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, algorithm={"preset": "bread"}, train={"steps": 1})
    asked, scored = noted(monkeypatch)
    with open_run(config) as run:
        asked.clear()
        step, parts = Step(run), list[Batch]()

        def noting(sampling: Callable[..., Batch]) -> Callable[..., Batch]:
            def sampled(*args: Any) -> Batch:
                parts.append(sampling(*args))
                return parts[-1]

            return sampled

        for name in ("draw", "again"):
            monkeypatch.setattr(run.rollouts, name, noting(getattr(run.rollouts, name)))
        batch = step.collect()
        assert len(parts) == len(scored) > 1
        assert batch.seconds == pytest.approx(sum(part.seconds for part in parts))
        first, *others = [call for call in asked if call[0][1] == SIZE]  # without the probe
        assert len(first) == 4
        assert 1 <= len(others) <= 2  # three tokens: two lengths
        last = {prompt[:4]: prompt for call in (first, *others) for prompt, _ in call}
        assert len(last) == 4
        members = [[s for s in batch.samples if s.group == i] for i in range(4)]
        assert [s.group for s in batch.samples] == sorted(s.group for s in batch.samples)
        for example, own in zip(batch.examples, members, strict=True):
            shown = last[example.prompt][4:]
            assert len(own) == SIZE
            assert example.demonstration is not None
            assert shown == example.demonstration[: len(shown)]
            for sample in own:
                assert tuple(sample.prompt) == example.prompt
                assert tuple(sample.response[: len(shown)]) == shown
                assert sample.loss_tokens == (len(sample.response) - len(shown), len(shown))
                assert sample.engine_logprob is not None
                assert [math.isnan(p) for p in sample.engine_logprob[: len(shown)]] == [True] * len(shown)
        assert any(len(prompt) > 4 for prompt in last.values())
        every = [sample for samples in scored for sample in samples]
        assert step.generated == sum(sample.loss_tokens[0] for sample in every) > 8 * SIZE
        step.credit(batch)
        assert all(sample.loss_tokens[1] == 0 for sample in batch.samples)
        assert step.tally.reduce()["reward/internal"] == pytest.approx(sum(s.reward for s in every) / len(every))


def test_samples_that_the_grader_failed_on_count_even_if_they_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four bare rollouts have no reward and two are wrong; behind the first prefix one is right."""

    def score(samples: Sequence[Sample], *rest: Any) -> None:
        for i, sample in enumerate(samples):
            bare = sample.loss_tokens[1] == 0
            failed = bare and i % 2 > 0
            sample.reward = math.nan if failed else float(not bare and i % 4 == 0)
            sample.status = "crash" if failed else "ok"

    monkeypatch.setattr("rlplus.train.trainer.loop.score", score)
    with open_run(run_config(tmp_path, algorithm={"preset": "bread"}, train={"steps": 1})) as run:
        step = Step(run)
        batch = step.collect()
        assert len(batch.samples) == 16
        assert all(sample.loss_tokens[1] == 1 for sample in batch.samples)
        assert len(step.ungraded) == 8
        logged = step.tally.reduce()
        assert (logged["reward/masked"], logged["reward/crash"]) == (0.25, 0.25)
        assert logged["reward/internal"] == pytest.approx(4 / 24)
        assert run.recipe.metrics()["reward/without_prefix"] == (0.0, 8)


def test_groups_sampled_again_have_new_noise_and_the_same_after_a_rewind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(run_config(tmp_path, algorithm={"preset": "bread"})) as run:
        monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
        found = []
        for _ in range(2):
            step = Step(run)
            batch = run.rollouts.draw(0, step.tally)
            asks = {0: Ask(SIZE, False), 2: Ask(2, False)}
            found.append([run.rollouts.again(batch, asks, tries, 0, step.tally) for tries in (1, 2)])
            assert [s.group for s in found[-1][0].samples] == [0] * SIZE + [2] * 2
            responses = [[list(s.response) for s in each.samples if s.group == 0] for each in (batch, *found[-1])]
            assert responses[0] != responses[1] != responses[2] != responses[0]
            assert run.rollouts.again(batch, {}, 3, 0, step.tally).samples == []
            run.rollouts.rewind()
        one, other = ([[s.response for s in part.samples] for part in parts] for parts in found)
        assert one == other


def test_seeds_differ_by_run_step_repetition_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("rlplus.train.trainer.rollouts.generate", lambda *args: seeds.append(args[4]) or [])
    with open_run(run_config(tmp_path, algorithm={"preset": "bread"})) as run:
        tally, batch = Step(run).tally, Batch([], [], 0.0)
        ask, settings = run.engine.ask, list[dict[str, bool]]()
        monkeypatch.setattr(run.engine, "ask", lambda question, **kw: settings.append(kw) or ask(question, **kw))
        for tries in (1, 2):
            run.rollouts.again(batch, {}, tries, 0, tally)
        for name, value in (("rank", 1), ("world", 2)):
            with monkeypatch.context() as patch:
                patch.setattr(run.rollouts, name, value)
                run.rollouts.again(batch, {}, 1, 0, tally)
        run.rollouts.sampler.next()
        run.rollouts.again(batch, {}, 1, 0, tally)
        other = run.config.model_copy(update={"train": run.config.train.model_copy(update={"seed": 1})})
        monkeypatch.setattr(run.rollouts, "config", other)
        run.rollouts.again(batch, {}, 1, 0, tally)
    assert len(set(seeds)) == len(seeds) == 6
    assert settings == [{"interruptible": True}] * 6  # a signal gives the step up


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"segment": 3, "engine": "transformers", "group_size": 3, "max_response_length": 8}},
        {"algorithm": {"preset": "bread", "refill": {"max_draws": 3, "fill": True}}},
    ],
    ids=["segments", "refill"],
)
def test_searches_go_with_segments_and_with_refill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any]
) -> None:
    _, scored = noted(monkeypatch)
    ages: list[list[tuple[int, int]]] = []
    collect = Step.collect

    def collecting(step: Step) -> Batch:
        scored.clear()
        batch, now = collect(step), step.run.progress.step
        ages.append([(now - version, n) for part in scored for s in part for version, n in s.segments])
        return batch

    monkeypatch.setattr(Step, "collect", collecting)
    train_section = {"steps": 6, "lr": 1e-4}
    sections: dict[str, Any] = {"algorithm": {"preset": "bread"}, "train": train_section} | dict(changes)
    rows = metrics(train(run_config(tmp_path, **sections)))
    assert any(row["prefix/tries"] > 0 for row in rows)
    if "rollout" in changes:
        for row, parts in zip(rows, ages, strict=True):
            assert row["batch/staleness"] == pytest.approx(sum(age * n for age, n in parts) / sum(n for _, n in parts))
        assert len({row["batch/staleness"] for row in rows}) > 2
    else:
        assert any(row["batch/draws"] > 1 for row in rows)
        assert all(row["batch/kept"] > 0 for row in rows)


class Again(Recipe):
    """Every first group is sampled once more."""

    def again(self, batch: Batch, tries: int) -> Mapping[int, Ask]:
        return {} if tries else {0: Ask(2, True)}


def test_a_recipe_of_ones_own_samples_groups_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_recipe", Again)
    with open_run(run_config(tmp_path)) as run:
        step = Step(run)
        batch = step.collect()
        assert [s.group for s in batch.samples] == [0] * 3 + [1] * 4 + [2] * 4 + [3] * 4
        assert [s.demonstration for s in batch.samples[:3]] == [False, False, True]
        train_step(run)
    process = {"engine": "transformers", "mode": "process", "group_size": 4, "max_response_length": 8}
    with (
        open_run(run_config(tmp_path, "ahead", rollout=process, train={"overlap": 1})) as run,
        pytest.raises(ValueError, match=r"Again samples groups again: want train\.overlap 0; got 1"),
    ):
        train_step(run)


def test_an_engine_that_fails_in_a_search_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from the step's start with the same result."""
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    generate, calls = TransformersEngine.generate, [0]

    def failing(engine: Any, requests: Any, sampling: Any) -> list[list[Completion]]:
        calls[0] += len(requests[0].prompt) > 4 if requests else 0
        if calls[0] == 4:
            raise RuntimeError("no memory")
        return generate(engine, requests, sampling)

    sections = {"algorithm": {"preset": "bread"}, "train": {"steps": 5, "lr": 1e-3}}
    whole = metrics(train(run_config(tmp_path, "whole", **sections)))
    config = run_config(tmp_path, "parts", **sections)
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", failing)
        patch.setattr("rlplus.train.trainer.engine.SyncedEngine._renew", lambda self: None)
        patch.setattr("rlplus.train.trainer.engine.SyncedEngine.ask", once)
        with pytest.raises(EngineFailed, match="no memory"):
            train(config)
    assert metrics(train(config, resume="auto")) == whole


def once(engine: Any, question: Any, *, interruptible: bool = False) -> Any:
    return engine._agreed(lambda: question(engine.engine))
