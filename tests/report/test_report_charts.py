"""The charts of a report: lines, ticks and labels where they should be."""

import re
from itertools import pairwise

import pytest
from counted_evaluations import evaluation

from rlplus.tools.report.charts import (
    LEFT,
    TOP,
    WIDTH,
    Curve,
    Series,
    moving_average,
    nice_ticks,
    number,
    pass_chart,
    step_chart,
)

CURVE = Curve("metric", "title")


def points(path: str) -> list[list[float]]:
    return [[float(v) for v in point.split()] for point in re.split("[ML]", path)[1:]]


def test_a_line_stands_where_its_values_are() -> None:
    chart = step_chart([Series("a", [1, 2, 3, 4], [0.0, 1.0, float("nan"), 4.0])], {"a": "accent"}, CURVE, ["a"], 4)
    (line,) = chart.lines
    assert line.path.count("M") == 2  # a gap
    assert list(chart.y_marks.values()) == ["0", "1", "2", "3", "4"]
    step, unit = (chart.right - LEFT) / 4, (chart.bottom - TOP) / 4
    wanted = [[LEFT + step, chart.bottom], [LEFT + 2 * step, chart.bottom - unit], [chart.right, TOP]]
    assert points(line.path) == [pytest.approx(point, abs=0.06) for point in wanted]
    assert (line.x, line.y) == ("1 2 3 4", "0 1 nan 4")
    assert chart.labels == []


def test_shares_are_percentages() -> None:
    chart = step_chart([Series("a", [1, 2], [0.1, 0.4])], {"a": "accent"}, Curve("m", "t", "%"), ["a"], 2)
    assert list(chart.y_marks.values()) == ["0", "10", "20", "30", "40"]


def test_direct_labels_do_not_overlap_and_stay_inside() -> None:
    labels = [f"label {i} of several runs" for i in range(5)]
    series = [Series(label, [0, 1], [1.0, 0.01 * i]) for i, label in enumerate(labels)]
    chart = step_chart(series, dict.fromkeys(labels, "plain"), CURVE, labels, 1)
    heights = sorted(y for _, y, _, _ in chart.labels)
    assert all(b - a >= 11.9 for a, b in pairwise(heights))
    assert heights[0] > TOP
    assert heights[-1] <= chart.bottom + 4
    assert all(len(text) <= 14 and text.endswith("…") for *_, text in chart.labels)
    assert all(LEFT < x < WIDTH - 13 * 5 for x, *_ in chart.labels)


@pytest.mark.parametrize(("methods", "banded"), [("ab", "ab"), ("abc", "abc"), ("abcd", "a")])
def test_bands_that_would_hide_each_other_are_left_out(methods: str, banded: str) -> None:
    tested = {method: [evaluation([1, 3])] for method in methods}
    chart = pass_chart(tested, {"a": "accent", "b": "1", "c": "2", "d": "3"}, "title")
    assert [bool(line.band) for line in chart.lines] == [method in banded for method in methods]


def test_a_label_of_several_seeds_stands_at_the_mean_of_their_ends() -> None:
    ends = {"a": [1.0, 3.0], "b": [0.0], "none": [float("nan")]}
    series = [Series(label, [0, 1], [4.0, end]) for label, each in ends.items() for end in each]
    chart = step_chart([*series, Series("a", [0], [float("nan")])], dict.fromkeys(ends, "plain"), CURVE, [*ends], 1)
    assert {text: y for _, y, _, text in chart.labels}["a"] == pytest.approx(chart.y_at(2.0) + 3.5)


def test_a_long_run_is_drawn_in_means() -> None:
    steps = list(range(1, 2401))
    chart = step_chart([Series("a", steps, [float(s % 4) for s in steps])], {"a": "accent"}, CURVE, ["a"], 2400)
    assert chart.remark == "each point is the mean of 4 steps"
    assert set(chart.lines[0].y.split()) == {"1.5"}
    assert len(chart.lines[0].x.split()) == 600


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (0, 37, [0, 10, 20, 30, 40]),
        (-0.03, 0.04, [-0.04, -0.02, 0, 0.02, 0.04]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 3e-7, [0, 1e-7, 2e-7, 3e-7]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[float]) -> None:
    found = nice_ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert found == pytest.approx(ticks) or (low == high == 0 and found[-1] > 0)


def test_numbers_are_short() -> None:
    shown = [number(v) for v in (0, 0.025, -1.5, 9000, 12000, 1.5e6, 2e9)]
    assert shown == ["0", "0.025", "−1.5", "9000", "12k", "1.5M", "2G"]


def test_moving_average() -> None:
    assert moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 0) == [1.0, 2.0, 6.0, 3.0, 8.0]
    assert moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 1) == pytest.approx([1.0, 3.0, 11 / 3, 17 / 3, 5.5])
    line = [0.5 * i for i in range(30)]
    assert moving_average(line, 7)[:23] == pytest.approx(line[:23])


def test_a_line_per_seed_is_thinner_and_without_its_single_steps() -> None:
    steps, values = list(range(40)), [float(i % 2) for i in range(40)]
    one, two = (
        step_chart([Series("a", steps, values)] * seeds, {"a": "accent"}, CURVE, ["a"], 39).lines for seeds in (1, 2)
    )
    assert [(line.style, line.thin != "") for line in one] == [("accent", True)]
    assert [(line.style, line.thin) for line in two] == [("accent many", "")] * 2
    assert {line.path for line in two} == {one[0].path}
