"""The figure and the tables of sampled backward passes against the committed results, read and averaged here."""

import json
import re
from math import ceil
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from manual import ROOT

from docs.sampled_figure import KINDS, TOY, UPDATE, training_table, update_table
from rlplus.tools.compare.outcomes import Results

SVG = "{http://www.w3.org/2000/svg}"
BOTTOM, HEIGHT = 222, 170


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "experiments" / name).read_text()))


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[tuple[float, float]]]:
    """The points of each curve, by its name."""
    root = ElementTree.parse(ROOT / "docs/sampled.svg").getroot()
    found = {}
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, each.split(","))) for each in line.get("points", "").split()]
        found[line.findtext(f"{SVG}title", "")] = [(x, y) for x, y in points]
    return found


def test_each_curve_of_the_toy_task_is_the_mean_reward_over_the_seeds(
    drawn: dict[str, list[tuple[float, float]]],
) -> None:
    results = read("compare/results/sampled.json")
    methods = [name for study in results["comparison"]["studies"].values() for name in study["methods"]]
    for method in methods:
        title, _, noise = method.partition(" with ")
        points = drawn[f"{title}, toy task: {noise or 'exact'}"]
        curves = [one["curves"]["reward/internal"] for one in results["outcomes"] if one["method"] == method]
        assert all(curve[0] == list(range(1, len(curve[0]) + 1)) for curve in curves), "a value for each step"
        shortest = min(len(values) for _, values in curves)
        wanted = [fmean(values[step] for _, values in curves) for step in range(shortest)]
        assert [(BOTTOM - y) / HEIGHT for _, y in points] == pytest.approx(wanted, abs=0.001)
    assert sum(name.count("toy task") for name in drawn) == len(methods)


def test_each_loss_is_a_runs(drawn: dict[str, list[tuple[float, float]]]) -> None:
    runs = read("real/results/sampled-sft.json")["runs"]
    top = ceil(5 * max(max(one["loss"]) for one in runs)) / 5
    for one in runs:
        points = drawn[f"SFT of SmolLM2-135M: seed {one['seed']}, {one['backward']}"]
        assert [top * (BOTTOM - y) / HEIGHT for _, y in points] == pytest.approx(one["loss"], abs=0.001)
        steps = [x for x, _ in points]
        assert np.allclose(np.diff(steps), (steps[-1] - steps[0]) / (len(steps) - 1), atol=0.2)


def test_the_table_has_each_methods_noise_and_pass_at_1() -> None:
    results = read("compare/results/sampled.json")
    solved: dict[str, list[float]] = {}
    noise: dict[str, list[float]] = {}
    for one in results["outcomes"]:
        (found,) = one["results"].values()
        solved.setdefault(one["method"], []).append(sum(found["correct"]) / sum(found["n"]))
        noise.setdefault(one["method"], []).extend(one["curves"].get("actor/backward_noise", ([], []))[1])
    rows = list(training_table(Results.load(ROOT / TOY)))
    assert {row[0] for row in rows} == solved.keys() - {"Base"}
    for method, own_noise, mean, difference, _ in rows:
        exact = method.partition(" with ")[0]
        assert float(mean) == pytest.approx(100 * fmean(solved[method]), abs=0.06)
        assert float(own_noise) == pytest.approx(100 * fmean(noise[method] or [0.0]), abs=0.06)
        if method == exact:
            assert not difference
            continue
        cell = re.fullmatch(r"([+−-][\d.]+) \(([+−-][\d.]+) to ([+−-][\d.]+)\)", difference)
        assert cell is not None, difference
        middle, low, high = (float(each.replace("−", "-")) for each in cell.groups())
        assert middle == pytest.approx(100 * (fmean(solved[method]) - fmean(solved[exact])), abs=0.06)
        assert low < middle < high


def test_the_noise_of_an_update_is_listed_beside_its_rounding() -> None:
    found = json.loads((ROOT / UPDATE).read_text())
    rows = {row[0]: row[1:] for row in update_table(found)}
    for place, kind in enumerate(KINDS):
        own = found[kind]
        assert float(rows["layers in bf16"][place]) == pytest.approx(100 * own["bf16"], abs=0.06)
        for name, each in own["sampled"].items():
            mean = fmean(each["distances"])
            assert float(rows[f"sampled, {name}"][place].split()[0]) == pytest.approx(100 * mean, abs=0.006)
            assert each["of_mean"] < 0.75 * mean  # half of it in the mean over four seeds: nothing systematic
        assert own["sampled"]["2^-12"]["update"] < 0.1 * own["bf16"] < 0.01 * own["other_sequences"]
