"""The heads of the pages in docs/decisions, and their index. A hook of mkdocs: the manual's search leaves them out."""

import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
# The parts of the index, in its order.
DECIDED_ON = ("loss", "trainer", "experiments", "tests and packaging")


class Decision(NamedTuple):
    """A page of docs/decisions. files: what it governs, relative to the repository; folders end with a slash."""

    path: Path
    number: int
    title: str
    date: date
    status: str
    part: str
    files: tuple[str, ...]


def decision(path: Path) -> Decision:
    """The head of a page. ValueError where it is not complete or has another form."""
    head = re.match(
        r"# (\d{3})\. (.+)\n\n- Date: (.+)\n- Status: (.+)\n- Part: (.+)\n- Files: ((?:.+\n)+)\n## Decided\n",
        path.read_text(encoding="utf-8"),
    )
    if head is None:
        raise ValueError(f"want the head of {path.name} as `docs/decisions/index.md` has it")
    number, title, day, status, part, files = head.groups()
    if not path.name.startswith(f"{number}-"):
        raise ValueError(f"want {path.name} named after its number; got {number}")
    if not re.fullmatch(r"accepted|measured|open", status):
        raise ValueError(f"{path.name}: want a status of the index; got {status!r}")
    if part not in DECIDED_ON:
        raise ValueError(f"{path.name}: want a part out of {', '.join(DECIDED_ON)}; got {part!r}")
    found = tuple(re.findall(r"`([^`]+)`", files))
    return Decision(path, int(number), title, date.fromisoformat(day), status, part, found)


def all_decisions(folder: Path = ROOT / "docs/decisions") -> list[Decision]:
    """Every page, by number."""
    return [decision(path) for path in sorted(folder.glob("[0-9]*.md"))]


def index(table: Callable[..., str]) -> str:
    """A table for each part. table: of a heading and rows, in Markdown."""
    pages = all_decisions()
    parts = []
    for part in DECIDED_ON:
        rows = ((f"[{p.number:03d}]({p.path.name})", p.title, p.status) for p in pages if p.part == part)
        parts.append(f"## {part.capitalize()}\n\n{table(('number', 'decision', 'status'), rows)}")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Take the decisions out of the search, whose readers look for the manual."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
