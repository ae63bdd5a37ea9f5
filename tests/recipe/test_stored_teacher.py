"""A teacher whose hidden states for demonstrations are kept in files: the same loss, and what is refused."""

import json
import random
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same
from safetensors.torch import load_file, save_file
from teachers import make_teacher, shown, taught
from tokenizers import AddedToken
from trainer_runs import metrics, run_config, write_task
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from update_cases import packed

from rlplus.common import teacher_states
from rlplus.common.durable import UNSEALED, locked, write_text
from rlplus.common.teacher_states import TeacherStates, digest
from rlplus.train.config import Config
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner import StoredTeacher, Teacher
from rlplus.train.trainer import open_run, train

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


def other_model(folder: Path, kind: str, seed: int, rows: int = 258) -> Path:
    """A model with a softcap of attention and of logits, a head with a bias and further rows, or scaled logits."""
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    if kind == "softcap":
        caps = {"head_dim": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5}
        lm: Any = Gemma2ForCausalLM(Gemma2Config(**sizes, **caps))
    elif kind == "bias":
        lm = PhiForCausalLM(PhiConfig(**sizes | {"vocab_size": rows}))
        torch.nn.init.normal_(lm.lm_head.bias, std=3.0)
    else:
        lm = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=4.0))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


def write_unequal(folder: Path) -> dict[str, Any]:
    """Demonstrations of 4 to 8 tokens; -> the section data."""
    rows = [{"prompt": "1+1="[: 2 + i % 3], "answer": "2", "demonstration": "." * i + "<2>"} for i in range(5)]
    rows += [rows[2], {"prompt": "0=", "answer": "7", "demonstration": "<7>"}]
    path = folder / "unequal.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), "demonstration": "demonstration", "max_prompt_length": 8}


@pytest.mark.parametrize(
    ("policy", "teacher"),
    [("", ""), ("softcap", "softcap"), ("bias", ""), ("", "bias"), ("", "scale"), ("bfloat16", "")],
)
def test_what_is_kept_is_what_the_model_says(tmp_path: Path, script: Any, policy: str, teacher: str) -> None:
    """All arguments of the teacher's head, for packed rows with padding; and zeros for a rank's dummy."""
    sections: dict[str, Any] = {"data": write_unequal(tmp_path), "train": {"tokens_per_micro_batch": 30}}
    if policy == "bfloat16":
        sections["model"] = run_config(tmp_path).model.model_dump() | {"dtype": "bfloat16"}
    elif policy:
        path = other_model(tmp_path / "policy", policy, 1)
        sections["model"] = {"scratch": None, "path": str(path), "attention": "eager"}
    frozen = other_model(tmp_path / "teacher", teacher, 2, rows=264) if teacher else make_teacher(tmp_path)
    keep(script, tmp_path, frozen, "--tokens", "20", **sections)
    with open_run(stored(tmp_path, **sections)) as run:
        own = str(run.config.model.path or run.folder.path / "scratch")
        model, states = Teacher(str(frozen), run.policy, own), StoredTeacher(str(tmp_path / "states"), run.policy, own)
        batches = packed(run, shown(run).samples)
        assert any(batch.tokens < batch.input_ids.numel() for batch in batches)
        assert max(len(batch.sequence.unique()) for batch in batches) > 1
        bound = 2e-2 if policy == "bfloat16" else 1e-5
        for batch in batches:
            want, got = model.head(batch), states.head(batch)
            assert got.keys() == want.keys()
            for name, value in got.items():
                if isinstance(value, torch.Tensor):
                    assert value.dtype == want[name].dtype
                    torch.testing.assert_close(value, want[name], rtol=bound, atol=bound)
                else:
                    assert value == want[name], name
        assert len(got["teacher_weight"]) == 258
        other = replace(batches[0], input_ids=batches[0].input_ids + 1, token_weight=torch.zeros(len(batches[0].rows)))
        assert states.head(other)["teacher_hidden"].abs().sum() == 0
        with pytest.raises(ValueError, match="no states of a demonstration of"):
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
    moved = (tmp_path / "states").rename(tmp_path / "moved")
    there = config.model_copy(update={"output_dir": str(again)}).model_dump()
    there["algorithm"]["recipe"]["teacher_states"] = str(moved)
    shutil.rmtree(again / "model")
    train(Config.model_validate(there), resume="step-000002")
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
    assert f"{6 - len(first)} of 6 different demonstrations to keep, " in capsys.readouterr().out
    files = [load_file(path) for path in sorted((tmp_path / "states").glob("states-*"))]
    assert sum(map(len, files)) == len(TeacherStates(tmp_path / "states")) == 6
    assert len(files) > 2
    assert all(tensor.shape == (4, 48) for file in files for tensor in file.values())
    train(stored(tmp_path))


def test_damaged_files_are_named_and_made_again(tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file leaves the others as they are."""
    monkeypatch.setattr(teacher_states, "SHARD_BYTES", 2 * 4 * 48 * 4)
    teacher = make_teacher(tmp_path)
    first, second, third = sorted(keep(script, tmp_path, teacher).glob("states-*"))
    others = first.read_bytes(), third.read_bytes()
    whole = second.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"version https://git-lfs.github.com/spec/v1", bytes(100)):
        second.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"states-00002.safetensors is damaged \(.*\): remove it, and run examples"
        ):
            train(stored(tmp_path))
        with pytest.raises(ValueError, match="remove it"):
            keep(script, tmp_path, teacher)
    second.unlink()
    with pytest.raises(ValueError, match=r"states-00002.safetensors is damaged \(.*No such file"):
        train(stored(tmp_path))
    keep(script, tmp_path, teacher)
    assert (first.read_bytes(), third.read_bytes()) == others
    assert len(TeacherStates(tmp_path / "states")) == 6
    train(stored(tmp_path))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All that a run reads of a folder."""
    states = TeacherStates(folder)
    everything = {name: states.read(name) for name in sorted(states._shards)}
    return everything | states.head() | {"facts": torch.tensor([*json.dumps(states.facts).encode()])}


def test_a_flipped_bit_is_found_or_has_no_effect(tmp_path: Path, script: Any) -> None:
    """In tensors, headers and states.json: 200 places of each file."""
    folder = keep(script, tmp_path, make_teacher(tmp_path))
    truth, draw, found = read_all(folder), random.Random(0), 0
    for file in (path for path in folder.iterdir() if path.name != teacher_states.LOCK):
        whole = file.read_bytes()
        for _ in range(200):
            bit = draw.randrange(8 * len(whole))
            file.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
            try:
                now = read_all(folder)
            except ValueError as error:
                assert str(folder) in str(error)  # noqa: PT017
                found += 1
            else:
                assert now.keys() == truth.keys(), bit
                assert all(torch.equal(now[name], truth[name]) for name in truth), bit
        file.write_bytes(whole)
    assert found > 590


def test_a_file_of_another_teacher_is_found(tmp_path: Path, script: Any) -> None:
    """It is whole, and has the same names and shapes."""
    folder = keep(script, tmp_path, make_teacher(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    (other / "task.jsonl").write_bytes((tmp_path / "task.jsonl").read_bytes())
    there = keep(script, other, make_teacher(other, seed=8))
    for name in ("head.safetensors", "states-00001.safetensors", "states.json"):
        mine = (folder / name).read_bytes()
        (folder / name).write_bytes((there / name).read_bytes())
        with pytest.raises(ValueError, match=r"is damaged \(want a (header|tensor) with CRC-32"):
            read_all(folder)
        (folder / name).write_bytes(mine)
    (folder / "states-00002.safetensors").write_bytes((there / "states-00001.safetensors").read_bytes())
    assert read_all(folder).keys() >= TeacherStates(folder)._shards.keys(), "a file that was not noted is not read"
    keep(script, tmp_path, make_teacher(tmp_path))
    assert not (folder / "states-00002.safetensors").exists()


def test_a_folder_of_an_earlier_version_is_read_with_a_warning(
    tmp_path: Path, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without checksums; the script adds them to the headers that it finds."""
    folder = keep(script, tmp_path, make_teacher(tmp_path))
    facts = json.loads((folder / "states.json").read_text())
    (folder / "states.json").write_text(json.dumps({name: facts[name] for name in ("complete", "teacher")}))
    for path in folder.glob("*.safetensors"):
        save_file(load_file(path), path)
    caplog.clear()
    train(stored(tmp_path))
    assert "was written by rlplus 0.3 or earlier, without checksums: damage is not noticed" in caplog.text
    keep(script, tmp_path, make_teacher(tmp_path))
    assert TeacherStates(folder).files is not None
    (folder / "states.json").write_text(json.dumps(facts | {"seal": "", "complete": True}))
    with pytest.raises(ValueError, match="its checksum is missing"):
        TeacherStates(folder)


def test_a_writer_killed_at_its_start_leaves_nothing_in_the_way(tmp_path: Path, script: Any) -> None:
    teacher = make_teacher(tmp_path)
    states = keep(script, tmp_path, teacher)
    for path in states.glob("*.safetensors"):
        path.rename(path.with_name(f"{path.name}.123.new"))
    keep(script, tmp_path, teacher)
    assert {path.name for path in states.iterdir()} == {
        ".lock",
        "head.safetensors",
        "states.json",
        "states-00001.safetensors",
    }
    with (
        locked(states / ".lock", "held"),
        pytest.raises(ValueError, match="want one process at a time that writes into"),
    ):
        keep(script, tmp_path, teacher)


@pytest.mark.parametrize("what", ["teacher", "file", "topk", "temperature", "both", "pickled", "short", "tokens"])
def test_the_script_refuses_what_it_cannot_keep(
    tmp_path: Path, script: Any, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = make_teacher(tmp_path, **({"max_position_embeddings": 7} if what == "short" else {}))
    if what == "tokens":
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken("<think>", special=True)])
        tokenizer.save_pretrained(str(teacher))
    if what == "pickled":
        torch.save(load_file(teacher / "model.safetensors"), teacher / "pytorch_model.bin")
        (teacher / "model.safetensors").unlink()
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
        "pickled": "want a teacher with safetensors, by which a run knows it",
        "short": "want a model with 8 positions, for prompt and demonstration; .*teacher has 7",
        "tokens": "want a teacher with all of the run's 258 tokens",
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
    write_text(states / "states.json", json.dumps(facts | {"seal": UNSEALED}), sealed=True)
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
