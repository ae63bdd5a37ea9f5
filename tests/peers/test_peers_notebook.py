"""The notebook of the drop-in in TRL, executed beside TRL: `make test-peers`."""

import re
import sys
from pathlib import Path

import processes
import pytest

pytest.importorskip("trl")

pytestmark = pytest.mark.peers
NOTEBOOK = processes.ROOT / "examples/notebooks/drop_in_trl.ipynb"


def test_the_drop_in_changes_nothing_and_demonstrations_are_learned(tmp_path: Path) -> None:
    done = processes.run([sys.executable, str(processes.SUPPORT / "notebook_cells.py"), str(NOTEBOOK)], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = re.findall(r"by up to (\S+); with and without the drop-in they differ by (\S+)$", done.stdout, re.M)
    moved, difference = map(float, numbers[0])
    assert 0 <= difference < moved / 100
    (probability,) = re.findall(r"demonstrated token: (\S+) at the first step, (\S+) at the last", done.stdout)
    assert float(probability[1]) > 1.2 * float(probability[0])
