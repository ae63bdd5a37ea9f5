"""`python -m experiments.measured_run`: a run beside its plan, on small numbers."""

import json
import sys
from pathlib import Path

import processes
import pytest

from experiments.measured_run import make_data, run_here, same_weights

ROOT = Path(__file__).parents[2]


def test_demonstrations_have_the_length_and_the_answer(tmp_path: Path) -> None:
    make_data(tmp_path / "data.jsonl", 5, 300)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["0", "3", "6", "9", "12"]
    assert all(300 <= len(row["demonstration"]) < 340 for row in rows)
    assert rows[2]["demonstration"].startswith("0 + 2 = 2\n1 + 3 = 4\n")


def test_a_run_that_fails_and_a_model_that_is_not_there_are_errors(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {stpes: 1}\n")
    with pytest.raises(SystemExit, match="2"):
        run_here(str(tmp_path / "run.yaml"))
    assert not (tmp_path / "memory.json").exists()
    with pytest.raises(ValueError, match="want a model's safetensors in"):
        same_weights(tmp_path, tmp_path)


@pytest.mark.slow
def test_a_run_is_measured_and_resumed(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = processes.run([sys.executable, "-m", "experiments.measured_run", file, "--tiny"], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    assert found["resumed_same_bits"] is True
    assert found["memory"]["resident"] > 10**8
    assert found["plan"]["fits"]
    assert "forward and backward, s" in done.stdout
