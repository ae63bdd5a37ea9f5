"""examples/own_demonstrations.py: a model's own right responses become the demonstrations of a run's data."""

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from engine_runs import write_start
from trainer_runs import metrics, run_config

from rlplus.train.config import load_config
from rlplus.train.evaluation.sample import evaluate_model
from rlplus.train.trainer import train

SCRIPT = Path(__file__).parents[2] / "examples/own_demonstrations.py"
GRADER = "def grade(text, answer):\n    return float((len(text.encode()) + int(answer)) % 3 == 1)\n"


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With run.yaml, its data task.jsonl, whose first rows come twice, and sampled/, an evaluation of them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(GRADER)
    model = write_start(folder / "model", tied=True)
    config = run_config(
        folder,
        model={"scratch": None, "path": str(model)},
        reward={"kind": None, "pattern": None, "function": f"{folder}/mine.py:grade"},
        evaluation={"data": {"path": str(folder / "task.jsonl"), "max_prompt_length": 8}, "samples": 200, "k": [1]},
        train={"steps": 1},
    )
    (folder / "run.yaml").write_text(config.to_yaml())
    rows = rows_of(folder / "task.jsonl")
    write_rows(folder / "task.jsonl", [*rows, *(row | {"origin": "again"} for row in rows[:2])])
    evaluate_model(config, str(model), output=folder / "sampled")
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_right_and_complete_responses_become_the_demonstrations(
    folder: Path, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that the kept samples show, each once; null without any; other columns stay, and a run takes the file."""
    rows = rows_of(folder / "task.jsonl")
    want: list[list[str]] = [[] for _ in rows]
    for file in sorted((folder / "sampled/samples").iterdir()):
        for sample in pq.read_table(file).to_pylist():
            texts = want[sample["problem"]]
            right = (len(sample["response"].encode()) + int(sample["answer"])) % 3 == 1
            if right and not sample["truncated"] and sample["response"] not in texts:
                texts.append(sample["response"])
    want[-2:] = want[:2]
    assert any(want)
    assert not all(want)
    own = folder / "own.jsonl"
    script["main"]([str(folder / "run.yaml"), "--samples", str(folder / "sampled"), "--output", str(own)])
    assert rows_of(own) == [row | {"demonstration": texts or None} for row, texts in zip(rows, want, strict=True)]
    found = f"{sum(map(bool, want))} of {len(rows)} rows have a right response, {sum(map(len, want))} in all"
    assert found in capsys.readouterr().out
    longest = "data.max_demonstration_length=40"  # bytes that are no text have three where they are shown
    assert metrics(train(load_config(folder / "run.yaml", [f"data.path={own}", longest])))


def test_samples_of_other_data_are_refused(folder: Path, tmp_path: Path, script: Any) -> None:
    """And so are a folder without samples, and a run without a column for demonstrations; nothing is written."""
    rows = rows_of(folder / "task.jsonl")

    def call(*overrides: str, samples: Path = folder / "sampled") -> None:
        options = ["--samples", str(samples), "--output", str(tmp_path / "own.jsonl")]
        script["main"]([str(folder / "run.yaml"), *options, *overrides])

    other = tmp_path / "other.jsonl"
    write_rows(other, [row | {"answer": "77"} for row in rows])
    with pytest.raises(ValueError, match="'0' as the answer of row 1 of the data, and there is the answer '77'"):
        call(f"data.path={other}")
    write_rows(other, rows[:1])
    with pytest.raises(ValueError, match=r"want an evaluation of the run's data\.path; .* and there is no problem"):
        call(f"data.path={other}")
    with pytest.raises(ValueError, match="want a folder with the samples of an evaluation; there are none in"):
        call(samples=tmp_path)
    with pytest.raises(ValueError, match=r"want data\.demonstration with the name of a column"):
        call("data.demonstration=null", "algorithm.preset=grpo")
    with pytest.raises(ValueError, match=r"want data\.demonstration=NEW_COLUMN.* 'answer' would be overwritten"):
        call("data.demonstration=answer")
    with pytest.raises(ValueError, match=r"want data\.demonstration_template=null, here and in the run"):
        call("data.demonstration_template={demonstration}!")
    assert not (tmp_path / "own.jsonl").exists()
