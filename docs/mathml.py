"""A hook of mkdocs: formulas become MathML when the site is built, so pages need no script and no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with a <math> element in place of each formula."""
    return FORMULA.sub(_as_mathml, content)


def _as_mathml(match: re.Match[str]) -> str:
    kind, formula = match.groups()
    return convert(html.unescape(formula).strip(), display="inline" if kind == "span" else "block")
