"""Comments, docstrings and pages are ordinary English that is read once: no hard turns, no endless sentences."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlplus", "kernels", "bench", "experiments", "examples", "hub", "docs", "packages", "tests")
CODE = sorted([ROOT / "setup.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in (*FOLDERS, "csrc") for path in (ROOT / folder).rglob("*.md"))])
# Turns at which a reader stumbles. Whole sentences with articles and verbs are welcome, however they begin.
HARD = {
    r"\A\s*(of|what)\b": "an opening that hides the subject: name the thing",
    r"\b(nobody|somebody)\b": "name the user, the process, the caller",
    r"\bshall\b": "must, will or should",
    r"\bis not there\b": "is missing, does not exist",
    r"\bas much as\s+\w+ed at\b": "as soon as code reads it",
    r"\bway of the\b": "how it is done",
}
LONGEST = 60  # words of a sentence; a colon and a semicolon end one
END = re.compile(r"[.!?;:][\"')*]*\s+|\n\s*\n|\n\s*(?:-|\d+\.) | · ")
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


def hard_turns(text: str) -> list[str]:
    return [better for turn, better in HARD.items() if re.search(turn, text, re.IGNORECASE)]


def longest_sentence(text: str) -> int:
    """Words of the longest sentence, tables and targets of links left out."""
    text = re.sub(r"^\s*\|.*$|\]\([^)]*\)", "", text, flags=re.MULTILINE)
    return max(len(sentence.split()) for sentence in END.split(text))


def test_comments_and_docstrings_have_no_hard_turns() -> None:
    code = [(name, text) for name, kind, text in prose() if kind != "page" and name != "tests/docs/test_prose.py"]
    assert len(code) > 3000
    assert [(name, text, better) for name, text in code if (better := hard_turns(text))] == []


def test_sentences_end() -> None:
    found = [(name, text) for name, _, text in prose() if longest_sentence(text) > LONGEST]
    assert found == []


def test_a_hard_text_is_found() -> None:
    assert hard_turns("Of a run that nobody shall see.") != []
    assert hard_turns("The weights of a run, which the user must see. What it does of that is below.") == []
    long = "word " * (LONGEST + 1)
    assert longest_sentence(f"A short one. {long}\n\nAnother one.") == LONGEST + 1
    assert longest_sentence(f"One: {long[:100]}; {long[:100]}\n- an item\n- {long[:100]}\n| {long} |") < LONGEST


def columns(text: str) -> list[str]:
    """The lines in which a name and its meaning stand in columns."""
    return re.findall(r"^ *[\w`\"@, -]*\w[`\"]? {2,}[^\s#=].*$", text, re.MULTILINE)


def test_an_editor_shows_docstrings_as_they_are_meant() -> None:
    """Shown on a hover they are Markdown, which runs columns into one paragraph and keeps lists."""
    found = []
    for path in (ROOT / "rlplus").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                found += [(path.name, node.name, line) for line in columns(text)]
    assert found == []
    assert columns("Options.\n\n  seed    of the random numbers\n  kind, beta  of it") != []
    assert columns("- `seed`: of the random numbers.\n  Another one.\n\n    seed = 1  # a number") == []


def test_a_comment_is_read_as_a_whole() -> None:
    text = 'x = 1  # one\n# two\n# lines\n    # noqa: E1\ny = "# no comment"  # type: ignore\n#: three\n'
    assert comments("if 1:\n    # a\n    # b\n    pass  # c\n") == ["a b", "c"]
    assert comments(text.replace("    # noqa", "# noqa")) == ["one", "two lines", ": three"]
    assert docstrings('"""a"""\nclass B:\n    x: int\n    """b"""\n    def f(self): "c"\n') == ["a", "b", "c"]
