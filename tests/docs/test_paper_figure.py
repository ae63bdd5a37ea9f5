"""The figures of docs/paper.md and docs/what-decides.md against the committed results, read and averaged here."""

import json
import re
from collections import defaultdict
from statistics import fmean
from xml.etree import ElementTree

import pytest
from manual import ROOT

from docs.question_figures import QUESTIONS

SVG = "{http://www.w3.org/2000/svg}"
SETTINGS = ("rare", "noisy", "foreign")


def solved(files: dict[str, str], seeds: range) -> dict[tuple[str, str], float]:
    """Mean share of right samples over the problems of all test sets, then over the seeds, by setting and method.

    files: the name of the results of each setting.
    """
    shares: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for setting, file in files.items():
        results = json.loads((ROOT / f"experiments/compare/results/{file}.json").read_text())
        for one in (one for one in results["outcomes"] if one["setting"] == setting and one["seed"] in seeds):
            sets = one["results"].values()
            right = [c / n for each in sets for c, n in zip(each["correct"], each["n"], strict=True)]
            shares[setting, one["method"]][one["seed"]] = fmean(right)
    return {key: fmean(each.values()) for key, each in shares.items() if len(each) == len(seeds)}


def checked_points(name: str, wanted: dict[tuple[str, str], float]) -> set[tuple[str, str]]:
    """The settings and methods of a figure, each at its wanted mean within its interval."""
    root = ElementTree.parse(ROOT / f"docs/{name}.svg").getroot()
    settings = [e.text or "" for e in root.iter(f"{SVG}text") if e.get("y") == "16"]
    scale = [e for e in root.iter(f"{SVG}text") if e.get("class") == "small"]
    zero, most = {}, {}
    for i, setting in enumerate(settings):
        marks = {e.text: float(e.get("x", "")) for e in scale[5 * i : 5 * i + 5]}
        zero[setting], most[setting] = marks["0"], marks["100"]
    lines = {e.get("y"): e.text for e in root.iter(f"{SVG}text") if e.get("x") == "4"}
    drawn = set()
    for group in root.iter(f"{SVG}g"):
        found = re.fullmatch(r"([^,]+), (.+): ([\d.]+) %", group.findtext(f"{SVG}title", ""))
        assert found is not None
        setting, method, percent = found.groups()
        point, line = group.find(f"{SVG}circle"), group.find(f"{SVG}line")
        assert point is not None
        assert line is not None
        share = (float(point.get("cx", "")) - zero[setting]) / (most[setting] - zero[setting])
        assert abs(share - float(percent) / 100) < 0.001
        assert float(line.get("x1", "")) <= float(point.get("cx", "")) <= float(line.get("x2", ""))
        assert lines[f"{float(point.get('cy', '')) + 4:g}"] == method
        assert abs(share - wanted[setting, method]) < 0.001
        drawn.add((setting, method))
    bases = [e for e in root.iter(f"{SVG}line") if e.get("class") == "base"]
    assert [round((float(e.get("x1", "")) - zero[s]) / 200, 2) for s, e in zip(settings, bases, strict=True)] == [
        round(wanted[s, "Base"], 2) for s in settings
    ]
    return drawn


def test_each_point_is_a_methods_mean_within_its_interval() -> None:
    wanted = solved({setting: f"paper-{setting}" for setting in SETTINGS}, range(5))
    drawn = checked_points("paper", wanted)
    assert drawn == wanted.keys()
    assert len(drawn) == 3 * 24


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_figure_of_a_question_has_all_methods_of_its_study_at_each_level(name: str) -> None:
    question = QUESTIONS[name]
    comparison = json.loads((ROOT / f"experiments/compare/results/{question.results}.json").read_text())["comparison"]
    study = comparison["studies"][question.study]
    seeds = range(study["first_seed"], study["first_seed"] + study["seeds"])
    wanted = solved(dict.fromkeys(question.settings, question.results), seeds)
    drawn = checked_points(name, wanted)
    assert drawn == {(setting, method) for setting in question.settings for method in ("Base", *study["methods"])}
    assert set(question.settings) <= set(study["settings"])
