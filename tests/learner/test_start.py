"""The weights that a run starts from: all there, in the model's shapes, and finite."""

import logging
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from engine_runs import changed, launched, write_start
from safetensors.torch import load_file, save_file
from trainer_runs import run_config

from rlplus.train.config import Config
from rlplus.train.data import byte_tokenizer
from rlplus.train.evaluation.sample import evaluate_model
from rlplus.train.learner import write_pretrained
from rlplus.train.trainer import open_run

NAME = "model.layers.1.self_attn.q_proj.weight"


def start(folder: Path, *, tied: bool = True, zero_stage: int = 1, **tensors: torch.Tensor | None) -> Config:
    """A run from a checkpoint with these tensors changed; None: without it."""
    write_start(folder / "start", tied=tied)
    file = folder / "start/model.safetensors"
    weights = {name: t for name, t in (load_file(file) | tensors).items() if t is not None}
    save_file(weights, file, metadata={"format": "pt"})
    model = {"scratch": None, "path": str(folder / "start")}
    evaluation = {"data": {"path": "-", "max_prompt_length": 8}, "samples": 1, "k": [1]}
    config = run_config(folder, model=model, train={"zero_stage": zero_stage, "steps": 1}, evaluation=evaluation)
    data = config.evaluation.data
    assert data is not None
    return changed(config, "evaluation", data=data.model_copy(update={"path": config.data.path}))


WRONG: list[tuple[bool, dict[str, Any], str]] = [
    (True, {NAME: None}, rf"lacks {NAME}$"),
    (True, {"model.embed_tokens.weight": None}, r"lacks lm_head\.weight, model\.embed_tokens\.weight$"),
    (False, {"lm_head.weight": None}, r"lacks lm_head\.weight$"),
    (True, {"model.norm.weight": torch.ones(3)}, r".* shapes .*: model\.norm\.weight \(3,\) instead of \(64,\)$"),
    (True, {NAME: None, "model.norm.weight": torch.ones(3)}, rf"lacks {NAME} and .* shapes .*norm\.weight"),
]


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(("tied", "tensors", "message"), WRONG)
def test_weights_that_are_not_all_the_models_are_refused(
    tmp_path: Path, tied: bool, tensors: dict[str, Any], message: str, zero_stage: int
) -> None:
    config = start(tmp_path, tied=tied, zero_stage=zero_stage, **tensors)
    with pytest.raises(ValueError, match=rf"want a checkpoint with all weights of the Qwen2 model; .*start {message}"):
        open_run(config).__enter__()


def test_an_evaluation_refuses_them_too(tmp_path: Path) -> None:
    config = start(tmp_path, **{NAME: None})
    with pytest.raises(ValueError, match=rf"lacks {NAME}$"):
        evaluate_model(config, str(tmp_path / "start"))


def test_overrides_that_do_not_fit_a_model_made_on_the_spot_are_refused(tmp_path: Path) -> None:
    wider = run_config(tmp_path, model={"overrides": {"hidden_size": 36}})
    with pytest.raises(ValueError, match=r"other shapes than the model: lm_head|other shapes than the model: model\."):
        open_run(wider).__enter__()


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{kind}_layernorm.weight" for i in (0, 1) for kind in ("input", "post_attention")]
    tensors = dict.fromkeys([*names, NAME, "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"])
    with pytest.raises(ValueError, match=rf"lacks {names[0]}, .* and 2 more$"):
        open_run(start(tmp_path, **tensors)).__enter__()


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    config = start(tmp_path)
    file = tmp_path / "start/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"could not read the weights of .*/start: "):
        open_run(config).__enter__()


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_tensors_too_many_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, zero_stage: int) -> None:
    config = start(tmp_path, zero_stage=zero_stage, **{"score.weight": torch.ones(1), NAME + "_scale": torch.ones(1)})
    with caplog.at_level(logging.WARNING), open_run(config):
        pass
    assert f"start has tensors that the model does not: {NAME}_scale, score.weight" in caplog.text


def with_value(shape: tuple[int, ...], value: float) -> torch.Tensor:
    """The tensor with its last entry changed."""
    tensor = torch.zeros(shape)
    tensor.view(-1)[-1] = value
    return tensor


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(
    ("tensors", "where"),
    [
        ({NAME: with_value((64, 64), torch.nan), "model.norm.weight": with_value((64,), torch.inf)}, NAME),
        ({"model.embed_tokens.weight": with_value((258, 64), -torch.inf)}, r"model\.embed_tokens\.weight"),
        ({"model.norm.weight": torch.full((64,), 3e38)}, "the logprobs of a test batch, though in no parameter"),
    ],
)
def test_weights_that_are_not_finite_are_named_and_nothing_else_is_blamed(
    tmp_path: Path, tensors: dict[str, Any], where: str, zero_stage: int
) -> None:
    config = start(tmp_path, zero_stage=zero_stage, **tensors)
    with pytest.raises(ValueError, match=rf"model in .*start has NaN or infinity in (parameter )?{where}: want finite"):
        open_run(config).__enter__()


@pytest.mark.slow
def test_both_ranks_refuse_missing_tensors(tmp_path: Path) -> None:
    with launched(start(tmp_path, zero_stage=3, **{NAME: None})) as process:
        _, error = process.communicate(timeout=processes.PATIENCE_S)
    assert process.returncode
    assert error.count(f"lacks {NAME}") == 2, error[-4000:]


def test_a_tokenizer_that_cannot_be_written_is_an_error_with_its_folder(tmp_path: Path) -> None:
    """The error of transformers has no name, and the one of the package tokenizers is a plain Exception."""
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"could not write the tokenizer to {tmp_path}: No space left on device"):
        write_pretrained(byte_tokenizer(), str(tmp_path))
