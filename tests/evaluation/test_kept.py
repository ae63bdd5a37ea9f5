"""Samples that runs and evaluations keep: whose, with what numbers, whole after a kill, each once after a resume."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM

from rlplus.loss import group_advantages
from rlplus.tools.cli import main
from rlplus.train.config import Config
from rlplus.train.data import (
    KeptSample,
    byte_tokenizer,
    drop_kept,
    kept_facts,
    kept_steps,
    read_kept,
    token_texts,
    write_kept,
)
from rlplus.train.reward import Score
from rlplus.train.trainer import provenance, train

TOKENIZER = byte_tokenizer()


def sample(**changes: Any) -> KeptSample:
    base = KeptSample(3, 7, "", "1+1=", "2", 1.0, "ok", False, ["2", "<|endoftext|>"], [False, False], [-0.5, -0.25])
    return replace(base, **changes)


@given(st.text(max_size=12))
def test_texts_of_tokens_join_to_the_text(text: str) -> None:
    tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    texts = token_texts(TOKENIZER, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text + "<|endoftext|>"


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    assert token_texts(TOKENIZER, list("a☃b".encode())) == ["a", "", "", "☃", "b"]
    broken = token_texts(TOKENIZER, [0xE2, 0x98] * 9)  # no characters at all
    assert len(broken) == 18
    assert max(map(len, broken)) <= 4


def test_samples_come_back_from_a_file(tmp_path: Path) -> None:
    first = sample(reward=None, status="timeout", entropy=[0.5, 0.0], advantage=[1.0, 1.0], response="☃\x1b[2J\0")
    first = replace(first, answer="☃ 4", detail="10 s", grade=0.5)
    second = sample(step=None, benchmark="aime", exploration_weight=[0.5, None], external=[True, False])
    path = tmp_path / "a/step-000003.parquet"
    write_kept(path, [first, second] * 200, {"identity": "ä"})
    assert read_kept(path) == [first, second] * 200
    assert read_kept(path, 3) == [first, second, first]
    assert kept_facts(path)["identity"] == "ä"
    write_kept(path, [sample(detail="\ud800")])  # a user's grader may say anything
    assert [one.detail for one in read_kept(path)] == ["\\ud800"]


@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path, step: int) -> None:
    """Anywhere in the file: samples, facts and Parquet's own tables."""
    path, samples = tmp_path / "step-000003.parquet", [sample(reward=i / 8, answer=f"{i}") for i in range(9)]
    write_kept(path, samples, {"seconds": "1.5"})
    assert pq.read_table(path, page_checksum_verification=True).num_rows == 9
    whole, refused = path.read_bytes(), 0

    def read() -> object:
        try:
            return kept_facts(path), read_kept(path)
        except ValueError as error:
            return str(error)

    for bit in range(0, 8 * len(whole), step):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if (found := read()) != ({"seconds": "1.5"}, samples):
            assert str(path) in str(found), (bit, found)
            refused += 1
    assert refused > 0.95 * len(range(0, 8 * len(whole), step))


def test_files_without_the_newer_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "step-000003.parquet"
    write_kept(path, [sample(answer="4", detail="why", grade=1.0)] * 2)
    older = pq.read_table(path).replace_schema_metadata({"stop": "2"})  # no checksum, as in 0.2.0
    pq.write_table(older, path)
    assert read_kept(path) == [sample(answer="4", detail="why", grade=1.0)] * 2
    older = older.drop_columns(["answer", "detail", "grade"])
    pq.write_table(older, path)
    assert read_kept(path) == [sample()] * 2
    assert kept_facts(path) == {"stop": "2"}
    pq.write_table(older.drop_columns(["reward"]), path)
    with pytest.raises(ValueError, match="in other types or with others than a run's"):
        read_kept(path)


def test_right_is_what_the_grader_found_before_the_reward_was_shaped() -> None:
    overlong = sample(reward=0.5, grade=1.0)
    assert (overlong.right, overlong.graded) == (True, "right")
    assert sample(reward=0.5, detail="near").graded == "wrong (near)"
    assert sample(reward=None, detail="10 s").graded == "no (10 s)"


def test_a_failure_leaves_the_older_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "step-000003.parquet"
    write_kept(path, [sample()])
    with pytest.raises(ZeroDivisionError):
        write_kept(path, (sample(problem=1 // i) for i in (1, 0)))
    assert read_kept(path) == [sample()]
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"could not write .*file/x\.parquet: Not a directory"):
        write_kept(tmp_path / "file/x.parquet", [sample()])


@pytest.mark.parametrize("content", [b"", b"PAR1 and more", b"x" * 100])
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-000001.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"want a file of kept samples in .*step-000001\.parquet; got"):
        read_kept(path)
    with pytest.raises(ValueError, match=r"want a file of kept samples in .*step-000001\.parquet; got"):
        kept_facts(path)


def test_later_steps_and_unfinished_files_are_dropped(tmp_path: Path) -> None:
    names = [
        "step-000001",
        "step-000002",
        "step-000002-amc-1-000000",
        "step-000003",
        "step-000010",
        "step-000011-amc-0-000000",
        "evaluation-amc-0-000000",
    ]
    for name in names:
        (tmp_path / f"{name}.parquet").touch()
    (tmp_path / "step-000002.parquet.7.new").touch()
    (tmp_path / "evaluation-amc-0-000032.parquet.7.new").touch()  # an evaluation may go on beside the training
    drop_kept(tmp_path, after=2)
    left = sorted(path.stem for path in tmp_path.iterdir())
    assert left == [
        "evaluation-amc-0-000000",
        "evaluation-amc-0-000032.parquet.7",
        "step-000001",
        "step-000002",
        "step-000002-amc-1-000000",
    ]
    assert list(kept_steps(tmp_path).values()) == [1, 2, 2]
    drop_kept(tmp_path / "none", after=0)


def config_of(folder: Path, output: str = "run", **sections: dict[str, Any]) -> Config:
    return run_config(folder, output, **{"log": {"samples_every": 2}, "train": {"steps": 4}} | sections)


def test_a_run_keeps_what_the_policy_says_of_its_first_groups(tmp_path: Path) -> None:
    """Compared with the model of the first step in float64, token by token."""
    config = config_of(tmp_path, log={"sample_groups": 4}, train={"steps": 1})
    folder = train(config)
    (path,) = (folder / "samples").iterdir()
    samples = read_kept(path)
    assert path.name == "step-000001.parquet"
    assert len(samples) == 4 * 4
    lm = AutoModelForCausalLM.from_pretrained(folder / "scratch", dtype=torch.float64)
    gamma = config.algorithm.resolve().objective.gamma
    weights = []
    for i, one in enumerate(samples):
        assert (one.step, one.benchmark, one.demonstration) == (1, "", i % 4 == 3)
        assert one.prompt == f"{one.problem}+{one.problem % 3}="
        assert one.answer == f"{one.problem + one.problem % 3}"
        if one.demonstration:
            assert one.tokens == [*one.response, "<|endoftext|>"]
            assert one.reward == 1.0
            prompt, response = one.prompt.encode(), one.response.encode()
            ids = torch.tensor([[*prompt, *response, TOKENIZER.eos_token_id]])
            logp = lm(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logprob = logp.gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert one.logprob == pytest.approx(logprob.tolist(), rel=1e-4, abs=1e-5)
            assert one.entropy == pytest.approx((-logp.exp() * logp).sum(-1).tolist(), rel=1e-4)
            assert one.exploration_weight == pytest.approx(((1 - logprob.exp()) ** gamma).tolist(), rel=1e-4)
            weights += one.exploration_weight or []
        else:
            assert set(one.exploration_weight or ()) == {None}
            assert len(one.tokens) == len(one.logprob) == len(one.entropy or ())
    rewards = torch.tensor([one.reward for one in samples], dtype=torch.float64)
    groups = torch.arange(4).repeat_interleave(4)
    wanted = group_advantages(rewards, groups, normalize_std=config.algorithm.resolve().normalize_std)
    for one, advantage in zip(samples, wanted.tolist(), strict=True):
        assert one.advantage == pytest.approx([advantage] * len(one.tokens))
    (row,) = metrics(folder)
    demonstrated = [logprob for one in samples if any(one.external) for logprob in one.logprob]
    assert row["actor/logprob_external"] == pytest.approx(fmean(demonstrated), rel=1e-5)
    assert row["actor/exploration_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    (event,) = board.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert f"    {samples[3].heading}\n" in text
    assert all(line.startswith("    ") for line in text.split("\n"))


class Failing:
    """In place of a Scorer: it fails on every wrong response."""

    def __init__(self, config: Any, columns: Sequence[str]) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, texts: Sequence[str], answers: Sequence[str], columns: object, **_: object) -> list[Score]:
        right = (text == f"<{answer}>" for text, answer in zip(texts, answers, strict=True))
        return [Score(1.0, "ok") if ok else Score(nan, "timeout", "after 5 s") for ok in right]


def test_responses_on_which_the_grader_failed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.trainer.run_parts.Scorer", Failing)
    folder = train(config_of(tmp_path, train={"steps": 1}))
    samples = read_kept(folder / "samples/step-000001.parquet")
    failed = [one for one in samples if one.status == "timeout"]
    assert len(samples) - len(failed) == 2  # the demonstrations of two groups
    assert len(failed) == 2 * 4  # twelve failed; as many are kept as two groups have members
    assert all(one.reward is None and one.advantage is None and "not graded" in one.heading for one in failed)
    assert {one.graded for one in failed} == {"no (after 5 s)"}


def test_which_steps_are_kept(tmp_path: Path) -> None:
    assert list(kept_steps(train(config_of(tmp_path)) / "samples").values()) == [1, 2, 4]
    assert not (train(config_of(tmp_path, "none", log={"samples_every": 0})) / "samples").exists()


def test_a_resumed_run_keeps_each_sample_once(tmp_path: Path) -> None:
    """Steps behind the checkpoint are done again, the same."""
    config = config_of(tmp_path, checkpoint={"every": 1, "keep": 9})
    folder = train(config) / "samples"
    whole = {path: read_kept(path) for path in kept_steps(folder)}
    (folder / "step-000004.parquet.7.new").touch()
    (folder / "step-000007.parquet").touch()  # left by a longer run that went on from here
    train(config, resume="step-000003")
    assert {path: read_kept(path) for path in folder.iterdir()} == whole
    assert len(whole) == 3


def task_without_letters(folder: Path) -> Path:
    (path := folder / "book.jsonl").write_text('{"prompt": "1?", "answer": "see the book"}\n' * 2)
    return path


def test_evaluations_keep_all_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"path": str(tmp_path / "task.jsonl"), "max_prompt_length": 8}
    config = config_of(tmp_path, evaluation={"data": data, "every": 3, "samples": 2, "k": [1]})
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    assert main(["train", str(path)]) == 0
    (name,) = {path.name for path in (tmp_path / "run/samples").iterdir() if path.name.count("-") > 1}
    assert name == "step-000003-task-0-000000.parquet"
    assert main(["eval", str(path), "evaluation.samples=1"]) == 0
    kept = {file: file.read_bytes() for file in (tmp_path / "run").rglob("evaluation-*.*")}
    capsys.readouterr()
    assert main(["eval", str(path)]) == 2
    refusal = "2 files are of another model, data or settings. evaluation-task.json: evaluation.samples 1 (asked: 2)"
    assert refusal in capsys.readouterr().err
    assert {file: file.read_bytes() for file in kept} == kept
    assert main(["eval", str(path), "--overwrite"]) == 0
    assert "problems from the samples kept" not in capsys.readouterr().err
    assert main(["eval", str(path), "--overwrite"]) == 0
    assert f"6 of 6 problems from the samples kept in {tmp_path}/run/samples" in capsys.readouterr().err
    result = json.loads((tmp_path / "run/evaluation-task.json").read_text())
    evaluated = read_kept(tmp_path / "run/samples/evaluation-task-0-000000.parquet")
    assert [one.problem for one in evaluated] == [i for i in range(6) for _ in range(2)]
    assert {(one.step, one.benchmark) for one in evaluated} == {(None, "task")}
    assert sum(one.reward == 1 for one in evaluated) == sum(result["correct"])
    assert all(len(one.tokens) == len(one.logprob) for one in evaluated)
    assert not any(isnan(p) for one in evaluated for p in one.logprob)
    assert {one.answer for one in evaluated} == {f"{i + i % 3}" for i in range(6)}
    assert {one.detail for one in evaluated if one.status == "unparsed"} == {"the pattern does not match"}
    letters = ["reward.kind=choice", "reward.pattern=null", "--output", str(tmp_path / "letters")]
    assert main(["eval", str(path), *letters, f"evaluation.data.path={task_without_letters(tmp_path)}"]) == 2
    out, err = capsys.readouterr()
    assert "choice │ 4 bad_gold" in " ".join(out.split())
    assert "want reference answers that the grader reads; got none in book (choice)" in err
    assert not [*(tmp_path / "letters").glob("*.json")]
    during = read_kept(tmp_path / "run/samples" / name)
    assert {(one.step, one.benchmark) for one in during} == {(3, "task")}


def test_each_start_of_a_run_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "rlplus", "train", "a b.yaml"])
    config = config_of(tmp_path, train={"steps": 1})
    folder = train(config)
    (first,) = json.loads((folder / "run.json").read_text())["starts"]
    assert (first["step"], first["command"]) == (0, "python3 -m rlplus train 'a b.yaml'")
    assert first["versions"]["torch"] == torch.__version__
    assert {"rlplus", "transformers", "deepspeed", "triton", "python"} <= first["versions"].keys()
    assert first["hardware"]["ranks"].startswith("1 × ")
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})})
    (folder / "run.json").write_text("[]")
    train(longer, resume="newest")
    assert capsys.readouterr().err.count("run.json is damaged: want the starts of a run") == 1
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [1]


@pytest.mark.parametrize(
    "damage", [b"[]", b'{"starts": [', b"\xff", b'{"starts": [1]}', b'{"starts": [{"versions": [1]}]}']
)
def test_damaged_starts_do_not_block_a_run(tmp_path: Path, damage: bytes) -> None:
    """They say where it comes from, and nothing depends on them: they are moved aside, which is said."""
    (path := tmp_path / "run.json").write_bytes(damage)
    (note,) = provenance.note_start(path, 3, {}, ["CPU"])
    assert f"{path} is damaged: want the starts of a run; " in note
    assert "It is now run.damaged.json: dates, commands and versions of the starts before this one are lost" in note
    assert (tmp_path / "run.damaged.json").read_bytes() == damage
    assert [start["step"] for start in json.loads(path.read_text())["starts"]] == [3]
    assert provenance.note_start(path, 4, {}, ["CPU"]) == []
    assert [start["step"] for start in json.loads(path.read_text())["starts"]] == [3, 4]


def test_commits_are_those_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "site-packages/rlplus")
    monkeypatch.chdir(tmp_path)
    assert provenance.commits() == {}
    package = tmp_path / "site-packages/rlplus"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "run.yaml").write_text("a: 1\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["add", "run.yaml"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert provenance.commits() == {"current directory": commit}  # the package is none of the repository's
    (tmp_path / "run.yaml").write_text("a: 2\n")
    assert provenance.commits() == {"current directory": f"{commit}-dirty"}
    subprocess.run([*git, "add", "--all"], check=True)
    assert provenance.commits().keys() == {"current directory", "rlplus"}
