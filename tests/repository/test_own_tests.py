"""`own_tests`, by which tests/peers runs other projects' tests, on projects of a few tests."""

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


TRLS = """
import signal
import pytest

def test_has_its_model():
    assert "trl-internal-testing/tiny-here"

def test_has_none():
    def reward():
        return ["Qwen/Qwen", "trl-internal-testing/tiny-here"]

@pytest.mark.parametrize("name", ["trl-internal-testing/tiny-here", "trl-internal-testing/tiny-gone"])
def test_is_given_a_model(name):
    pass

@pytest.mark.skipif(False, reason="test requires liger-kernel")
def test_of_liger():
    pass

def test_does_not_end():
    signal.raise_signal(signal.SIGPROF)
"""


def test_trls_tests_are_skipped_for_want_of_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in "trl", "trl/trainer":
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
    for module in "trl/import_utils", "trl/trainer/grpo_trainer":
        (tmp_path / f"{module}.py").touch()
    (tmp_path / "trl-internal-testing/tiny-here").mkdir(parents=True)
    (tmp_path / "test_trls.py").write_text(TRLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = tmp_path / "report.xml"
    found = own_tests.outcomes(tmp_path, "test_trls.py", "trl_tests", report, PATCHED="no", CUDA_VISIBLE_DEVICES="")
    gone = "not applicable: no stand-in for "
    assert {name.partition("::")[2]: outcome for name, outcome in found.items() if outcome.result != "failed"} == {
        "test_has_its_model": ("passed", ""),
        "test_has_none": ("skipped", f"{gone}Qwen/Qwen"),
        "test_is_given_a_model[trl-internal-testing/tiny-here]": ("passed", ""),
        "test_is_given_a_model[trl-internal-testing/tiny-gone]": ("skipped", f"{gone}trl-internal-testing/tiny-gone"),
        "test_of_liger": ("skipped", "not applicable: Liger's kernels need a GPU"),
    }
    (unended,) = (outcome for outcome in found.values() if outcome.result == "failed")
    assert "want a test that ends within 300 s" in unended.reason
