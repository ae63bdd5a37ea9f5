"""`own_tests`, by which tests/peers runs other projects' tests, on a project of four tests."""

from pathlib import Path

import own_tests
import pytest

TESTS = """
import pytest

def product():
    return 5

def test_passes():
    assert product() == 6

def test_fails():
    assert product() == 7

@pytest.fixture
def broken():
    raise OSError("no hub")

def test_has_no_fixture(broken):
    pass

@pytest.mark.parametrize("n", [1, 2])
def test_is_left_out(n):
    pytest.skip("not here")
"""
PLUGIN = """
def pytest_collection_modifyitems(items):
    for item in items:
        item.module.product = lambda: 6
"""


def test_outcomes_of_a_project_with_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_theirs.py").write_text(TESTS)
    (tmp_path / "six.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("THEIRS", str(tmp_path))
    found = own_tests.outcomes(own_tests.checkout("THEIRS"), "test_theirs.py", "six", tmp_path / "report.xml")
    assert {name.partition("::")[2]: outcome.result for name, outcome in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_has_no_fixture": "failed",
        "test_is_left_out[1]": "skipped",
        "test_is_left_out[2]": "skipped",
    }
    assert own_tests.counts(found) == {"passed": 1, "failed": 2, "not here": 2}


def test_a_checkout_is_a_folder_or_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIRS", "nowhere")
    with pytest.raises(ValueError, match="want THEIRS a folder, a checkout or an unpacked sdist; got nowhere"):
        own_tests.checkout("THEIRS")
    monkeypatch.delenv("THEIRS")
    with pytest.raises(pytest.skip.Exception, match="THEIRS names no checkout"):
        own_tests.checkout("THEIRS")
