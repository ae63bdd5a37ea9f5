"""Functions fit on a page, and files are short enough to be read as a whole."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION, FILE = 60, 400  # lines, the first without docstrings
FOLDERS = ("rlplus", "kernels", "csrc", "bench", "docs", "examples", "experiments", "packages", "tests", "configs")
SOURCE = {".py", ".cpp", ".h", ".cu", ".yaml"}  # records, tables and results may grow


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of each function and method, inner ones included, without its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, length


def test_a_function_fits_on_a_page() -> None:
    folders = ("rlplus", "kernels", "bench", "experiments", "packages/ptxcheck/ptxcheck")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {f"{path.relative_to(ROOT)}: {name}": n for path in paths for name, n in functions(path.read_text())}
    assert len(found) > 500
    assert {name: n for name, n in found.items() if n > FUNCTION} == {}


def test_a_file_is_short() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCE]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert len(lengths) > 150
    assert {name: n for name, n in lengths.items() if n > FILE} == {}
