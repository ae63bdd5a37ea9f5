"""Validation in training: it disturbs nothing, its best checkpoint stays, and no test benchmark chooses by accident."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_runs import changed, same
from trainer_runs import metrics, run_config, write_task

from rlplus.tools.cli import main
from rlplus.tools.report import load_run, write_report
from rlplus.tools.watch import FollowedRun
from rlplus.tools.watch.view import card
from rlplus.train import checkpoint
from rlplus.train.config import BENCHMARKS, Config, DataConfig, ValidationConfig, is_test_benchmark
from rlplus.train.config.surroundings import surroundings
from rlplus.train.data import Example
from rlplus.train.evaluation.known import known_benchmarks
from rlplus.train.rollout import Completion, Request
from rlplus.train.trainer import Run, open_run, train, validator
from rlplus.train.trainer.loop import Step
from rlplus.train.trainer.progress import Progress
from rlplus.train.trainer.run_folder import state_to_resume


def validated(folder: Path, output: str = "run", every: int = 1, name: str = "held_out", **sections: Any) -> Config:
    """A run with problems of their own to validate on."""
    task = write_task(folder, 10).read_text().splitlines()
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{line}\n" for line in task[6:]))
    validation = {"every": every, "data": {"path": str(path), "max_prompt_length": 8}, "samples": 3, "k": [1, 2]}
    validation |= sections.pop("validation", {})
    return run_config(folder, output, validation=validation, **sections)


def test_a_run_learns_the_same_with_validation_and_resumes_exactly(tmp_path: Path) -> None:
    """Metrics and weights equal a run's without validation, bit for bit, and a resumed run's."""
    plain = train(run_config(tmp_path, "plain", train={"steps": 3}))
    config = validated(tmp_path, every=2, train={"steps": 3}, checkpoint={"every": 1, "keep": 9})
    folder = train(config, validate=validator(config))
    rows = metrics(folder)
    names = {"validation/reward", "validation/held_out/pass@1", "validation/held_out/pass@2"}
    assert [names & row.keys() for row in rows] == [set(), names, set()]
    assert [{k: v for k, v in row.items() if k not in names} for row in rows] == metrics(plain)
    assert same(plain, folder)
    assert load_run(folder).warnings == ()
    saved = checkpoint.read_state(folder / "checkpoints/step-000003")
    train(config, resume="step-000001", validate=validator(config))
    assert metrics(folder) == rows
    assert same(plain, folder)
    assert checkpoint.read_state(folder / "checkpoints/step-000003") == saved


def test_the_mean_reward_is_that_of_all_samples(tmp_path: Path) -> None:
    """Two benchmarks of different sizes; a reward need not be 0 or 1. Only a 1 counts as right."""
    graded: list[float] = []

    def respond(
        engine: Any, examples: Sequence[Example], requests: Sequence[Request], sampling: Any
    ) -> list[list[Completion]]:
        """Responses that come with their rewards, as rollout.function's may."""
        groups = []
        for request in requests:
            rewards = [(len(graded) + i) % 5 / 4 for i in range(request.n)]
            graded.extend(rewards)
            groups.append([Completion([1], [0.0], False, reward=reward) for reward in rewards])
        return groups

    data = {"path": str(tmp_path / "two.jsonl"), "benchmark": "set", "max_prompt_length": 8}
    config = validated(tmp_path, validation={"data": data})
    rows = [{"prompt": f"{i}=", "answer": str(i), "set": "a" if i < 3 else "b"} for i in range(5)]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_run(config) as run:
        validate = validator(config)
        assert validate is not None
        found = validate(replace(run, respond=respond))
    assert len(graded) == 15
    assert found["reward"] == pytest.approx(sum(graded) / 15)
    assert found["a/pass@1"] == pytest.approx(sum(value == 1 for value in graded[:9]) / 9)
    assert found["b/pass@1"] == pytest.approx(sum(value == 1 for value in graded[9:]) / 6)


def scripted(*rewards: float | None) -> Callable[[Run], dict[str, float]]:
    """A validation whose reward in step i, from 1 on, is known; None: nothing could be graded."""

    def validate(run: Run) -> dict[str, float]:
        reward = rewards[run.progress.step]
        return {} if reward is None else {"reward": reward}

    return validate


def kept(config: Config) -> list[int]:
    return [int(path.name[-6:]) for path in sorted((Path(config.output_dir) / "checkpoints").glob("step-*"))]


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of equals, saved at once; a better one takes its place, after a resume too."""
    validate = scripted(0.1, 0.5, 0.5, None, 0.2, 0.6, 0.1)
    config = validated(tmp_path, train={"steps": 3}, checkpoint={"every": 0, "keep": 1})
    train(config, validate=validate)
    assert kept(config) == [2, 3]
    said = capsys.readouterr().err
    assert said.count("the best validation so far") == 2
    assert "step 2: the best validation so far, mean reward 0.5; its checkpoint is kept" in said
    place = Path(config.output_dir) / "checkpoints/step-000002"
    assert f"the best validation was in step 2, mean reward 0.5: {place}" in said.replace("\n", "")
    train(changed(config, "train", steps=5), resume="newest", validate=validate)
    assert kept(config) == [2, 5]
    train(changed(config, "train", steps=7), resume="newest", validate=validate)
    assert kept(config) == [6, 7]


@pytest.mark.slow
def test_a_killed_run_remembers_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies behind its best validation, before or after the next checkpoint, and ends as one that was left alone."""
    rewards = (0.2, 0.5, 0.3, 0.4, 0.1)
    sections: dict[str, Any] = {"train": {"steps": 5}, "checkpoint": {"every": 2, "keep": 1}}
    whole = validated(tmp_path, "whole", **sections)
    train(whole, validate=scripted(*rewards))
    parts, end = validated(tmp_path, "parts", **sections), Step.end
    for dies in (3, 5):

        def dying(step: Step, *rest: Any, dies: int = dies) -> None:
            if step.run.progress.step == dies - 1:
                raise KeyboardInterrupt
            end(step, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "end", dying)
            with pytest.raises(KeyboardInterrupt):
                train(parts, resume="auto", validate=scripted(*rewards))
    train(parts, resume="newest", validate=scripted(*rewards))
    assert kept(parts) == kept(whole) == [2, 5]
    assert metrics(Path(parts.output_dir)) == metrics(Path(whole.output_dir))
    best = [checkpoint.read_state(Path(c.output_dir) / "checkpoints/step-000005")["best"] for c in (parts, whole)]
    assert best == [{"step": 2, "reward": 0.5}] * 2


def test_another_validation_chooses_anew(tmp_path: Path) -> None:
    """Rewards on other problems cannot be compared; how often there is a validation changes nothing."""
    config = validated(tmp_path, train={"steps": 1})
    last = train(config, validate=scripted(0.9)) / "checkpoints/step-000001"
    best = {"step": 1, "reward": 0.9}
    for fields, expected in (
        ({}, best),
        ({"every": 2}, best),
        ({"patience": 2}, best),
        ({"samples": 2}, None),
        ({"temperature": 0.5}, None),
    ):
        state, notes = state_to_resume(last, changed(config, "validation", **fields), surroundings(config))
        assert state["best"] == expected
        assert ("validation has changed: from here on the best checkpoint is chosen anew" in notes) is (not expected)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *((name, True) for name in ("aime24", "AIME_2025", "aime", "amc23", "AMC", "math-500", "MATH500_test")),
        *((name, True) for name in ("minerva", "minerva_math", "olympiad_bench", "gpqa_diamond", "MMLU-Pro", "arc_c")),
        *((name, name != "gsm8k") for name in BENCHMARKS),  # also its training set's name
        *((name, True) for name in ("ARC-Challenge", "HumanEval+", "LiveCodeBench-v6", "leetcode", "gsm8k/test")),
        *((name, False) for name in ("", "gsm8k_train", "validation", "amc_aime", "aime_1983_2023", "math", "numina")),
        *((name, False) for name in ("deepmath", "arc_easy", "leetcode_train", "minervas_owl", "test", "humane")),
    ],
)  # fmt: skip
def test_known_names(name: str, known: bool) -> None:
    assert is_test_benchmark(name) is known


@pytest.mark.parametrize(
    ("path", "column", "found"),
    [
        ("held_out.jsonl", "AIME 2024", ["AIME 2024"]),
        ("data/math500.jsonl", "", ["math500"]),
        ("hf://owner/gpqa/train", "AIME 2024", ["AIME 2024", "gpqa"]),
        ("data/gsm8k/test.parquet", "", ["gsm8k/test"]),
        ("data/gsm8k/train.parquet", "gsm8k", []),
        ("hf://lkevinzc/math-eval/math", "", ["math500"]),
        ("hf://openai/gsm8k/main/test", "", ["gsm8k"]),
    ],
)
def test_benchmarks_are_known_by_column_file_and_folder(path: str, column: str, found: list[str]) -> None:
    validation = ValidationConfig(every=1, data=DataConfig(path=["a.jsonl", path]))
    problems = [Example(i, (1,), "1", None, benchmark=column) for i in range(3)]
    assert known_benchmarks(validation, problems) == found


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_that_validation_names_is_a_test_set(name: str) -> None:
    assert known_benchmarks(ValidationConfig(every=1, benchmarks=[name]), []) == [name]


def test_a_test_benchmark_chooses_only_when_it_is_allowed_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Refused before the run begins, by a plan too; allowed, log and report say it."""
    config = validated(tmp_path, name="math500", train={"steps": 1})
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    refused = "validation.data: want problems that are no test set; got math500, by which"
    assert main(["train", str(path)]) == 2
    assert refused in capsys.readouterr().err
    assert not Path(config.output_dir).exists()
    assert main(["plan", str(path), "--data", "--gpus", "1", "--gpu", "h100"]) == 1
    assert refused in capsys.readouterr().out
    assert main(["train", str(path), "validation.allow_test_benchmarks=true"]) == 0
    assert "the best checkpoint will be chosen by a test benchmark: math500" in caplog.text
    assert "validation/reward" in metrics(Path(config.output_dir))[0]
    (warning,) = load_run(Path(config.output_dir)).warnings
    assert "A test benchmark chose the best checkpoint" in warning


@pytest.mark.parametrize(
    ("rewards", "patience", "ends"),
    [
        ((0.1, 0.5, 0.5, 0.4, 0.9, 0.9), 2, 4),  # an equal one is no better
        ((0.1, 0.5, 0.5, None, 0.4, 0.9), 2, 5),  # nothing graded says nothing
        ((0.5, 0.4, 0.6, 0.5, 0.7, 0.6), 2, 6),  # a better one begins anew
        ((0.5, 0.4, 0.6, 0.5, 0.4, 0.3), 4, 6),
        ((0.5, 0.4, 0.6, 0.5, 0.4, 0.3), None, 6),
    ],
)
def test_patience_counts_what_is_not_better(
    tmp_path: Path, rewards: Sequence[float | None], patience: int | None, ends: int
) -> None:
    config = validated(tmp_path, validation={"patience": patience}, train={"steps": 6})
    progress = Progress(config)
    for reward in rewards:
        if progress.finished:
            break
        progress.step += 1
        message = progress.note_validation({} if reward is None else {"validation/reward": reward})
    assert progress.step == ends
    assert (message or "").startswith("ended early") is bool(progress.early_end) is (ends < 6)


def test_a_run_without_patience_left_ends_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its log, in progress.json, on the page of a watcher and in the report; it is finished, with its model."""
    validate = scripted(0.1, 0.5, 0.5, 0.4, 0.9, 0.9)
    sections: dict[str, Any] = {"train": {"steps": 6}, "checkpoint": {"every": 0, "keep": 1}}
    config = validated(tmp_path, validation={"patience": 2}, **sections)
    folder = train(config, validate=validate)
    said = capsys.readouterr().err.replace("\n", " ")
    why = "ended early after step 4 of 6: 2 validations in a row were not better than step 2's, mean reward 0.5"
    assert said.count(why) == 1
    assert "4 steps done; model in" in said
    assert kept(config) == [2, 4]
    assert (folder / "model/model.safetensors").exists()
    now = json.loads((folder / "progress.json").read_text())
    assert (now["state"], now["message"]) == ("finished", f"{why} (validation.patience)")
    followed = FollowedRun("run", folder)
    followed.update()
    shown = card(followed, "accent")
    assert (shown.state, shown.message) == ("finished", now["message"])
    write_report(tmp_path / "report.html", {"run": load_run(folder)}, {})
    assert why.replace("'", "&#39;") in (tmp_path / "report.html").read_text()
    train(config, resume="newest", validate=validate)
    assert "nothing to do: this run is finished, 4 steps" in capsys.readouterr().err.replace("\n", " ")


def test_patience_is_resumed_and_may_grow_bit_for_bit(tmp_path: Path) -> None:
    """From the middle of a count, and after an early end with more patience: as a run that was left alone."""
    rewards = (0.5, 0.4, 0.3, 0.2, 0.1)
    sections: dict[str, Any] = {"train": {"steps": 5}, "checkpoint": {"every": 1, "keep": 9}}
    whole = validated(tmp_path, "whole", validation={"patience": 3}, **sections)
    parts = validated(tmp_path, "parts", validation={"patience": 2}, **sections)
    train(whole, validate=scripted(*rewards))
    train(parts, validate=scripted(*rewards))
    assert (kept(whole)[-1], kept(parts)[-1]) == (4, 3)
    for start in ("newest", "step-000002"):  # its end; and a step with one of two counted
        folder = train(changed(parts, "validation", patience=3), resume=start, validate=scripted(*rewards))
        assert metrics(folder) == metrics(Path(whole.output_dir))
        assert same(folder, Path(whole.output_dir))
    states = [
        checkpoint.read_state(Path(one.output_dir) / "checkpoints/step-000004")["since_best"] for one in (whole, parts)
    ]
    assert states == [3, 3]
