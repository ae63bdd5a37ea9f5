"""The page of a comparison: what its intervals are over, and the plot of all methods' intervals."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_evaluations import evaluation

from rlplus.tools.compare import page
from rlplus.tools.compare.config import BASE, Comparison
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.report.tables import Table
from rlplus.train.evaluation.estimates import Estimate

PROBLEMS = 200


def made(solved: dict[str, list[int]], seeds: int, setting: dict[str, Any]) -> tuple[Results, page.Part]:
    """A comparison with the same correct answers in every seed, by method; and its part of the page."""
    data = {
        "run": "run.yaml",
        "settings": {"": setting},
        "methods": {name: {"preset": "grpo"} for name in solved if name != BASE},
        "studies": {
            "Methods": {"settings": [""], "methods": [name for name in solved if name != BASE], "seeds": seeds}
        },
    }
    outcomes = [
        Outcome("", seed, name, 0.0, 0, 0, 0.0, "", {"test": evaluation(right, seed=seed)}, {})
        for name, right in solved.items()
        for seed in range(seeds)
    ]
    results = Results(Comparison.model_validate(data), {}, {}, {}, outcomes)
    study = results.comparison.studies["Methods"]
    part = page._part(results, study, "")
    assert part is not None
    return results, part


def widths(solved: dict[str, list[int]], seeds: int, setting: dict[str, Any]) -> list[float]:
    """Widths of the intervals of pass@1 and of a difference, and of the band in the chart."""
    results, part = made(solved, seeds, setting)
    tested = page.tested_in(results, results.comparison.studies["Methods"], "")
    estimates: list[Estimate] = [tested.estimate("GRPO", 1), tested.difference(BASE, "GRPO", 1)]
    (band,) = (line.band for line in part.charts[0].lines if line.style == "accent")
    edge = [float(point.split()[1]) for point in band.strip("MZ").split("L")]
    return [
        *(one.high - one.low for one in estimates),
        abs(edge[0] - edge[-1]) / (part.charts[0].y_at(0) - part.charts[0].y_at(1)),
    ]


def test_where_all_seeds_have_the_same_problems_these_are_no_further_problems() -> None:
    """Five times the same evaluation says as much as one; on other problems, the interval is 5 ** .5 narrower."""
    solved = {BASE: [8, 0, 0, 0] * (PROBLEMS // 4), "GRPO": [8, 8, 0, 0, 8] * (PROBLEMS // 5)}
    own = {"prepare": "module:function"}
    alone, same, other = (widths(solved, *of) for of in ((1, {}), (5, {}), (5, own)))
    assert same == pytest.approx(alone, rel=0.1)
    assert other == pytest.approx([width / 5**0.5 for width in alone], rel=0.15)


def test_the_plot_of_intervals_is_sorted_and_no_grid_line_crosses_a_label() -> None:
    right = {BASE: 2, "worse": 1, "GRPO": 4, "the best of the methods with a long name": 7}
    results, _ = made({name: [count] * 20 for name, count in right.items()}, 2, {})
    (plot,) = re.findall(r'<figure class="chart intervals">.*?</figure>', page.page_of(results, "title"), re.DOTALL)
    labels = re.findall(r'<text class="label [^"]*" x="10" y="(\d+)">(.*?)</text>', plot)
    assert [name for _, name in labels] == sorted(right, key=lambda name: -right[name])
    means = [float(x) for x in re.findall(r'<circle [^>]*cx="([\d.]+)"', plot)]
    assert means == pytest.approx([8 + 320 * right[name] / 8 for _, name in labels])
    paths = re.findall(r'<path class="grid[^"]*" d="(.*?)"', plot)
    lines = [
        (float(y), float(y) + float(length)) for path in paths for y, length in re.findall(r"M\S+ (\S+?)v(\d+)", path)
    ]
    assert len(lines) == 5 * len(labels)
    for baseline in (float(y) for y, _ in labels):  # letters of 10.5 units, a quarter of them below the baseline
        assert not any(top < baseline + 2.6 and bottom > baseline - 8 for top, bottom in lines)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (None, "; got .*results.json: no such file .current directory: /"),
        ("[]", ", in .*results.json; got Input should be an object$"),
        ('{"a": 1}', ", in .*results.json; got comparison: Field required, and 5 further problems$"),
        ('{"comparison": 3}', ", in .*results.json; got comparison: Input should be "),
        ("{", ", in .*results.json; got Invalid JSON: "),
    ],
)
def test_a_file_without_results_is_refused(tmp_path: Path, text: str | None, got: str) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^want results, as `rlplus compare` writes them{got}"):
        Results.load(path)


OWN: dict[str, Any] = {"prepare": "module:function"}


def differing(solved: dict[str, list[int]]) -> Results:
    """A comparison in which a method solves so many of eight samples of each problem, by seed."""
    seeds = len(next(iter(solved.values())))
    results, _ = made({name: [0] * PROBLEMS for name in solved}, seeds, OWN)
    outcomes = [
        replace(one, results={"test": evaluation([solved[one.method][one.seed]] * PROBLEMS, seed=one.seed)})
        for one in results.outcomes
    ]
    return replace(results, outcomes=outcomes)


def difference_table(results: Results) -> Table:
    return page.setting_tables(results, results.comparison.studies["Methods"], "")[-1]


def test_no_difference_is_bold_where_few_seeds_of_a_method_have_two_outcomes() -> None:
    """Also not of a method whose own seeds agree: what its task did to the other it may do to it."""
    alike = {BASE: [1, 1, 1, 1, 1], "GRPO": [3, 3, 3, 3, 3], "RL-PLUS": [5, 5, 5, 5, 5]}
    table = difference_table(differing(alike))
    assert [row[1].strong for row in table.rows] == [True, True]
    assert not table.note
    results = differing({"LUFFY": [2, 2, 2, 2, 7]} | alike)
    table = difference_table(results)
    assert [row[0].text for row in table.rows] == [BASE, "LUFFY", "GRPO"]
    assert [row[1].strong for row in table.rows] == [False] * 3
    assert table.note.startswith("Two outcomes: the 5 seeds of LUFFY fall into two groups.")
    (shown,) = (each for each in page.terminal_tables(results) if each.caption and "Two outcomes" in str(each.caption))
    assert "Difference" in str(shown.title)


def test_twenty_seeds_of_two_outcomes_are_enough_for_a_bold_difference() -> None:
    found = [7] * 4 + [2] * 16
    table = difference_table(differing({BASE: [1] * 20, "GRPO": found, "RL-PLUS": [6] * 20}))
    assert [row[1].strong for row in table.rows] == [True, True]
    assert not table.note


def test_the_seeds_stand_beside_their_mean() -> None:
    """As numbers, with what so few may miss, and as strokes in the plot."""
    results = differing({BASE: [1, 1, 2], "GRPO": [3, 4, 8]})
    _, seeds, _ = page.setting_tables(results, results.comparison.studies["Methods"], "")
    assert [[cell.text for cell in row] for row in seeds.rows] == [
        [BASE, "12.5", "12.5", "25.0"],
        ["GRPO", "37.5", "50.0", "100.0"],
    ]
    assert seeds.note == "An outcome that 63% of all seeds have is missing among 3 with probability 5%."
    (plot,) = re.findall(r'<figure class="chart intervals">.*?</figure>', page.page_of(results, "title"), re.DOTALL)
    strokes = [re.findall(r"M([\d.]+) ", d) for d in re.findall(r'<path class="thin [^"]*" d="(.*?)"', plot)]
    assert strokes == [["128.0", "168.0", "328.0"], ["48.0", "48.0", "88.0"]]
