"""The figure of README.md: time and memory of a loss and its gradients, beside other packages, as SVG.

Dark on white as paper_figure.py; the numbers are the largest case of the results of a GPU.
"""

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from bench import output
from bench.measure import Row
from docs.paper_figure import STYLE

# The names on the figure by those of the results, from the fastest to the slowest.
METHODS = {
    "triton": "rlplus",
    "naive torch": "PyTorch, all logits at once",
    "TRL": "TRL",
    "verl triton": "verl",
    "Liger GRPO tuned": "Liger (GRPO)",
}
LABELS, PANEL, GAP, LINE, TOP = 176, 220, 74, 26, 70  # lengths in pixels
Value = Callable[[Row], float]
PANELS: tuple[tuple[str, str, Value], ...] = (
    ("time", "ms", lambda row: float(row["ms"]["median"])),
    ("extra memory", "GB", lambda row: float(row["extra_mb"]) / 1000),
)


def draw(result: output.Result) -> str:
    """Two panels of bars, which begin at 0."""
    case = output.cases_of(result, "main")["bfloat16"]
    every = case | {"rows": [row for one in result["cases"] if output.same_sizes(one, case) for row in one["rows"]]}
    rows = {label: row for name, label in METHODS.items() if (row := output.row_of(every, name)) is not None}
    width, height = LABELS + len(PANELS) * (PANEL + GAP), TOP + LINE * len(rows) + 4
    body = [
        f'<text class="head" x="4" y="16">An RL loss and its gradients: {case["N"]:,} tokens, '
        f"vocabulary of {case['V']:,}, hidden size {case['H']:,}</text>",
        f'<text class="small" x="4" y="34">{escape(result["device"])}, bf16; shorter is better</text>',
    ]
    for i, label in enumerate(rows):
        kind = ' class="head"' if i == 0 else ""
        body.append(f'<text{kind} x="4" y="{TOP + LINE * i + 17}">{escape(label)}</text>')
    for i, (title, unit, value) in enumerate(PANELS):
        body += panel(LABELS + i * (PANEL + GAP), f"{title}, {unit}", unit, [value(row) for row in rows.values()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="time and memory of a loss, beside other packages">\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def panel(left: int, title: str, unit: str, values: list[float]) -> Iterator[str]:
    """The bars of one measure; the first is ours."""
    yield f'<text class="head" x="{left}" y="{TOP - 10}">{title}</text>'
    for i, value in enumerate(values):
        y, length = TOP + LINE * i, PANEL * value / max(values)
        kind = "ours" if i == 0 else "method"
        number = f"{value:.0f}" if unit == "ms" else f"{value:.1f}"
        yield f'<rect class="{kind}" x="{left}" y="{y + 4}" width="{length:.1f}" height="{LINE - 9}"/>'
        yield f'<text x="{left + length + 8:.1f}" y="{y + 17}">{number} {unit}</text>'


def figure(root: Path) -> tuple[Path, str]:
    """The path and the SVG of docs/loss.svg."""
    return root / "docs/loss.svg", draw(output.load(root / "bench/results")["gpu"])
