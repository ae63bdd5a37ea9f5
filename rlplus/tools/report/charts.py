"""Charts as the shapes that the page draws: where each line, band, tick and label stands in an SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rlplus.tools.report.run_reader import RunData
from rlplus.train.evaluation.results import Evaluation, pooled_pass_at

# A chart's size and margins in the units of its SVG: a phone's pixels.
WIDTH = 340.0
HEIGHT = 200.0
LEFT = 42.0
TOP = 10.0
BOTTOM = 24.0
# Direct labels.
LABEL = 14  # most letters
LETTER = 6.8  # width of a letter
SPACING = 12.0  # distance to the next label
MOST_POINTS = 600  # drawn per line
MOST_BANDS = 3  # drawn per chart
ACCENT = "accent"  # the style of the line that matters most
TICKS = 4  # intervals of an axis, about

Point = tuple[float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Values at x in rising order, under a label; low and high bound a band."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Line:
    """A series as paths of an SVG, and its style. thin: the values themselves, where the line is their moving average.

    x, y: the values, for a reader's pointer.
    """

    style: str
    path: str
    thin: str = ""
    band: str = ""
    dots: Sequence[Point] = ()
    x: str = ""
    y: str = ""


@dataclass
class Chart:
    """A chart WIDTH wide. unit: "%" for shares. ranges: the values at the ends of the axes; the plot ends at `right`.

    x_marks and y_marks: texts by value. labels: (x, y, style, text) of those at the ends of lines.
    """

    title: str
    unit: str
    x_label: str
    x_range: Range
    y_range: Range
    x_marks: Mapping[float, str]
    y_marks: Mapping[float, str]
    remark: str = ""
    height: float = HEIGHT
    right: float = WIDTH - 12
    lines: list[Line] = field(default_factory=list)
    labels: list[tuple[float, float, str, str]] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x_at(self, value: float) -> float:
        low, high = self.x_range
        return round(LEFT + (value - low) / (high - low) * (self.right - LEFT), 1)

    def y_at(self, value: float) -> float:
        low, high = self.y_range
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - TOP), 1)

    def path(self, x: Sequence[float], y: Sequence[float]) -> str:
        """M and L commands; a value that is not finite leaves a gap."""
        path = []
        pen = "M"
        for a, b in zip(x, y, strict=True):
            if math.isfinite(b):
                path.append(f"{pen}{self.x_at(a)} {self.y_at(b)}")
            pen = "L" if math.isfinite(b) else "M"
        return "".join(path)

    def label(self, ends: Mapping[str, float], styles: Mapping[str, str]) -> None:
        """A label behind the end of each line, given its last value, moved apart where they would overlap."""
        lowest = self.bottom + SPACING
        for i, (label, value) in enumerate(sorted(ends.items(), key=lambda end: end[1])):
            lowest = min(self.y_at(value) + 3.5, lowest - SPACING)
            lowest = max(lowest, TOP + SPACING * (len(ends) - 1 - i))  # room for those above
            self.labels.append((self.right + 5, round(lowest, 1), styles[label], short(label)))


@dataclass(frozen=True)
class Curve:
    """A chart of a metric. unit: "%" for a share."""

    metric: str
    title: str
    unit: str = ""


DYNAMICS = (
    Curve("reward/internal", "Training reward", "mean of own responses"),
    Curve("actor/entropy_internal", "Entropy", "nats, own responses"),
    Curve("response_length/mean", "Response length", "tokens"),
    Curve("response_length/clipped", "Responses cut off", "%"),
    Curve("batch/solve_all", "Groups solved by all", "%"),
    Curve("batch/solve_none", "Groups solved by none", "%"),
)
DEMONSTRATIONS = (
    Curve("actor/prob_external", "Probability", "mean p of demonstrated tokens"),
    Curve("actor/logprob_external", "Log probability", "mean nats, demonstrated tokens"),
    Curve("actor/ratio_external_mean", "Importance weight", "mean over demonstrated tokens"),
    Curve("actor/exploration_weight", "Exploration weight", "mean (1 − p)^γ of demonstrated tokens"),
    Curve("actor/loss_external", "External loss", "of demonstrated tokens"),
)
NOISE = Curve("actor/backward_noise", "Noise of a sampled backward pass", "%")
UPDATES = (
    Curve("actor/loss_internal", "Internal loss", "of sampled tokens"),
    Curve("actor/prob_internal", "Probability, sampled", "mean p of sampled tokens"),
    Curve("actor/grad_norm", "Gradient norm", "before clipping"),
    Curve("actor/clip_fraction_high", "Ratios clipped above", "%"),
    Curve("actor/clip_fraction_low", "Ratios clipped below", "%"),
    NOISE,
    Curve("mismatch/mean", "Engine against trainer", "mean |Δ logprob|"),
    Curve("reward/masked", "Responses not graded", "%"),
    Curve("tokens_per_second", "Generation", "tokens per second"),
)


def curve_charts(
    trained: Mapping[str, Sequence[RunData]], styles: Mapping[str, str], curves: Sequence[Curve]
) -> tuple[list[Chart], list[str]]:
    """A chart for each metric that was logged, and instead the titles of those that are 0 throughout."""
    charts: list[Chart] = []
    zero: list[str] = []
    last = max(run.metrics[-1]["step"] for runs in trained.values() for run in runs)
    for curve in curves:
        found = {label: [run.curve(curve.metric) for run in runs] for label, runs in trained.items()}
        logged = {label: [(x, y) for x, y in runs if x] for label, runs in found.items()}
        values = [y for runs in logged.values() for _, each in runs for y in each]
        if not values:
            continue
        if not any(values):
            zero.append(curve.title)
            continue
        without = [label for label, runs in logged.items() if not runs]
        remark = f"not logged by {', '.join(without)}" if without else ""
        series = [Series(label, x, y) for label, runs in logged.items() for x, y in runs]
        charts.append(step_chart(series, styles, curve, list(trained), last, remark))
    return charts, zero


def curve_sections(
    trained: Mapping[str, Sequence[RunData]], styles: Mapping[str, str]
) -> list[tuple[str, list[Chart], list[str]]]:
    """The curves of a page: the name of each section, its charts, and the titles of metrics that are 0 throughout."""
    sections = (
        ("Training dynamics", (*validation_curves(trained), *DYNAMICS)),
        ("What the demonstrations do", DEMONSTRATIONS),
        ("Updates, engine and grader", UPDATES),
    )
    return [(name, *curve_charts(trained, styles, curves)) for name, curves in sections if trained]


def validation_curves(trained: Mapping[str, Sequence[RunData]]) -> list[Curve]:
    """A curve for each number that evaluations between steps logged."""
    names = dict.fromkeys(name for runs in trained.values() for run in runs for step in run.metrics for name in step)
    return [Curve(name, name.removeprefix("val/"), "%") for name in names if name.startswith("val/")]


def pass_chart(
    tested: Mapping[str, Sequence[Evaluation]], styles: Mapping[str, str], title: str, *, same_problems: bool = False
) -> Chart:
    """pass@k over k, on a logarithmic axis; same_problems as in `pooled_pass_at`.

    Up to three lines have the band of their 95% interval; of more, whose bands would overlap, the accented one.
    """
    series: list[Series] = []
    ticks: set[int] = set()
    for label, evaluations in tested.items():
        most = min(evaluation.largest_k for evaluation in evaluations)
        asked = {k for one in evaluations for k in one.k if k <= most}
        ks = sorted({2**i for i in range(most.bit_length())} | asked)
        ticks |= set(ks)
        estimates = [pooled_pass_at(evaluations, k, same_problems=same_problems) for k in ks]
        limits = [e.low for e in estimates], [e.high for e in estimates]
        series.append(Series(label, [math.log2(k) for k in ks], [e.mean for e in estimates], *limits))
    marks = {math.log2(k): str(k) for k in sorted(ticks)}
    chart = Chart(
        title, "% solved with k samples", "k", (0.0, max(*marks, 1.0)), (0.0, 1.0), marks, _marks(0.0, 1.0, "%"),
        height=240.0, right=_right(list(tested)),
    )  # fmt: skip
    for one in series:
        style = styles[one.label]
        edge = [*zip(one.x, one.high, strict=True), *zip(one.x[::-1], one.low[::-1], strict=True)]
        band = f"{chart.path(*zip(*edge, strict=True))}Z" if len(series) <= MOST_BANDS or style == ACCENT else ""
        dots = [(chart.x_at(x), chart.y_at(y)) for x, y in zip(one.x, one.y, strict=True)]
        chart.lines.append(Line(style, chart.path(one.x, one.y), band=band, dots=dots))
    if len(series) > 1:
        chart.label({one.label: one.y[-1] for one in series}, styles)
    return chart


def step_chart(
    series: Sequence[Series],
    styles: Mapping[str, str],
    curve: Curve,
    labels: Sequence[str],
    last: float,
    remark: str = "",
) -> Chart:
    """Moving averages over the steps, and the values themselves where a label has one series.

    labels, last: the runs and the last step of all charts that should have the same axis.
    """
    if (size := math.ceil(max(len(one.x) for one in series) / MOST_POINTS)) > 1:
        series = [replace(one, x=binned(one.x, size), y=binned(one.y, size)) for one in series]
        remark = "; ".join(filter(None, (remark, f"each point is the mean of {size} steps")))
    finite = [value for one in series for value in one.y if math.isfinite(value)] or [0.0]
    x_marks = {mark: number(mark) for mark in nice_ticks(0, last) if mark == int(mark) and mark <= last}
    y_marks = _marks(min(0.0, *finite), max(0.0, *finite), curve.unit)
    chart = Chart(
        curve.title, curve.unit, "step", (0.0, last), (min(y_marks), max(y_marks)), x_marks, y_marks, remark,
        right=_right(labels),
    )  # fmt: skip
    single = len({one.label for one in series}) == len(series)
    ends: dict[str, list[float]] = {one.label: [] for one in series}
    for one in series:
        smooth = moving_average(one.y, len(one.y) // 20)
        thin = chart.path(one.x, one.y) if single and smooth != one.y else ""
        x = " ".join(f"{value:g}" for value in one.x)
        y = " ".join(f"{value:.4g}" for value in one.y)
        style = styles[one.label] if single else f"{styles[one.label]} many"
        chart.lines.append(Line(style, chart.path(one.x, smooth), thin, x=x, y=y))
        ends[one.label] += [value for value in smooth if math.isfinite(value)][-1:]
    if len(labels) > 1:
        chart.label({label: fmean(each or [0.0]) for label, each in ends.items()}, styles)
    return chart


def _right(labels: Sequence[str]) -> float:
    """The end of a plot, with room for labels where there are several."""
    return WIDTH - (12 if len(labels) == 1 else LETTER * max(len(short(label)) for label in labels) + 8)


def short(label: str) -> str:
    return label if len(label) <= LABEL else f"{label[: LABEL - 1]}…"


def _marks(low: float, high: float, unit: str) -> dict[float, str]:
    return {mark: number(100 * mark if unit == "%" else mark) for mark in nice_ticks(low, high)}


def nice_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from one that is at most low to one that is at least high."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= TICKS + 1)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """The number as short as it can be: 0.02, 150, 12k, 1.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}".replace("-", "−")


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on each side. Fewer near the start, as many on both sides, since much changes there;
    near the end the mean of what there is."""
    windows = (values[i - min(reach, i) : i + min(reach, i) + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def binned(values: Sequence[float], size: int) -> list[float]:
    """Means of so many neighbours each."""
    return [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
