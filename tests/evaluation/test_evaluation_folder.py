"""The folder of an evaluation: what determines results and samples, and what of another evaluation is refused."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_evaluations import evaluation
from trainer_runs import run_config, write_task

from rlplus.tools.cli import parse
from rlplus.tools.cli.evaluate import evaluated
from rlplus.train.config import load_config
from rlplus.train.data import Example
from rlplus.train.evaluation.asked import asked_of, differences, model_identity
from rlplus.train.evaluation.output_folder import check_folder, held, others_in
from rlplus.train.evaluation.results import Evaluation, load_results, save_results
from rlplus.train.evaluation.sample import evaluate_model


def write_model_files(folder: Path, weights: bytes = bytes(2**21)) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_model_is_what_is_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is nor when it was written; weights of the same size are other weights."""
    monkeypatch.chdir(tmp_path)
    original = write_model_files(tmp_path / "a")
    copy = Path(shutil.copytree(original, tmp_path / "b"))
    os.utime(copy / "model.safetensors", (0, 0))
    (copy / "README.md").touch()
    assert model_identity(original).startswith(f"{original}@")
    found = {model_identity(path).rpartition("@")[2] for path in (original, copy, Path("a"))}
    assert len(found) == 1
    for number, change in enumerate([slice(0, 1), slice(2**21 - 1, 2**21), slice(2**20 - 2**17, 2**20 + 2**17)]):
        weights = bytearray(2**21)
        weights[change] = b"x" * (change.stop - change.start)
        found.add(model_identity(write_model_files(tmp_path / f"other-{number}", weights)).rpartition("@")[2])
    (copy / "config.json").write_text('{"rope_theta": 1}')
    assert len(found | {model_identity(copy).rpartition("@")[2]}) == 5


def test_an_evaluation_is_known_by_its_contents(tmp_path: Path) -> None:
    """By the problems, wherever their file is, and by the settings that change a sample."""
    model = write_model_files(tmp_path / "model")
    problems = [Example(index=0, prompt=(1,), answer="1", demonstration=None)]

    def asked(problems: list[Example], rollout: dict[str, Any] | None = None, **changes: Any) -> dict[str, str]:
        data = {"path": "x.jsonl", "max_prompt_length": 8}
        config = run_config(tmp_path, rollout=rollout or {}, evaluation={"data": data, "samples": 4} | changes)
        return asked_of(config, model, "toy", problems, 1)

    first = asked(problems)
    same = [
        asked(problems, data={"path": "elsewhere/x.jsonl", "max_prompt_length": 8}),
        asked(problems, k=[1, 2], every=3),
        asked(problems, rollout={"push_timeout_s": 9.0, "group_size": 16}),
    ]
    assert [differences(first, other) for other in same] == [[], [], []]
    assert differences(first, asked(problems, samples=5)) == ["evaluation.samples 4 (asked: 5)"]
    assert differences(first, asked(problems, rollout={"max_response_length": 16})) == [
        "rollout.max_response_length 8 (asked: 16)"
    ]
    (data,) = differences(first, asked([replace(problems[0], answer="2")]))
    assert re.fullmatch(r"data x.jsonl@\w{12} \(asked: x.jsonl@\w{12}\)", data)


def test_another_rule_about_what_is_worth_0_is_another_evaluation(tmp_path: Path) -> None:
    """By its effect, not by its name; one by a version without such rules is that of graders that take everything."""
    model, data = write_model_files(tmp_path / "model"), {"path": "x.jsonl", "max_prompt_length": 8}
    (tmp_path / "mine.py").touch()

    def asked(**reward: Any) -> dict[str, str]:
        config = run_config(tmp_path, reward={"pattern": None} | reward, evaluation={"data": data})
        return asked_of(config, model, "toy", [Example(index=0, prompt=(1,), answer="1", demonstration=None)], 1)

    def known(**reward: Any) -> dict[str, str]:
        found = asked(**reward)
        return {key: found[key] for key in ("reward.cut_off", "reward.box") if key in found}

    function = {"kind": None, "function": "mine.py:grade"}
    both = {"kind": None, "function": ["mine.py:grade", "math_verify"]}
    for reward, rules in (
        ({"kind": "math_verify"}, {"reward.cut_off": "zero", "reward.box": "asked"}),
        (
            {"kind": "math_verify", "cut_off": "zero", "box": "required"},
            {"reward.cut_off": "zero", "reward.box": "required"},
        ),
        ({"kind": "math_verify", "cut_off": "grade"}, {"reward.box": "asked"}),
        ({"kind": "math_verify", "cut_off": "grade", "box": "optional"}, {}),
        ({"kind": "choice"}, {"reward.cut_off": "zero"}),
        (function, {}),
        (function | {"cut_off": "zero"}, {"reward.cut_off": "zero"}),
        (both, {"reward.cut_off": "grade or zero", "reward.box": "asked or optional"}),
    ):
        assert known(**reward) == rules
    older = asked(kind="choice", cut_off="grade", box="optional")
    assert differences(older, asked(kind="choice")) == ["reward.cut_off default (asked: zero)"]
    assert differences(asked(kind="choice"), asked(kind="choice", cut_off="zero")) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_model_is_another_evaluation_with_any_settings(tmp_path: Path, dtype: str) -> None:
    """The section model of a pretrained model has no setting but its path where all have their defaults."""
    models = [write_model_files(tmp_path / "a"), write_model_files(tmp_path / "b", b"x" * 2**21)]
    data = {"path": "x.jsonl", "max_prompt_length": 8}
    problems = [Example(index=0, prompt=(1,), answer="1", demonstration=None)]
    one, other = (
        asked_of(
            run_config(
                tmp_path, model={"scratch": None, "path": str(model), "dtype": dtype}, evaluation={"data": data}
            ),
            model,
            "toy",
            problems,
            1,
        )
        for model in models
    )
    assert (one["model"], other["model"]) == tuple(map(model_identity, models))
    assert differences(one, other) == [f"model {one['model']} (asked: {other['model']})"]


def test_nothing_of_another_evaluation_is_replaced(tmp_path: Path) -> None:
    """A benchmark that is evaluated again must be the same throughout, the others must have the same model."""

    def one(name: str, model: str, samples: str = "4") -> Evaluation:
        asked = {"benchmark": name, "model": model, "evaluation.samples": samples}
        return evaluation([1, 2], name=name, model=model, asked=asked)

    now = {"toy": one("toy", "b/base@2").asked}
    check_folder(tmp_path, now)
    save_results(tmp_path, {"amc": one("amc", "c/base@2", "8")})
    (tmp_path / "evaluation-damaged.json").write_text("{")
    check_folder(tmp_path, now)
    cases = [
        (one("toy", "b/base@2", "8"), r"evaluation-toy.json: evaluation.samples 8 \(asked: 4\). Give another --output"),
        (one("toy", "a/base@1"), r"model a/base@1 \(asked: b/base@2\)\. Give another --output, or --overwrite"),
        (one("aime", "a/base@1"), r"evaluation-aime.json: model a/base@1"),
        (replace(one("toy", "b/base@2"), asked={}), r"evaluation.samples default \(asked: 4\)"),
    ]
    for result, message in cases:
        (path,) = save_results(tmp_path, {result.name: result})
        with pytest.raises(ValueError, match=message):
            check_folder(tmp_path, now)
        assert list(others_in(tmp_path, now)) == [path]
        path.unlink()


def test_a_second_evaluation_in_a_folder_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    """Not even what the first one has not finished; the message names the folder and who has it."""
    model, output = write_model_files(tmp_path / "model"), tmp_path / "out"
    data = {"path": str(write_task(tmp_path)), "max_prompt_length": 8}
    config = run_config(tmp_path, evaluation={"data": data, "samples": 4})
    with held(output):
        (output / "samples").mkdir()
        (unfinished := output / "samples/evaluation-task-0-000000.parquet.7.new").touch()
        refusal = f"another evaluation is writing into {output}: wait for its end, or give another --output. It is held"
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"{re.escape(refusal)} by process {os.getpid()} on "):
                evaluate_model(config, str(model), output=output, overwrite=overwrite)
        assert unfinished.exists()


def test_a_file_is_called_by_the_benchmark_alone(tmp_path: Path) -> None:
    """Whichever others are evaluated with it."""
    results = {name: evaluation([1], name=name) for name in ("a b", "a/b", "amc")}
    together = dict(zip(results, save_results(tmp_path, results), strict=True))
    assert len(set(together.values())) == 3
    assert together["amc"].name == "evaluation-amc.json"
    for name, result in results.items():
        assert save_results(tmp_path, {name: result}) == [together[name]]


def test_every_benchmark_has_a_file(tmp_path: Path) -> None:
    """Also if names differ only in characters that file names cannot have, or are too long for one."""
    names = ["a/b", "a_b", "a?b", "\0", "数" * 300, "数" * 301]
    results = {name: evaluation((i,), name=name) for i, name in enumerate(names)}
    assert len(set(save_results(tmp_path / "new", results))) == len(names)
    assert load_results(tmp_path / "new") == results


def test_no_result_of_an_earlier_evaluation_mixes_in(tmp_path: Path) -> None:
    """One file per benchmark, which the next evaluation replaces."""
    save_results(tmp_path, {"amc": evaluation((3, 4), name="amc")})
    save_results(tmp_path, {"amc": evaluation((5, 6), name="amc"), "aime": evaluation((7,), name="aime")})
    assert {name: one.correct for name, one in load_results(tmp_path).items()} == {"amc": (5, 6), "aime": (7,)}
    assert len(list(tmp_path.iterdir())) == 2


def test_options_of_an_evaluation_take_what_the_manual_names() -> None:
    """Other names of benchmarks, and a function in place of the default grader."""
    options = ["--benchmarks", "aime24, gpqa_diamond,amc", "--template", "qwen", "reward.function=graders:mine"]
    config = load_config(*evaluated(parse(["eval", "owner/name", *options])))
    assert config.evaluation.benchmarks == ["aime24", "gpqa_diamond", "amc"]
    assert (config.reward.kind, config.reward.function) == (None, "graders:mine")
