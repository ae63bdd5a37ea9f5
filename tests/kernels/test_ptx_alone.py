"""packages/ptxcheck alone: an installed copy of the folder tests kernels with `-p ptxcheck` and without rlplus."""

import os
import re
import shutil
import sys
from pathlib import Path

import processes
import pytest
from manual import blocks
from ptxcheck import nested

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packages/ptxcheck"
ALONE = """

def test_nothing_of_rlplus_was_imported():
    import sys

    assert [name for name in sys.modules if name.partition(".")[0] in ("rlplus", "kernels", "bench")] == []
"""
WRONG = """
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def copy(out, x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


def test_launch(launch):
    copy[(8,)](torch.zeros(1024), torch.randn(1000), 128)


def test_device(device):
    copy[(8,)](torch.zeros(1024, device="cuda"), torch.randn(1000).to("cuda"), 128)
"""


def install(folder: Path) -> Path:
    """A place to import the package from, made of a copy of the folder under another name."""
    source, target = folder / "source", folder / "installed"
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--target", str(target)]
    done = processes.run([sys.executable, "-m", "pip", "install", "--quiet", *options, str(source)], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in target.glob("*") if path.suffix != ".dist-info"} == {"ptxcheck"}
    return target


def example(path: Path) -> str:
    return "\n\n".join(block.text for block in blocks(path) if block.language == "python")


@pytest.mark.slow
def test_an_installed_copy_runs_the_examples(tmp_path: Path) -> None:
    target, tests = install(tmp_path), tmp_path / "tests"
    tests.mkdir()
    (tests / "test_readme.py").write_text(example(FOLDER / "README.md") + ALONE)
    (tests / "test_manual.py").write_text(example(ROOT / "docs/kernel-tests.md"))
    new = {"PYTHONPATH": str(target), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = processes.run(nested.command(tests), env=os.environ | new, cwd=tmp_path)  # TRITON_INTERPRET is among these
    assert nested.passed(done) == 8
    (tmp_path / "wrong.py").write_text(WRONG)
    done = processes.run(nested.command(tmp_path / "wrong.py"), env=os.environ | new, cwd=tmp_path)
    assert "2 passed, 2 errors" in done.stdout  # the calls return; the fixtures report the findings
    assert done.stdout.count("out of bounds: load of 4 bytes near x") >= 2


def test_the_plugin_must_come_before_triton(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import triton\n")
    command = [sys.executable, "-m", "pytest", "-p", "early", "-p", "ptxcheck", str(tmp_path)]
    new = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(FOLDER)]), "TRITON_INTERPRET": "1"}
    done = processes.run(command, env=os.environ | new, cwd=tmp_path)
    assert done.returncode != 0
    assert "ptxcheck: want to be loaded before Triton, by -p ptxcheck" in done.stderr


def test_every_file_is_listed_and_the_dependencies_are_those_of_its_imports() -> None:
    text = (FOLDER / "README.md").read_text()
    listed = set(re.findall(r"`(\w+\.py)`", text))
    assert {path.name for path in (FOLDER / "ptxcheck").glob("*.py")} - {"__init__.py"} == listed
    imported = {
        name
        for path in (FOLDER / "ptxcheck").glob("*.py")
        for name in re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    } - set(sys.stdlib_module_names)
    wanted = re.findall(r'"(\w+)>=', (FOLDER / "pyproject.toml").read_text().partition("dependencies")[2])
    assert imported == set(wanted)
