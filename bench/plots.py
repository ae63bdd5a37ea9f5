"""Plots of the results: speeds by kind of loss, time and memory over the sizes of the sweeps."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .measure import Row
from .output import LOSSES, SIZES, Result, cases_of, sweep_of, title
from .peers import METHODS

OWN, PEER = "tab:blue", "tab:orange"


def plots(result: Result, stem: Path) -> str:
    """Draws speeds and sweeps beside the JSON; says what it did."""
    if find_spec("matplotlib") is None:
        return "no plots: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = panel_rows(result)
    if not rows:
        return "no plots: nothing measured"
    heights = [height for height, _ in rows]
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(13, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for pair, (_, panels) in zip(axes, rows, strict=True):
        for axis, panel in zip_longest(pair, panels):
            panel(axis) if panel else axis.axis("off")
    path = stem.with_suffix(".png")
    figure.savefig(path, dpi=60)
    plt.close(figure)
    return f"plots: {path}"


def panel_rows(result: Result) -> list[tuple[float, list[Callable[[Any], None]]]]:
    """Rows of up to two panels, with their height in inches: speeds by loss, a panel per dtype; then the sweeps.

    A panel that would have nothing in it is left out.
    """
    rows: list[tuple[float, list[Callable[[Any], None]]]] = []
    mains = cases_of(result, "main").values()
    for loss in dict.fromkeys(LOSSES.values()):
        found = [(case, bars) for case in mains if (bars := bars_of(case, loss))]
        if found:
            panels = [partial(draw_speeds, case=case, loss=loss) for case, _ in found]
            rows.append((1.5 + 0.25 * max(len(bars) for _, bars in found), [*panels]))
    for what, cases in sweeps(result).items():
        draws = [draw_times, *[draw_memory] * (len(weighed(cases)) > 1)]
        rows.append((4.0, [partial(draw, what=what, cases=cases) for draw in draws]))
    return rows


def sweeps(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Sweeps by size: the sweep's cases that differ from its first one in this size alone and were measured."""
    cases = sweep_of(result)
    base = next(iter(cases), ())
    found = {}
    for i, what in enumerate(SIZES, start=1):  # the dtype is at 0
        alone = [c for shape, c in cases.items() if shape[:i] + shape[i + 1 :] == base[:i] + base[i + 1 :]]
        measured = [case for case in alone if case["rows"][-1]["status"] == "ok"]
        if len(measured) > 1:
            found[what] = sorted(measured, key=lambda case: case[what])
    return found


def draw_times(axis: Any, what: str, cases: list[dict[str, Any]]) -> None:
    sizes = [case[what] for case in cases]
    for at, style, colour in ((-1, "o-", OWN), (0, "--", "black")):
        rows = [case["rows"][at] for case in cases]
        axis.plot(sizes, [row["ms"]["median"] for row in rows], style, color=colour, label=label(rows[0]))
    axis.set(xlabel=what, ylabel="ms", title=f"time over {what}", ylim=(0, None), xlim=(0, None))
    axis.legend()


def weighed(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose method has its memory measured."""
    return [case for case in cases if "extra_mb" in case["rows"][-1]]


def draw_memory(axis: Any, what: str, cases: list[dict[str, Any]]) -> None:
    cases = weighed(cases)
    mb = [case["rows"][-1]["extra_mb"] for case in cases]
    axis.plot([case[what] for case in cases], mb, "s-", color=OWN, label=label(cases[0]["rows"][-1]))
    axis.set(xlabel=what, ylabel="MB", title=f"memory over {what}", ylim=(0, 1.1 * max(mb)), xlim=(0, None))
    axis.legend()


def label(row: Row) -> str:
    return "bare GEMMs" if METHODS[row["method"]].kind == "bare" else str(row["method"])


def bars_of(case: dict[str, Any], loss: str) -> list[Row]:
    """The measured methods with this loss, the slowest first."""
    rows = [row for row in case["rows"][1:] if row["status"] == "ok" and row["rho"] == case["rows"][0]["rho"]]
    chosen = [row for row in rows if LOSSES.get(METHODS[row["method"]].kind) == loss]
    return sorted(chosen, key=lambda row: -row["ratio"]["median"])


def draw_speeds(axis: Any, case: dict[str, Any], loss: str) -> None:
    """Bars of the methods with this loss, the fastest on top: ours in one colour, the peers in another.

    A bar ends at the median over the rounds, its line goes from the least to the greatest; the bare GEMMs are a line.
    """
    rows = bars_of(case, loss)
    for name, colour, own in (("rlplus", OWN, True), ("peers", PEER, False)):
        chosen = [
            (i, row["ratio"]) for i, row in enumerate(rows) if (METHODS[row["method"]].package == "rlplus") == own
        ]
        if chosen:
            low, high = ([abs(r[end] - r["median"]) for _, r in chosen] for end in ("least", "greatest"))
            places, medians = [i for i, _ in chosen], [r["median"] for _, r in chosen]
            axis.barh(places, medians, xerr=(low, high), color=colour, ecolor="black", capsize=2, label=name)
    axis.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axis.axvline(1, color="black", linewidth=1, linestyle="--", label="bare GEMMs")
    axis.set(xlabel="time over bare GEMMs", title=f"{loss}\n{title(case)}")
    axis.legend()
