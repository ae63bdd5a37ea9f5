"""One statement a line, and names over positions: how often a line assigns several unrelated things at once."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = {
    "kernels": 0,
    "rlplus/loss": 1,
    "rlplus/common": 0,
    "rlplus/integrations": 0,
    "rlplus/train": 22,
    "rlplus/tools": 4,
    "rlplus/sandbox": 1,
}


def parallel(text: str) -> Iterator[tuple[int, str]]:
    """Line and kind of each assignment of several things that one line each would say.

    The values of a call, a row or an attribute may be unpacked, and names may change places.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List) and len(target.elts) > 1:
                if _several(node.value) and not _changes_places(target, node.value):
                    yield node.lineno, "a tuple of values"
                elif isinstance(node.value, ast.GeneratorExp | ast.ListComp):
                    yield node.lineno, "a comprehension"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.OP and token.string == ";":
            yield token.start[0], "a semicolon"


def _several(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _several(value.body) and _several(value.orelse)
    return isinstance(value, ast.Tuple | ast.List) and len(value.elts) > 1


def _changes_places(target: ast.Tuple | ast.List, value: ast.expr) -> bool:
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    return sorted(map(ast.unparse, target.elts)) == sorted(map(ast.unparse, values))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("a, b = 1, 2", ["a tuple of values"]),
        ("self.a, (b, c) = x, f()", ["a tuple of values"]),
        ("a, b = (1, 2) if x else (3, 4)", ["a tuple of values"]),
        ("a, b = (f(x) for x in y)", ["a comprehension"]),
        ("a, *b = [f(x) for x in y]", ["a comprehension"]),
        ("a = 1; b = 2", ["a semicolon"]),
        ("a, b = b, a", []),
        ("a, b, c = c, a, b", []),
        ("a, b = f()", []),
        ("(a, b), c = f()", []),
        ("a, *b = x", []),
        ("a, b = x.shape", []),
        ("a = 1, 2", []),
        ("for a, b in ((1, 2), (3, 4)):\n    a = ';'", []),
        ("if (a := f()) and (b := g(a)):\n    pass", []),
    ],
)
def test_what_counts(text: str, kinds: list[str]) -> None:
    assert [kind for _, kind in parallel(text)] == kinds


@pytest.mark.parametrize("folder", LIMITS)
def test_a_line_assigns_one_thing(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}: {kind}" for path in paths for line, kind in parallel(path.read_text())]
    assert len(found) <= LIMITS[folder], found
