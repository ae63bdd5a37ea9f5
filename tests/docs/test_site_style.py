"""Properties of the manual's pages on which its style sheet relies."""

import re

from manual import MANUAL, PAGES, ROOT, blocks

COLUMNS = 120  # characters of code that fit the page, by style.css


def test_code_fits_the_page() -> None:
    """Longer lines are wrapped by style.css, which cannot know where; measured in Chromium, 123 characters fit."""
    lines = [(block, line) for page in PAGES for block in blocks(page) for line in block.text.splitlines()]
    long = [f"{block}: {line}" for block, line in lines if len(line) > COLUMNS]
    assert not long, "\n".join(long)
    rules = dict(re.findall(r"^(\S.*?) \{ (.*) \}$", (ROOT / "docs/style.css").read_text(), re.MULTILINE))
    assert "white-space: pre-wrap" in rules[".md-typeset pre > code"]


def test_the_drawn_figure_is_dark_where_the_page_is() -> None:
    """In Markdown it is dark on white; the site inverts it. All figures of that kind are named."""
    rules = re.findall(
        r'^\[data-md-color-scheme="slate"\] img\[src\$="(.*?)"\] \{ filter: invert',
        (ROOT / "docs/style.css").read_text(),
        re.MULTILINE,
    )
    figure = re.compile(r"!\[.*?\]\((?:docs/)?(\S+\.svg)\)")
    assert set(rules) == {name for page in MANUAL for name in figure.findall(page.read_text())}
    others = {page.parent / name for page in PAGES if page not in MANUAL for name in figure.findall(page.read_text())}
    assert all("prefers-color-scheme: dark" in path.read_text() for path in others), (
        "dark by itself, as no site inverts it"
    )
