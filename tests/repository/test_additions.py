"""CONTRIBUTING.md says which files an addition touches: each is made in a copy of the tree, and works there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from additions import RUN, TO_THE_TRAINER, Addition
from loss_additions import TO_THE_LOSS

ROOT = Path(__file__).parents[2]
COPIED = ("rlplus", "kernels", "bench", "configs", "tests")
ADDITIONS = (*TO_THE_LOSS, *TO_THE_TRAINER)
SLOW = ("a recipe", "an integration", "an option of a recipe", "a rollout engine")
# It runs code in forks, which have imported what takes long, but nothing of the package.
FORKS = """
import json, os, sys, traceback
import pytest, torch, triton.language

for line in sys.stdin:
    tree, code = json.loads(line)
    if (process := os.fork()) == 0:
        output = os.open(f"{tree}/output.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        sys.path[:0] = [tree, f"{tree}/tests/support"]
        status = 0
        try:
            exec(compile(code, "the proof", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitpid(process, 0)[1], flush=True)
"""


def rows() -> dict[str, tuple[str, str]]:
    """The table: what to add -> the files to touch, and the tests and pages."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where a change goes")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {thing: (code, others) for thing, code, others in cells[2:]}


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


@pytest.fixture(scope="module")
def forks() -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with processes.started([sys.executable, "-c", FORKS], environment, cwd="/", **pipes) as process:
        yield process


def test_every_row_is_tried_and_names_files_that_exist() -> None:
    table = rows()
    assert sorted(addition.row for addition in ADDITIONS) == sorted(table)
    for cells in table.values():
        missing = [name for cell in cells for name in named(cell) if "NAME" not in name and not (ROOT / name).exists()]
        assert missing == []


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.row)
def test_an_addition_touches_no_more_than_its_row_says(addition: Addition) -> None:
    code, others = ({name.replace("NAME", addition.name) for name in named(cell)} for cell in rows()[addition.row])
    assert code <= addition.changes.keys() <= code | others


@pytest.mark.parametrize(
    "addition",
    [pytest.param(a, id=a.row, marks=[pytest.mark.slow] if a.row in SLOW else []) for a in ADDITIONS],
)
def test_an_addition_works(addition: Addition, forks: "subprocess.Popen[str]", tmp_path: Path) -> None:
    for part in COPIED:
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    addition.apply(tmp_path)
    where = f"import rlplus\nassert rlplus.__file__.startswith({str(tmp_path)!r}), rlplus.__file__\n"
    pytest_arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *addition.tests]
    tests = f"import pytest\nassert pytest.main({pytest_arguments!r}) == 0\n" if addition.tests else ""
    assert forks.stdin is not None
    assert forks.stdout is not None
    print(json.dumps([str(tmp_path), where + RUN + addition.proof + "\n" + tests]), file=forks.stdin, flush=True)
    status = forks.stdout.readline().strip()
    assert status == "0", (tmp_path / "output.txt").read_text()[-4000:]
