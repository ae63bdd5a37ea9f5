"""The configuration file of a small run, and the messages about a wrong one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplus.train.config import load_config

MINIMAL: dict[str, Any] = {
    "output_dir": "out",
    "model": {"scratch": {}, "dtype": "float32"},
    "data": {"path": "train.jsonl", "demonstration": "solution"},
    "reward": {"kind": "exact_match"},
    "rollout": {"max_response_length": 64},
    "train": {"steps": 3},
}


def write_minimal(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    """The lines of the error, without the heading that names the file."""
    with pytest.raises(ValueError, match="does not describe a run") as caught:
        load_config(path, overrides)
    heading, *lines = str(caught.value).splitlines()
    assert str(path) in heading
    return lines
