"""The benchmark on rows of a file, as a real model has them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlplus.bench.__main__ import main
from rlplus.bench.cases import Case, Head


def test_rows_of_a_file_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are repeated where they are fewer; the sizes are the file's."""
    rows = {"hidden": torch.randn(5, 24), "weight": torch.randn(70, 24), "target": torch.arange(5)}
    path = tmp_path / "rows.safetensors"
    save_file(rows, path)
    head = Head(Case("main", N=12, H=24, V=70, dtype="float32", methods=(), rows=str(path)), "cpu")
    torch.testing.assert_close(head.hidden.detach(), rows["hidden"][torch.arange(12) % 5])
    assert head.target.tolist() == [*range(5), *range(5), 0, 1]
    only = ["torch", "torch sampled", "torch sampled logprob"]
    sampled = ["--suite", "gpu-sizes", "--tiny", "--rows", str(path), "--output", str(tmp_path), "--only", *only]
    main(sampled)
    assert "H=24, V=70" in capsys.readouterr().out
    save_file({"hidden": rows["hidden"]}, path)
    with pytest.raises(SystemExit, match="want hidden"):
        main(sampled)
    with pytest.raises(SystemExit):
        main(["--suite", "quick", "--rows", str(tmp_path / "none")])
    assert "want a file of safetensors" in capsys.readouterr().err
