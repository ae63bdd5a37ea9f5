"""Comments and docstrings name their thing first, in words that a reader needs to read once only."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlplus", "kernels", "bench", "experiments", "examples", "hub", "docs", "packages", "tests")
CODE = sorted([ROOT / "setup.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in (*FOLDERS, "csrc") for path in (ROOT / folder).rglob("*.md"))])
PREPOSITION = re.compile(
    r"(about|above|after|against|along|among|around|as|at|before|behind|below|beside|besides|between|beyond|by|during|for|from|in|inside|into|near|"
    r"of|off|on|onto|out|outside|over|per|since|than|through|to|toward|towards|under|until|up|upon|via|with|within|without)\b",
    re.IGNORECASE,
)
# Shares of other packages, counted as here: requests .027, httpx .028, torch .037, pydantic .041, attrs .066.
MOST_PREPOSITIONS = 0.025  # share of comments
MOST_OF = 2e-4  # share of words; httpx and anyio have 1.2e-4
DIRECTIVE = re.compile(r"(type|fmt|noqa|pragma|ruff)\b")


def docstrings(text: str) -> list[str]:
    """Docstrings of modules, classes, functions and fields."""
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    return [node.value for node in strings if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def comments(text: str) -> list[str]:
    """Comments without "#", directives left out; lines of their own below each other are one."""
    found: list[str] = []
    before = (0, -1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        words = token.string.lstrip("#! ")
        if token.type != tokenize.COMMENT or DIRECTIVE.match(words):
            continue
        line, column = token.start
        alone = not token.line[:column].strip()
        if alone and before == (line - 1, column):
            found[-1] += f" {words}"
        else:
            found.append(words)
        before = (line, column) if alone else (0, -1)
    return [words for words in found if words]


@cache
def prose() -> list[tuple[str, str, str]]:
    """File, kind and text of each comment and docstring of the code, and of each page without its blocks of code."""
    found = []
    for path in CODE:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        found += [(name, "docstring", each) for each in docstrings(text)]
        found += [(name, "comment", each) for each in comments(text)]
    for path in PAGES:
        page = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        found.append((str(path.relative_to(ROOT)), "page", page))
    return found


def of_kind(kind: str) -> Iterator[tuple[str, str]]:
    return ((name, text) for name, found, text in prose() if found == kind)


def test_a_docstring_names_its_thing_first() -> None:
    """Not "Of a run" or "What a run has": a reader would have to find out what."""
    assert sum(1 for _ in of_kind("docstring")) > 2000
    assert [found for found in of_kind("docstring") if re.match(r"\s*(of|what)\b", found[1], re.IGNORECASE)] == []


def test_a_comment_names_its_thing_first() -> None:
    """Now and then a preposition is the best beginning; "of" and "what" never are."""
    texts = list(of_kind("comment"))
    assert len(texts) > 1200
    assert [found for found in texts if re.match(r"(of|what)\b", found[1], re.IGNORECASE)] == []
    prepositions = [found for found in texts if PREPOSITION.match(found[1])]
    assert len(prepositions) <= MOST_PREPOSITIONS * len(texts), prepositions


def test_a_noun_stands_where_it_is_meant() -> None:
    """Seldom "those of" or "that of" in its place."""
    words = sum(len(re.findall(r"\b\w[\w'-]*", text)) for *_, text in prose())
    found = [(name, hit[0]) for name, _, text in prose() for hit in re.finditer(r"(?i)\b(those|that)\s+of\b.*", text)]
    assert words > 100_000
    assert len(found) <= MOST_OF * words, f"{len(found)} in {words} words: {found}"


def test_who_is_meant_is_named() -> None:
    """The user, a process, a caller: not "nobody" or "somebody"."""
    stilted = re.compile(r"(nobody|somebody|shall|is not there)\b", re.IGNORECASE)
    code = ((name, text) for name, kind, text in prose() if kind != "page" and name != "tests/docs/test_prose.py")
    assert [found for found in code if stilted.search(found[1])] == []


def test_a_comment_is_read_as_a_whole() -> None:
    text = 'x = 1  # one\n# two\n# lines\n    # noqa: E1\ny = "# no comment"  # type: ignore\n#: three\n'
    assert comments("if 1:\n    # a\n    # b\n    pass  # c\n") == ["a b", "c"]
    assert comments(text.replace("    # noqa", "# noqa")) == ["one", "two lines", ": three"]
    assert docstrings('"""a"""\nclass B:\n    x: int\n    """b"""\n    def f(self): "c"\n') == ["a", "b", "c"]
