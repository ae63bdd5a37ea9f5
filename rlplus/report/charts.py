"""Charts of runs and evaluations as inline SVG, and the colours of their labels."""

import io
import re
from collections.abc import Callable, Mapping
from html import escape
from itertools import cycle
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from rlplus.evaluation import Evaluation, pooled_pass_at
from rlplus.report.runs import RunData

# Okabe and Ito's colours, told apart with any colour vision; grey for what was not trained here.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREYS = ("#555555", "#999999", "#bbbbbb")
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
}
CURVES = (  # metric, title, label of the y axis
    ("reward/internal", "Reward", "mean reward of own responses"),
    ("actor/entropy_internal", "Entropy", "entropy of own responses (nats)"),
    ("response_length/mean", "Response length", "mean length (tokens)"),
)


def label_colours(trained: Mapping[str, object], tested: Mapping[str, object]) -> dict[str, str]:
    """Colours by label, in the order of the tables."""
    colours, greys = cycle(_COLOURS), cycle(_GREYS)
    labels = list(tested) + [label for label in trained if label not in tested]
    return {label: next(greys if trained and label not in trained else colours) for label in labels}


def legend(colours: Mapping[str, str]) -> str:
    entries = (f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for label, colour in colours.items())
    return f'<div class="legend">{"".join(entries)}</div>'


def _chart(name: str, title: str, remark: str, draw: Callable[[Axes], None]) -> str:
    style: Any = _STYLE | {"svg.hashsalt": name}
    with rc_context(style):
        figure = Figure(figsize=(5.2, 3.3), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", svg)  # ids are shared by all figures of a page
    caption = f"<figcaption>{escape(title)}<span>{escape(remark)}</span></figcaption>"
    return f'<figure role="img" aria-label="{escape(title)}">{caption}{svg}</figure>'


def curve_chart(
    trained: Mapping[str, list[RunData]], colours: Mapping[str, str], metric: str, title: str, y_label: str
) -> str:
    without = [label for label, runs in trained.items() if not any(run.curve(metric)[0] for run in runs)]
    remark = "thin: each step; thick: moving average"
    if any(len(runs) > 1 for runs in trained.values()):
        remark = "moving averages, one line per seed"
    if without:
        remark = f"not logged by {', '.join(without)}"

    def draw(axes: Axes) -> None:
        for label, runs in trained.items():
            for run in runs:
                tokens, values = run.curve(metric)
                smooth = _moving_average(values, len(values) // 20)
                if len(runs) == 1 and smooth != values:
                    axes.plot(tokens, values, color=colours[label], alpha=0.25, linewidth=0.8)
                axes.plot(tokens, smooth, color=colours[label], linewidth=1.8 if len(runs) == 1 else 1.2)
        axes.set(xlabel="generated tokens", ylabel=y_label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.dataLim.y0 < 0 else 0.0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))

    return _chart(metric.replace("/", "-"), title, remark, draw)


def _moving_average(values: list[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on each side. Fewer near the start, as many on both sides, since much changes there;
    near the end the mean of what there is."""
    windows = (values[i - min(reach, i) : i + min(reach, i) + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def pass_chart(tested: Mapping[str, list[Evaluation]], colours: Mapping[str, str]) -> str:
    def draw(axes: Axes) -> None:
        ticks: set[int] = set()
        for label, evaluations in tested.items():
            most = min(evaluation.largest_k for evaluation in evaluations)
            asked = {k for one in evaluations for k in one.k if k <= most}
            ks = sorted({2**i for i in range(most.bit_length())} | asked)
            ticks |= set(ks)
            estimates = [pooled_pass_at(evaluations, k) for k in ks]
            lows, highs = [e.low for e in estimates], [e.high for e in estimates]
            axes.fill_between(ks, lows, highs, color=colours[label], alpha=0.15, linewidth=0)
            axes.plot(ks, [e.mean for e in estimates], color=colours[label], linewidth=1.8, marker="o", markersize=3.5)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="k (samples per problem)", ylabel="share of problems solved (pass@k)", ylim=(0, 1.02))

    return _chart("pass-at-k", "pass@k", "band: 95% interval", draw)
