"""ptxcheck on the kernels of others: Triton's tutorials in other words, Liger's and TRL's as they are published."""

from pathlib import Path

import processes
import pytest
import releases
from ptxcheck import nested

FOREIGN = Path(__file__).parent / "compiled_foreign.py"
PUBLISHED = [("liger-kernel", "0.8.5", "liger", 10), ("trl", "1.16.0", "trl", 2)]  # and words and number of their tests


def run(cache: Path, words: str, *first: Path) -> int:
    """first: a folder to import from before all others."""
    command = nested.command(FOREIGN, "-k", words)
    return nested.passed(processes.run(command, env=nested.environment(cache, *first)))


@pytest.mark.slow
def test_the_kernels_of_tritons_tutorials_are_right(tmp_path: Path) -> None:
    assert run(tmp_path, "not liger and not trl and not asked") == 8


@pytest.mark.slow
def test_what_the_manual_says_of_other_kernels_holds(tmp_path: Path) -> None:
    assert run(tmp_path, "asked") == 24


@pytest.mark.slow
@pytest.mark.parametrize(("package", "version", "words", "tests"), PUBLISHED, ids=[name for name, *_ in PUBLISHED])
def test_published_kernels_are_right(package: str, version: str, words: str, tests: int, tmp_path: Path) -> None:
    assert run(tmp_path, words, releases.folder(package, version)) == tests
