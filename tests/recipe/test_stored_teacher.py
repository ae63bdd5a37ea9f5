"""A teacher whose hidden states for demonstrations are kept in files: the same loss, and what is refused."""

import json
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same
from safetensors.torch import load_file
from teachers import make_teacher, shown, taught
from trainer_runs import metrics, run_config, write_task
from transformers import Gemma2Config, Gemma2ForCausalLM
from update_cases import packed

from rlplus.common import teacher_states
from rlplus.common.teacher_states import TeacherStates, digest
from rlplus.config import Config
from rlplus.data import byte_tokenizer
from rlplus.learner import StoredTeacher, Teacher
from rlplus.trainer import open_run, train

SCRIPT = Path(__file__).parents[2] / "examples/score_demonstrations.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


def keep(script: Any, folder: Path, teacher: Path, *options: str, **sections: Any) -> Path:
    """Write the teacher's states of the data of `run_config`; -> the folder."""
    plain = folder / "plain.yaml"
    plain.write_text(run_config(folder, **sections).to_yaml())
    script["main"]([str(plain), "--model", str(teacher), "--states", str(folder / "states"), *options])
    return folder / "states"


def stored(folder: Path, output: str = "run", **sections: Any) -> Config:
    return taught(folder, output, recipe={"teacher_states": str(folder / "states")}, **sections)


def gemma(folder: Path, seed: int) -> Path:
    """A model with a softcap and a bias-free head, whose embeddings are scaled."""
    tokenizer = byte_tokenizer()
    config = Gemma2Config(
        vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, max_position_embeddings=64, final_logit_softcapping=3.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    Gemma2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("kind", ["wider", "softcap"])
def test_what_is_kept_is_what_the_model_says(tmp_path: Path, script: Any, kind: str) -> None:
    """All arguments of the teacher's head, for packed rows of several demonstrations; and zeros for a rank's dummy."""
    sections: dict[str, Any] = {}
    if kind == "softcap":
        sections["model"] = {"scratch": None, "path": str(gemma(tmp_path / "gemma", 1)), "attention": "eager"}
        teacher = gemma(tmp_path / "teacher", 2)
    else:
        teacher = make_teacher(tmp_path)
    keep(script, tmp_path, teacher, "--tokens", "20", **sections)
    with open_run(stored(tmp_path, **sections)) as run:
        path = str(run.config.model.path or run.folder.path / "scratch")
        model, states = (
            Teacher(str(teacher), run.policy, path),
            StoredTeacher(str(tmp_path / "states"), run.policy, path),
        )
        batches = packed(run, shown(run).samples)
        assert max(len(batch.sequence.unique()) for batch in batches) > 1
        for batch in batches:
            want, got = model.head(batch), states.head(batch)
            assert got.keys() == {name for name, value in want.items() if value is not None or name in got}
            for name, value in got.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(
                        value, want[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                    )
                else:
                    assert value == want[name], name
        other = replace(batches[0], input_ids=batches[0].input_ids + 1, token_weight=torch.zeros(len(batches[0].rows)))
        assert states.head(other)["teacher_hidden"].abs().sum() == 0
        with pytest.raises(ValueError, match="no states of a demonstration of 4 tokens"):
            states.head(replace(other, token_weight=batches[0].token_weight))


def test_a_run_by_states_resumes_bit_for_bit_and_with_no_other_teacher(tmp_path: Path, script: Any) -> None:
    teacher = make_teacher(tmp_path)
    keep(script, tmp_path, teacher)
    config = stored(tmp_path, train={"steps": 4, "lr": 1e-2}, checkpoint={"every": 2})
    whole = train(config)
    rows = metrics(whole)
    beside = taught(tmp_path, "beside", recipe={"teacher": str(teacher)}, train={"steps": 4, "lr": 1e-2})
    for row, other in zip(rows, metrics(train(beside)), strict=True):
        assert row["distill/divergence"] == pytest.approx(other["distill/divergence"], rel=1e-4)
    assert rows[-1]["distill/divergence"] < rows[0]["distill/divergence"]
    again = shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(again / "model")
    train(config.model_copy(update={"output_dir": str(again)}), resume="step-000002")
    assert same(whole, again)
    shutil.rmtree(tmp_path / "states")
    keep(script, tmp_path, make_teacher(tmp_path, "other", seed=8))
    with pytest.raises(ValueError, match=r"want the teacher that the run began with; .*states has other weights"):
        train(config.model_copy(update={"output_dir": str(again)}), resume="step-000002")


def test_demonstrations_without_states_are_refused_before_the_first_step(tmp_path: Path, script: Any) -> None:
    keep(script, tmp_path, make_teacher(tmp_path))
    config = stored(tmp_path)
    write_task(tmp_path, 8)
    with pytest.raises(ValueError, match=r"want the teacher's states of all 8 demonstrations.*lacks 2: run examples"):
        train(config)
    with pytest.raises(ValueError, match=r"lacks 6"):  # the same texts behind other prompts
        train(stored(tmp_path, data={"response_prefix": "<"}))


def test_the_script_goes_on_where_it_was_interrupted(
    tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of six demonstrations are in the first file when it ends; of each there is one tensor in the end."""
    monkeypatch.setattr(teacher_states, "SHARD_BYTES", 2 * 4 * 48 * 4)
    teacher, calls = make_teacher(tmp_path), [0]
    add = teacher_states.StatesWriter.add

    def failing(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        add(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(teacher_states.StatesWriter, "add", failing)
        with pytest.raises(KeyboardInterrupt):
            keep(script, tmp_path, teacher, "--tokens", "20")
    with pytest.raises(
        ValueError, match=r"has a part of the states: run examples/score_demonstrations.py --states again"
    ):
        train(stored(tmp_path))
    first = TeacherStates(tmp_path / "states", complete=False)
    assert 0 < len(first) < 4
    capsys.readouterr()
    keep(script, tmp_path, teacher, "--tokens", "20")
    assert f"{6 - len(first)} demonstrations, " in capsys.readouterr().out
    files = [load_file(path) for path in sorted((tmp_path / "states").glob("states-*"))]
    assert sum(map(len, files)) == len(TeacherStates(tmp_path / "states")) == 6
    assert len(files) > 2
    assert all(tensor.shape == (4, 48) for file in files for tensor in file.values())
    train(stored(tmp_path))


@pytest.mark.parametrize("what", ["teacher", "file", "topk", "temperature", "both"])
def test_the_script_refuses_what_it_cannot_keep(
    tmp_path: Path, script: Any, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = make_teacher(tmp_path)
    options = {
        "topk": ["--topk", "4"],
        "temperature": ["--temperature", "0.5"],
        "both": ["--output", str(tmp_path / "out.jsonl")],
    }.get(what, [])
    if what == "teacher":
        keep(script, tmp_path, make_teacher(tmp_path, "other", seed=8))
    if what == "file":
        (tmp_path / "states").mkdir()
        (tmp_path / "states/notes").write_text("")
    message = {
        "teacher": "or one with this teacher's states; .*states has another's, whose fingerprint is",
        "file": "want an empty folder, or one with states of this teacher",
        "topk": "and not with --states; got 4",
        "temperature": "want --temperature 1 of a teacher",
        "both": "not allowed with argument",
    }[what]
    with pytest.raises((ValueError, SystemExit)) as error:
        keep(script, tmp_path, teacher, *options)
    assert re.search(message, f"{error.value}{capsys.readouterr().err}")


def test_states_that_do_not_fit_the_run_are_refused(tmp_path: Path, script: Any) -> None:
    states = keep(script, tmp_path, make_teacher(tmp_path))
    with pytest.raises(ValueError, match=r"want states in model.dtype bfloat16; .*states has float32"):
        train(stored(tmp_path, model=run_config(tmp_path).model.model_dump() | {"dtype": "bfloat16"}))
    facts = json.loads((states / "states.json").read_text())
    facts["teacher"]["vocabulary"] = "another"
    (states / "states.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="want a teacher whose tokenizer has the policy's tokens"):
        train(stored(tmp_path))
    (states / "states.json").unlink()
    with pytest.raises(ValueError, match=r"want a folder of examples/score_demonstrations.py --states; got .*states"):
        train(stored(tmp_path))
    where = {"teacher_states": "states", "name": "distill"}
    with pytest.raises(ValueError, match="teacher_states is for demonstrations: want preset sft; got grpo"):
        run_config(tmp_path, algorithm={"preset": "grpo", "recipe": where})
    with pytest.raises(ValueError, match=r"teacher_states, or data.teacher_topk; got teacher and teacher_states"):
        run_config(tmp_path, algorithm={"preset": "sft", "recipe": where | {"teacher": "x"}})
    with pytest.raises(ValueError, match="teacher_topk belongs to"):
        run_config(tmp_path, algorithm={"preset": "sft", "recipe": where | {"teacher_topk": 4}})
    with pytest.raises(ValueError, match="want recipe distill and a divergence with preset sft"):
        run_config(tmp_path, algorithm={"preset": "sft", "recipe": where | {"loss": "sampled"}})


def test_a_sequence_is_known_by_its_tokens_and_where_the_response_begins() -> None:
    names = {
        digest(*pair) for pair in (((1, 2), (3,)), ((1,), (2, 3)), ((1, 2), (4,)), ((1, 2, 3), ()), ((), (1, 2, 3)))
    }
    assert len(names) == 5
    assert digest((1, 2), (3,)) == digest([1, 2], [3])
