"""Data and a model for `rlplus init`, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplus.tools.cli import main
from rlplus.train.config import ScratchModel
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.pretrained import make_scratch_model, write_model


@pytest.fixture(autouse=True)
def installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the machines that most of these configurations are for; `test_init_machines.py` has others."""
    monkeypatch.setattr("rlplus.tools.init.fitting.installed_vllm", lambda: "gpu")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    scratch = ScratchModel(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_position_embeddings=1024)
    write_model(make_scratch_model(scratch, tokenizer, seed=0), str(folder))
    tokenizer.save_pretrained(folder)
    return str(folder)


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(folder: Path, n: int = 40) -> str:
    """Rows as GSM8K has them."""
    return written(folder, [{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(n)])


def init(model: str, data: str, out: Path, *options: str) -> int:
    return main(["init", "--model", model, "--data", data, "--out", str(out), *options])
