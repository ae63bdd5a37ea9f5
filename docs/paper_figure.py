"""The figure of docs/paper.md: pass@1 of every method in each setting, with its interval, as SVG.

Dark on white, as readers of the Markdown see it; style.css inverts it on dark pages.
"""

from collections.abc import Iterator
from html import escape

from rlplus.tools.compare.config import BASE, Study
from rlplus.tools.compare.outcomes import Results
from rlplus.tools.compare.page import tested_in
from rlplus.train.evaluation.estimates import Estimate

LABELS, PANEL, GAP, LINE, TOP = 250, 200, 24, 19, 48  # lengths in pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; } .head { font-weight: bold; } .small { font-size: 11px; }
.grid { stroke: #d1d9e0; } .base { stroke: #59636e; stroke-dasharray: 4 3; }
.method { stroke: #0550ae; fill: #0550ae; stroke-width: 2; } .ours { stroke: #bc4c00; fill: #bc4c00; }
"""
Part = tuple[Results, dict[str, Study]]


def draw(parts: dict[str, Part], ours: str) -> str:
    """A panel for each setting, a row for each method. parts: a setting's results and studies; ours: another colour."""
    rows = rows_of(parts)
    height = TOP + LINE * sum(1 + len(methods) for methods in rows.values())
    width = LABELS + (PANEL + GAP) * len(parts)
    body = [*labels(rows)]
    for i, (setting, (results, studies)) in enumerate(parts.items()):
        body += panel(LABELS + i * (PANEL + GAP), height, setting, estimates(results, studies, setting), rows, ours)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 8}" role="img" '
        f'aria-label="pass@1 of each method, by setting">\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height + 8}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def rows_of(parts: dict[str, Part]) -> dict[str, list[str]]:
    """The methods by the first study that has them, as far as they are finished in a setting."""
    rows: dict[str, list[str]] = {}
    seen: set[str] = set()
    for setting, (results, studies) in parts.items():
        for name, study in studies.items():
            new = [m for m in tested_in(results, study, setting).methods if m not in seen]
            rows.setdefault(name, []).extend(new)
            seen.update(new)
    return {name: methods for name, methods in rows.items() if methods}


def estimates(results: Results, studies: dict[str, Study], setting: str) -> dict[str, Estimate]:
    """Mean pass@1 over the problems of all test sets, by method."""
    tested = [tested_in(results, study, setting) for study in studies.values()]
    return {method: each.estimate(method, 1) for each in tested for method in each.methods}


def places(rows: dict[str, list[str]]) -> Iterator[tuple[str, bool, float]]:
    """Each line's text, whether it is a study's title, and its middle."""
    y = TOP + LINE / 2
    for title, methods in rows.items():
        for text in (title, *methods):
            yield text, text is title, y
            y += LINE


def labels(rows: dict[str, list[str]]) -> Iterator[str]:
    for text, title, y in places(rows):
        kind = 'class="head" ' if title else ""
        yield f'<text {kind}x="4" y="{y + 4:g}">{escape(text)}</text>'


def panel(
    x: int, height: int, setting: str, found: dict[str, Estimate], rows: dict[str, list[str]], ours: str
) -> Iterator[str]:
    """The lines of one setting, from 0 to 100 %."""
    yield f'<text class="head" x="{x}" y="16">{escape(setting)}</text>'
    for share in (0, 25, 50, 75, 100):
        at = x + PANEL * share / 100
        yield f'<line class="grid" x1="{at:g}" x2="{at:g}" y1="{TOP - 8}" y2="{height}"/>'
        yield f'<text class="small" x="{at:g}" y="{TOP - 14}" text-anchor="middle">{share}</text>'
    base = x + PANEL * found[BASE].mean
    yield f'<line class="base" x1="{base:.1f}" x2="{base:.1f}" y1="{TOP - 8}" y2="{height}"/>'
    for method, title, y in places(rows):
        if title or method not in found:
            continue
        one = found[method]
        low, mean, high = (x + PANEL * min(max(v, 0), 1) for v in (one.low, one.mean, one.high))
        kind = "method ours" if method == ours else "method"
        yield (
            f'<g class="{kind}"><title>{escape(f"{setting}, {method}: {100 * one.mean:.1f} %")}</title>'
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:g}" y2="{y:g}"/>'
            f'<circle cx="{mean:.1f}" cy="{y:g}" r="4"/></g>'
        )
