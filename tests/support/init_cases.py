"""Data for `rlplus init`, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplus.tools.cli import main


@pytest.fixture(autouse=True)
def installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the machines that most of these configurations are for; `test_init_machines.py` has others."""
    monkeypatch.setattr("rlplus.tools.init.fitting.installed_vllm", lambda: "gpu")


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(folder: Path, n: int = 40) -> str:
    """Rows as GSM8K has them."""
    return written(folder, [{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(n)])


def init(model: str, data: str, out: Path, *options: str) -> int:
    return main(["init", "--model", model, "--data", data, "--out", str(out), *options])
