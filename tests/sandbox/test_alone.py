"""The folder could be a package of its own: it works elsewhere, under another name, with the standard library alone."""

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from sandboxes import linux, make

import rlplus.sandbox

FOLDER, TESTS = Path(rlplus.sandbox.__file__).parent, Path(__file__).parent
HELPERS = {"processes", "sandboxes", "pytest"}


def imports(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports from outside its folder."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_it_imports_the_standard_library_and_itself(path: Path) -> None:
    assert {name.partition(".")[0] for name in imports(path)} <= sys.stdlib_module_names
    above = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.level > 1
    ]
    assert above == []


def test_its_tests_import_nothing_else_of_rlplus() -> None:
    for path in TESTS.rglob("*.py"):
        found = {name for name in imports(path) if name.partition(".")[0] not in HELPERS | sys.stdlib_module_names}
        assert {".".join(name.split(".")[:2]) for name in found} <= {"rlplus.sandbox"}, path.name


@linux
@pytest.mark.parametrize("kind", ["limits", "auto"])
def test_a_copy_under_another_name_runs_programs(tmp_path: Path, kind: str) -> None:
    make(kind)  # or the test is skipped, with the reason
    shutil.copytree(FOLDER, tmp_path / "other" / "closed_room", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from closed_room import Sandbox
sandbox = Sandbox(sys.argv[2], memory=512 << 20, seconds=5)
results = list(sandbox.run("print(2 * int(input()))", ["3", "x"]))
assert results == [(True, "6\\n"), (False, "ValueError: invalid literal for int() with base 10: 'x'")], results
assert sandbox.test("def double(x): return 2 * x", "", "assert double(3) == 6") == (True, "")
assert not {"rlplus", "torch"} & sys.modules.keys()
"""
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "other"), kind]
    done = processes.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
