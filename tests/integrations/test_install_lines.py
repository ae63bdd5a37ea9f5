"""The drop-ins import no more than their pages' install lines bring."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from rlplus.tools.cli import TRAIN

ROOT = Path(__file__).parents[2]
DROP_INS = ROOT / "rlplus" / "integrations"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARIES = {
    "trl": "trl",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "prime_rl": "prime_rl",
    "transformers": "transformers",
}


def name_of(requirement: str) -> str:
    """The module of a requirement, but for PyYAML's."""
    return re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_")


def test_the_losses_require_torch_and_triton() -> None:
    """tests/repository/test_import_graph.py computes a loss and looks at what that imports."""
    assert [name_of(requirement) for requirement in PROJECT["dependencies"]] == ["torch", "triton"]


def test_the_command_line_asks_for_what_the_trainer_requires() -> None:
    names = {name_of(requirement) for requirement in PROJECT["optional-dependencies"]["train"]} - {"torch"}
    assert {"yaml" if name == "pyyaml" else name for name in names} == set(TRAIN)


@pytest.mark.parametrize("extra", ["cpu", "dev", "vllm"])
def test_an_environment_of_the_trainer_has_its_requirements(extra: str) -> None:
    assert "rlplus[train]" in PROJECT["optional-dependencies"][extra]


@pytest.mark.parametrize("path", sorted(DROP_INS.glob("*.py")), ids=lambda path: path.stem)
def test_a_drop_in_imports_its_library_only(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "rlplus", "transformers", LIBRARIES.get(path.stem, "torch")}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    assert {name.partition(".")[0] for name in found} <= allowed


@pytest.mark.parametrize("page", ["trl", "transformers", "verl", "openrlhf", "prime-rl"])
def test_a_page_states_how_to_install(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    (line,) = re.findall(r"^(?:uv )?pip install -e .*$", text, re.MULTILINE)
    assert "--no-deps" not in text
    assert "train" not in line
    assert re.search(r"torch 2\.1\d\s+and\s+triton\s+3\.6", text)


VERSION = r"([\w-]+) (\d+\.\d+\.\d+)"


def stated(page: str) -> set[tuple[str, str]]:
    """Lower-case name and version, from a page's paragraph "Tested with:"."""
    text = (ROOT / f"docs/{page}.md").read_text()
    (paragraph,) = re.findall(r"^Tested with: .*?(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return {(name.lower(), version) for name, version in re.findall(VERSION, " ".join(paragraph.split()))}


@pytest.mark.parametrize("page", ["trl", "transformers", "verl", "openrlhf", "prime-rl"])
def test_a_page_states_the_versions_that_its_tests_run_with(page: str) -> None:
    """`make test-peers` installs these, and for libraries beside the trainer pyproject.toml has them."""
    requirements = (ROOT / "tests/peers" / ("prime-rl.txt" if page == "prime-rl" else "peers.txt")).read_text()
    pins = re.findall(VERSION.replace(" ", "=="), (ROOT / "Makefile").read_text() + requirements)
    checkouts = re.findall(f"checkout of {VERSION}", requirements)
    together = re.findall(VERSION, (ROOT / "pyproject.toml").read_text()) if page in ("trl", "transformers") else []
    assert stated(page) <= {*pins, *checkouts, *together}
    assert {page, "torch", "transformers"} <= {name for name, _ in stated(page)}
