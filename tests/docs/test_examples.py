"""The examples in plain PyTorch, the preparation of public data, and the commands of the walk-through."""

import os
import re
import runpy
import sys
from pathlib import Path

import processes
import pyarrow.parquet as pq
import pytest
import torch
from public_data import GSM8K, OPENR1, write

from examples import loss, prepare_data, train_minimal
from rlplus.train.config import split_hub_path

FOLDER = Path(__file__).parents[2] / "examples"


def test_the_loss_without_logits_has_the_gradients_of_the_loss_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    loss.main()
    out = capsys.readouterr().out
    (ours, plain) = re.findall(r"loss (\S+), gradient norm (\S+)", out)
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in plain], rel=1e-4)
    (difference,) = re.findall(r"difference of the gradients: (\S+)", out)
    assert float(difference) < 1e-5


def test_rl_plus_learns_without_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """A random model learns from its demonstrations first; its rollouts follow, after more steps than a test has."""
    history = torch.tensor(train_minimal.main(steps=30))
    assert history.shape == (30, 2)
    (_, before), (_, after) = history[:10].mean(0).tolist(), history[-10:].mean(0).tolist()
    assert after > before + 0.15
    assert len(re.findall(r"^step +\d+ ", capsys.readouterr().out, re.MULTILINE)) == 1


@pytest.mark.slow
def test_the_manual_shows_what_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers depend on the processor in their last digits; the end must not."""
    shown = (FOLDER.parent / "docs/index.md").read_text()
    train_minimal.main()
    printed = capsys.readouterr().out
    (want,), (got,) = (
        re.findall(r"^(\d+)% of 100 problems that were not trained on", t, re.M) for t in (shown, printed)
    )
    assert int(got) == pytest.approx(int(want), abs=5)
    assert int(got) >= 90


SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the losses alone there is no transformers and no pyarrow."""
    for name in ("transformers", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        SystemExit, match=r'^(transformers|pyarrow)\S* is not installed: pip install -e (\. trans|"\.\[train)'
    ):
        runpy.run_path(str(path))


def test_gsm8k_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = write(tmp_path, GSM8K, "train.parquet"), write(tmp_path, GSM8K[1:], "test.parquet")
    out = tmp_path / "out"
    prepare_data.main(["gsm8k", "--train", train, "--test", test, "--validation", "1", "--output", str(out)])
    assert capsys.readouterr().out.splitlines() == [
        f"{out}/train.parquet: 2 rows",
        f"{out}/validation.parquet: 1 rows",
        f"{out}/test.parquet: 2 rows",
    ]
    tables = {path.stem: pq.read_table(path).to_pylist() for path in out.iterdir()}
    rows = {row["prompt"]: row for row in tables["train"] + tables["validation"]}
    assert rows.keys() == {row["question"] for row in GSM8K}
    assert [row["answer"] for row in tables["test"]] == ["1600", "-2"]
    assert rows["What is 48 + 24?"] == {
        "prompt": "What is 48 + 24?",
        "answer": "72",
        "demonstration": "Half of 48 is 48/2 = 24.\n48+24 = 72.\nThe answer is \\boxed{72}.",
    }


def test_openr1_rows(tmp_path: Path) -> None:
    train = write(tmp_path, OPENR1, "openr1.parquet")
    prepare_data.main(["openr1-math", "--train", train, "--validation", "1", "--output", str(tmp_path / "out")])
    tables = {path.stem: pq.read_table(path).to_pylist() for path in (tmp_path / "out").iterdir()}
    assert tables.keys() == {"train", "validation"}
    rows = tables["train"] + tables["validation"]
    assert sorted(row["prompt"][1]["content"] for row in rows) == [
        "0+1?",
        "1+1?",
        "2+1?",
    ]  # one of them was there twice
    assert {row["reward_model"]["ground_truth"]: row["target"] for row in rows} == {
        str(i + 1): f"<think>\n{i}.</think>\n\\boxed{{{i + 1}}}" for i in range(3)
    }


def test_data_of_another_layout_are_refused(tmp_path: Path) -> None:
    openr1 = write(tmp_path, OPENR1, "openr1.parquet")
    with pytest.raises(ValueError, match=r"openr1.parquet row 1: want question and answer: .*; got {'data_source'"):
        prepare_data.main(["gsm8k", "--train", openr1, "--output", str(tmp_path)])
    two = write(tmp_path, [OPENR1[0] | {"target": OPENR1[0]["target"] * 2}], "two.parquet")
    with pytest.raises(ValueError, match=r"two.parquet row 1: want prompt, .* a list of one message; got"):
        prepare_data.main(["openr1-math", "--train", two, "--output", str(tmp_path)])
    with pytest.raises(ValueError, match=r"want --validation from 1 to 2, fewer than prompts; got 3"):
        prepare_data.main(["openr1-math", "--train", openr1, "--validation", "3", "--output", str(tmp_path)])


def test_without_the_hub_one_line_says_what_to_give_it(tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    program = [sys.executable, FOLDER / "prepare_data.py", "gsm8k", "--output", tmp_path / "out"]
    done = processes.run(program, env=environment)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("prepare_data.py: want a data set")]
    assert "hf://openai/gsm8k/main/train: HF_HUB_OFFLINE is set" in line
    assert line.endswith("or give a file (--train and --test take files in place of the hub's)")
    assert "Traceback" not in done.stderr


def test_default_sources_are_splits_on_the_hub() -> None:
    sources = [path for source in prepare_data.SOURCES.values() for path in (source.train, source.test) if path]
    assert [split_hub_path(path) for path in sources] == [
        ("openai/gsm8k", "main/train"),
        ("openai/gsm8k", "main/test"),
        ("Elliott/Openr1-Math-46k-8192", "train"),
    ]
