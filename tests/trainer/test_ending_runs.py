"""Whole runs of a chat model whose turns end in another token than its tokenizer's eos."""

import json
from pathlib import Path
from typing import Any

import pytest
from ending_models import END_OF_TURN, EOS, write_chat_model
from trainer_runs import metrics, run_config, write_state
from transformers import AutoTokenizer

from rlplus.tools.cli import main
from rlplus.tools.plan.data_report import plan_data
from rlplus.train.checkpoint import read_state
from rlplus.train.config import Config
from rlplus.train.evaluation.sample import evaluate_model
from rlplus.train.trainer import train

LIMIT = 8


def config_of(folder: Path, output: str = "run", *, special: bool = True, **sections: dict[str, Any]) -> Config:
    """Chat prompts of the task; the model answers each with <7> and the end of a turn."""
    start = folder / "start"
    if not start.exists():
        write_chat_model(start, "<7>", special=special)
    rows = {"chat": True, "max_prompt_length": 32}
    changes: dict[str, dict[str, Any]] = {
        "model": {"scratch": None, "path": str(start)},
        "data": rows,
        "rollout": {"max_response_length": LIMIT},
        "train": {"steps": 1, "lr": 1e-6},
    }
    changes |= {name: changes.get(name, {}) | values for name, values in sections.items()}
    return run_config(folder, output, **changes)


@pytest.mark.parametrize("special", [True, False])
def test_training_evaluation_and_the_written_model_know_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], special: bool
) -> None:
    config = config_of(tmp_path, special=special)
    evaluation = {"data": {"path": config.data.path, "chat": True, "max_prompt_length": 32}, "temperature": 1.0}
    config = config_of(tmp_path, evaluation=evaluation)
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    assert main(["train", str(path)]) == 0
    said = capsys.readouterr().err
    assert "responses end in <end_of_turn> (258), <|endoftext|> (257)" in said
    assert "puts" not in said
    (step,) = metrics(Path(config.output_dir))
    assert (step["response_length/mean"], step["response_length/clipped"]) == (4, 0)
    folder = Path(config.output_dir) / "model"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [END_OF_TURN, EOS]
    (result,) = evaluate_model(config).values()
    assert (result.mean_response_length, result.truncated_share) == (4, 0)
    assert sum(result.correct) == result.n[5] == result.correct[5], "the grader reads <7>, which is the last answer"
    assert result.asked["model.end_tokens"] == "[257, 258]"


def test_named_tokens_are_taken_alone_and_the_template_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(
        tmp_path, model={"scratch": None, "path": str(tmp_path / "start"), "end_tokens": ["<|endoftext|>"]}
    )
    path = tmp_path / "run.yaml"
    config_of(tmp_path)
    path.write_text(config.to_yaml())
    assert main(["train", str(path)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "responses end in <|endoftext|> (257)" in said
    assert "puts <end_of_turn> (258) behind the assistant's turn" in said
    (step,) = metrics(Path(config.output_dir))
    assert (step["response_length/mean"], step["response_length/clipped"]) == (LIMIT, 1)
    written = json.loads((Path(config.output_dir) / "model/generation_config.json").read_text())
    assert written["eos_token_id"] == EOS


def test_a_run_that_began_with_the_eos_alone_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is one of a version that did not keep the end tokens."""
    start, checkpoint = {"scratch": None, "path": str(tmp_path / "start")}, {"every": 1, "keep": 9}
    config_of(tmp_path)
    config = config_of(tmp_path, model=start | {"end_tokens": [EOS]}, checkpoint=checkpoint)
    train(config)
    last = Path(config.output_dir) / "checkpoints/step-000001"
    state = read_state(last)
    del state["ends"]
    del state["config"]["model"]["end_tokens"]
    write_state(last, state)
    config = config_of(tmp_path, checkpoint=checkpoint, train={"steps": 2, "lr": 1e-6})
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    assert main(["train", str(path), "--resume"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "responses go on ending as when the run began, in <|endoftext|> (257); those of a new run would end" in said
    assert [row["response_length/clipped"] for row in metrics(Path(config.output_dir))] == [1, 1]
    assert read_state(Path(config.output_dir) / "checkpoints/step-000002")["ends"] == [EOS]


def test_a_run_keeps_its_ends_though_the_models_files_change(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"every": 1})
    train(config)
    file = tmp_path / "start/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [EOS, ord("7")]}))
    train(config_of(tmp_path, checkpoint={"every": 1}, train={"steps": 2, "lr": 1e-6}), resume="newest")
    assert [row["response_length/mean"] for row in metrics(Path(config.output_dir))] == [4, 4]


def test_the_plan_of_the_data_shows_the_end(tmp_path: Path) -> None:
    shown = plan_data(config_of(tmp_path)).rendered
    assert [each.demonstration for each in shown][:1] == ["<0><end_of_turn>"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    assert shown[0].demonstration_tokens == len(tokenizer.encode("<0>")) + 1
