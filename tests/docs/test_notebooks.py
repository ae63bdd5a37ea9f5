"""The notebooks of examples/: without outputs, on the page, executed on the CPU. TRL has test_peers_notebook.py."""

import json
import os
import re
import sys
from pathlib import Path

import processes
import pytest
from manual import module_from
from mkdocs.config import load_config
from notebook_cells import cells

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
PROGRAM = processes.SUPPORT / "notebook_cells.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs(path: Path) -> None:
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert [cell for cell in cells(path) if cell["outputs"] or cell["execution_count"] is not None] == []
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert book["cells"][0]["cell_type"] == "markdown"


def test_the_page_names_every_notebook() -> None:
    named = re.findall(r"`(examples/notebooks/[\w-]+\.ipynb)`", (ROOT / "docs/notebooks.md").read_text())
    assert sorted(named) == [str(path.relative_to(ROOT)) for path in NOTEBOOKS]


@pytest.mark.parametrize(
    ("address", "link"),
    [
        ("https://github.com/owner/rlplus", "https://colab.research.google.com/github/owner/rlplus/blob/main/"),
        ("https://git.example/owner/rlplus", ""),
        ("", ""),
    ],
)
def test_a_notebook_opens_in_colab_where_the_repository_is_on_github(address: str, link: str) -> None:
    module = module_from(ROOT / "docs/repository_link.py")
    config = load_config(str(ROOT / "mkdocs.yml"))
    config.repo_url = address
    page = module.on_page_markdown("See `examples/notebooks/a.ipynb`.", None, config, None)
    shown = f" ([open in Colab]({link}examples/notebooks/a.ipynb))" if link else ""
    assert page == f"See `examples/notebooks/a.ipynb`{shown}."


def executed(path: Path, folder: Path) -> str:
    """The output of a notebook's cells, which all end without an error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = processes.run([sys.executable, str(PROGRAM), str(path)], cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    """The cells before it have run, in one namespace."""
    book = {"cells": [{"cell_type": "code", "source": [line]} for line in ("x = 0", "print(x)", "1 / x", "print(2)")]}
    book["cells"].insert(1, {"cell_type": "markdown", "source": ["1 / 0"]})
    (tmp_path / "a.ipynb").write_text(json.dumps(book))
    done = processes.run([sys.executable, str(PROGRAM), str(tmp_path / "a.ipynb")])
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert 'File "a.ipynb, cell 2", line 1' in done.stderr


@pytest.mark.slow
def test_a_first_run_learns_from_its_demonstrations(tmp_path: Path) -> None:
    out = executed(ROOT / "examples/notebooks/first_run.ipynb", tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["actor/prob_external"] > 10 * steps[0]["actor/prob_external"]
    shown = re.findall(r"^step +(\d+): (\S+) of the rollouts are right$", out, re.MULTILINE)
    want = [(step["step"], step["reward/internal"]) for step in steps[9::10]]
    assert [(int(n), float(share)) for n, share in shown] == [(n, pytest.approx(share, abs=0.006)) for n, share in want]
    assert len(shown) == 6


@pytest.mark.slow
def test_reading_a_run_makes_one_first_and_a_page(tmp_path: Path) -> None:
    out = executed(ROOT / "examples/notebooks/reading_a_run.ipynb", tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert f"{len(steps)} steps, each with {len(steps[-1])} metrics: " in out
    for step in steps[:: len(steps) // 6]:
        row = re.findall(rf"^ *{step['step']}((?: +\d+\.\d+){{3}})$", out, re.MULTILINE)
        want = [step[name] for name in ("reward/internal", "actor/entropy", "actor/prob_external")]
        assert [float(x) for x in row[0].split()] == pytest.approx(want, abs=6e-4)
    assert "<html" in (tmp_path / "report.html").read_text()
    assert str((tmp_path / "report.html").stat().st_size) in out
