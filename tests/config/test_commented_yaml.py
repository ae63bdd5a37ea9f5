"""A configuration with comments has the values without them."""

from pathlib import Path

import pytest
import yaml
from run_files import MINIMAL

from rlplus.train.config import commented_yaml, load_config, merged, write_new


def test_the_values_come_back(tmp_path: Path) -> None:
    values = merged(
        MINIMAL,
        {
            "data": {"answer_pattern": "#### (.+)", "system_prompt": "a: b # c\n" + "word " * 60, "path": ["a", "b c"]},
            "train": {"lr": 1e-6, "betas": [0.9, 0.95], "deepspeed": {}},
            "algorithm": {"preset": "grpo", "refill": None},
        },
    )
    comments = {"train.lr": "short", "data": "a section's", "train.betas": "long " * 40, "train.nothing": "unused"}
    text = commented_yaml(values, comments, ["first", "", "last"])
    assert yaml.safe_load(text) == values
    (path := tmp_path / "run.yaml").write_text(text)
    assert load_config(path).train.lr == 1e-6
    lines = text.splitlines()
    assert lines[:3] == ["# first", "#", "# last"]
    assert "  lr: 1.0e-06  # short" in lines
    assert "data:  # a section's" in lines
    above = lines[: lines.index("  betas: [0.9, 0.95]")]
    assert above[-1].startswith("  # long")
    assert above[-2].startswith("  # long")
    assert "unused" not in text


def test_a_file_is_written_once(tmp_path: Path) -> None:
    write_new(path := tmp_path / "run.yaml", "a: 1\n")
    with pytest.raises(ValueError, match=r"want --out a new file; got .*run.yaml, which exists"):
        write_new(path, "a: 2\n")
    assert path.read_text() == "a: 1\n"
    with pytest.raises(ValueError, match=r"want --out a file to write; got .*: No such file or directory"):
        write_new(tmp_path / "none" / "run.yaml", "")
