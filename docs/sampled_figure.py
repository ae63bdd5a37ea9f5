"""The figure and the table of sampled backward passes: what their noise changes in training.

Mean rewards of the toy task over the seeds, and the losses of a fine-tuned language model; dark on white as
paper_figure.py.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from docs.paper_figure import STYLE
from experiments.significance import permutation_p, right_samples
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.compare.page import tested_in
from rlplus.tools.report.charts import NOISE
from rlplus.tools.report.tables import interval, percent

TOY = "experiments/compare/results/sampled.json"
SFT, UPDATE = "experiments/real/results/sampled-sft.json", "experiments/real/results/update-noise.json"
KINDS = ("demonstrations", "responses")
REWARD = "reward/internal"
WIDTH, HEIGHT, LEFT, TOP, GAP = 230, 170, 40, 52, 62  # pixels of a panel, of what stands left of it and above it
Table = Callable[[tuple[str, ...], Iterator[tuple[str, ...]]], str]
COLOURS = ("#1f2328", "#0550ae", "#bc4c00", "#1a7f37")
LINES = 'fill="none" stroke-width="1.5"'


@dataclass(frozen=True)
class Line:
    """A curve of a panel. x, y (n,); dashed: where another lies below it."""

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves with common axes from 0 to `top`."""

    title: str
    label: str
    lines: list[Line]
    top: float


def mean_curve(runs: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """Steps, and the mean reward over runs, up to the last step of the shortest run."""
    curves = [one.curves[REWARD] for one in runs]
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    at = np.arange(np.ceil(first), np.floor(last) + 1)
    return at.tolist(), np.mean([np.interp(at, *curve) for curve in curves], axis=0).tolist()


def toy_panel(results: Results, study: str) -> Panel:
    """A line for each method of the study."""
    lines = []
    for colour, method in zip(COLOURS, results.comparison.studies[study].methods, strict=False):
        runs = [one for one in results.outcomes if one.method == method]
        if not runs:
            continue
        label = method.removeprefix(f"{study} with ") if method != study else "exact"
        lines.append(Line(label, colour, *mean_curve(runs)))
    return Panel(f"{study}, toy task", "mean reward", lines, 1.0)


def loss_panel(sft: dict[str, Any]) -> Panel:
    """The loss of each run; the sampled ones lie on the exact ones."""
    lines = []
    for run in sft["runs"]:
        sampled = run["backward"] == "sampled"
        colour = COLOURS[2 if sampled else run["seed"] * 3]
        x = range(1, len(run["loss"]) + 1)
        lines.append(Line(f"seed {run['seed']}, {run['backward']}", colour, x, run["loss"], dashed=sampled))
    top = ceil(5 * max(value for line in lines for value in line.y)) / 5
    return Panel("SFT of SmolLM2-135M", "loss, nats", lines, top)


def draw(panels: Sequence[Panel]) -> str:
    """The panels beside each other, as SVG."""
    width, height = LEFT + len(panels) * (WIDTH + GAP) - GAP + 12, TOP + HEIGHT + 40
    body = [part for i, panel in enumerate(panels) for part in drawn(panel, LEFT + i * (WIDTH + GAP))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="training with the exact and with sampled backward passes">\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def drawn(panel: Panel, left: int) -> Iterator[str]:
    """A panel's axes, names and curves."""
    last = max(line.x[-1] for line in panel.lines)
    bottom = TOP + HEIGHT
    yield f'<text class="head" x="{left}" y="16">{escape(panel.title)}</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - HEIGHT * share
        yield f'<line class="grid" x1="{left}" x2="{left + WIDTH}" y1="{y:g}" y2="{y:g}"/>'
        yield f'<text class="small" x="{left - 6}" y="{y + 4:g}" text-anchor="end">{panel.top * share:g}</text>'
    yield f'<text class="small" x="{left}" y="{bottom + 16}">step 0</text>'
    yield f'<text class="small" x="{left + WIDTH}" y="{bottom + 16}" text-anchor="end">{last:g}</text>'
    yield f'<text class="small" x="{left + WIDTH / 2}" y="{bottom + 16}" text-anchor="middle">{panel.label}</text>'
    for i, line in enumerate(panel.lines):
        x, y = left + i % 2 * WIDTH / 2, 30 + i // 2 * 14
        dash = ' stroke-dasharray="3 3"' if line.dashed else ""
        yield f'<line x1="{x:g}" x2="{x + 16:g}" y1="{y}" y2="{y}" stroke="{line.colour}" {LINES}{dash}/>'
        yield f'<text class="small" x="{x + 20:g}" y="{y + 4}">{escape(line.label)}</text>'
        points = " ".join(
            f"{left + WIDTH * at / last:.1f},{bottom - HEIGHT * value / panel.top:.1f}"
            for at, value in zip(line.x, line.y, strict=True)
        )
        name = escape(f"{panel.title}: {line.label}")
        yield f'<polyline points="{points}" stroke="{line.colour}" {LINES}{dash}><title>{name}</title></polyline>'


def training_table(results: Results) -> Iterator[tuple[str, ...]]:
    """For each method its measured noise, pass@1, and the difference from the exact backward pass with its p."""
    for study in results.comparison.studies.values():
        (setting,) = study.settings
        tested, seeds = tested_in(results, study, setting), study.seed_numbers
        exact = results.of(setting, study.compared_with, seeds)
        for method in study.methods:
            if method not in tested.methods:
                continue
            runs = results.of(setting, method, seeds)
            noise = [value for one in runs.values() for value in one.curves.get(NOISE.metric, ([], []))[1]]
            cells = (percent(fmean(noise)) if noise else "0", percent(tested.mean(method)))
            if method == study.compared_with:
                yield (method, *cells, "", "")
                continue
            difference = interval(tested.difference(study.compared_with, method, 1), "+")
            p = permutation_p([right_samples(runs[seed]) - right_samples(exact[seed]) for seed in seeds])
            yield (method, *cells, f"{difference.text} ({difference.detail})", f"{p:.2f}")


def update_table(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """By how much an update's gradient moves, in % of its norm, for each cause and each kind of sequences."""
    kinds = [found[kind] for kind in KINDS]
    yield ("entropy, nats", *(f"{kind['entropy']:.2f}" for kind in kinds))
    for name in kinds[0]["sampled"]:
        cells = (kind["sampled"][name] for kind in kinds)
        yield (f"sampled, {name}", *(f"{100 * one['update']:.2f} ({one['elements']:.0f} elements)" for one in cells))
    yield ("layers in bf16", *(f"{100 * kind['bf16']:.1f}" for kind in kinds))
    yield ("as many other sequences", *(f"{100 * kind['other_sequences']:.0f}" for kind in kinds))


def figure(root: Path) -> tuple[Path, str]:
    """The path and the SVG of docs/sampled.svg."""
    results = Results.load(root / TOY)
    panels = [toy_panel(results, study) for study in results.comparison.studies]
    return root / "docs/sampled.svg", draw([*panels, loss_panel(json.loads((root / SFT).read_text()))])


def training(table: Table, root: Path) -> str:
    header = ("method", "noise, %", "pass@1, %", "difference (95 %)", "p")
    return table(header, training_table(Results.load(root / TOY)))


def update(table: Table, root: Path) -> str:
    header = ("the update changes by, % of its norm", *KINDS)
    return table(header, update_table(json.loads((root / UPDATE).read_text())))
