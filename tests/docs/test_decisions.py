"""The pages of docs/decisions: their heads are complete, their files exist, and references lead to them."""

import re
from datetime import date
from pathlib import Path

import pytest

from docs import decision_pages

ROOT = Path(__file__).parents[2]
DECISIONS = decision_pages.all_decisions()
PLACES = ("rlplus", "kernels", "csrc", "bench", "experiments", "examples", "packages", "tests", "docs", "configs")
SOURCE = {".py", ".cpp", ".yaml", ".md", ".toml", ".sh"}
COMPLETE = """# 001. A title

- Date: 2026-11-24
- Status: accepted
- Part: loss
- Files: `rlplus/common/errors.py`,
  `kernels/`

## Decided
"""


def test_numbers_run_without_gaps_and_titles_differ() -> None:
    assert [page.number for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    assert len({page.title for page in DECISIONS}) == len(DECISIONS) > 50


def test_files_exist_and_dates_are_past() -> None:
    missing = [f"{page.path.name}: {name}" for page in DECISIONS for name in page.files if not (ROOT / name).exists()]
    assert missing == []
    assert [page.path.name for page in DECISIONS if not page.files or page.date > date.today()] == []


def test_sections_have_their_names_and_order() -> None:
    for page in DECISIONS:
        sections = re.findall(r"^## (.+)$", page.path.read_text(), re.MULTILINE)
        assert sections == [name for name in ("Decided", "Measured", "Rejected") if name in sections], page.path.name


def test_references_name_a_decision() -> None:
    """Such as "decision 002" in a comment, or a page's name."""
    paths = [path for place in PLACES for path in (ROOT / place).rglob("*") if path.suffix in SOURCE]
    paths += [ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    number = re.compile(r"\bdecisions?(?:\s+(?:#\s*)?\[?|/)(\d{3})\b", re.IGNORECASE)
    found = [(name, int(hit)) for name, text in texts.items() for hit in number.findall(text)]
    assert ("rlplus/loss/objective/tokens.py", 2) in found
    assert [place for place, hit in found if not 1 <= hit <= len(DECISIONS)] == []
    pages = {page.path.name for page in DECISIONS}
    named = [(name, hit) for name, text in texts.items() for hit in re.findall(r"decisions/(\d{3}-[\w-]+\.md)", text)]
    assert ("experiments/compare/words.yaml", "064-words.md") in named
    assert [place for place in named if place[1] not in pages] == []


def written(folder: Path, old: str, new: str, name: str = "001-a-title.md") -> Path:
    assert COMPLETE.count(old) == 1
    path = folder / name
    path.write_text(COMPLETE.replace(old, new))
    return path


def test_a_head_is_read(tmp_path: Path) -> None:
    page = decision_pages.decision(written(tmp_path, "accepted", "open"))
    assert page[1:6] == (1, "A title", date(2026, 11, 24), "open", "loss")
    assert page.files == ("rlplus/common/errors.py", "kernels/")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- Date: 2026-11-24\n", "", "want the head of 001-a-title.md"),
        ("- Status: accepted\n", "", "want the head of 001-a-title.md"),
        ("## Decided\n", "", "want the head of 001-a-title.md"),
        ("2026-11-24", "24 November", "Invalid isoformat string: '24 November'"),
        ("# 001.", "# 002.", "want 001-a-title.md named after its number; got 002"),
        ("accepted", "superseded by 002", "001-a-title.md: want a status of the index; got 'superseded by 002'"),
        ("Part: loss", "Part: all", "001-a-title.md: want a part out of loss, trainer"),
    ],
)
def test_an_incomplete_head_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        decision_pages.decision(written(tmp_path, old, new))
