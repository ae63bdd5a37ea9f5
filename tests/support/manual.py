"""The pages of the manual and the blocks of code on them."""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MANUAL = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
PAGES = [
    *MANUAL,
    *(ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *DECISIONS,
]
PAGES += [ROOT / folder / "README.md" for folder in ("bench", "csrc", "experiments", "kernels", "packages/ptxcheck")]
PAGES.append(ROOT / "rlplus/sandbox/SECURITY.md")


def module_from(path: Path) -> ModuleType:
    """A module of the manual's own, from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Block(NamedTuple):
    """A fenced block of code. line: the number of its first line."""

    path: Path
    language: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@cache
def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [Block(path, m[2], text.count("\n", 0, m.start()) + 2, m[3]) for m in found]


def all_blocks(language: str, paths: list[Path] = PAGES) -> list[Block]:
    return [block for path in paths for block in blocks(path) if block.language == language]


def prose(path: Path) -> str:
    """The page without blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
