"""The figure of docs/paper.md against the committed results, read and averaged here."""

import json
import re
from collections import defaultdict
from statistics import fmean
from xml.etree import ElementTree

from manual import ROOT

SVG = "{http://www.w3.org/2000/svg}"
SETTINGS = ("rare", "noisy", "foreign")


def solved() -> dict[tuple[str, str], float]:
    """Mean share of right samples over the problems of all test sets, then over five seeds, by setting and method."""
    shares: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for setting in SETTINGS:
        results = json.loads((ROOT / f"experiments/compare/results/paper-{setting}.json").read_text())
        for one in (one for one in results["outcomes"] if one["setting"] == setting):
            sets = one["results"].values()
            right = [c / n for each in sets for c, n in zip(each["correct"], each["n"], strict=True)]
            shares[setting, one["method"]][one["seed"]] = fmean(right)
    return {key: fmean(seeds.values()) for key, seeds in shares.items() if len(seeds) == 5}


def test_each_point_is_a_methods_mean_within_its_interval() -> None:
    root = ElementTree.parse(ROOT / "docs/paper.svg").getroot()
    wanted, zero, most = solved(), {}, {}
    scale = [e for e in root.iter(f"{SVG}text") if e.get("class") == "small"]
    for i, setting in enumerate(SETTINGS):
        marks = {e.text: float(e.get("x", "")) for e in scale[5 * i : 5 * i + 5]}
        zero[setting], most[setting] = marks["0"], marks["100"]
    lines = {e.get("y"): e.text for e in root.iter(f"{SVG}text") if e.get("x") == "4"}
    drawn = {}
    for group in root.iter(f"{SVG}g"):
        setting, method, percent = re.fullmatch(r"(\w+), (.+): ([\d.]+) %", group.find(f"{SVG}title").text).groups()
        point, line = group.find(f"{SVG}circle"), group.find(f"{SVG}line")
        share = (float(point.get("cx")) - zero[setting]) / (most[setting] - zero[setting])
        assert abs(share - float(percent) / 100) < 0.001
        assert float(line.get("x1")) <= float(point.get("cx")) <= float(line.get("x2"))
        assert lines[f"{float(point.get('cy')) + 4:g}"] == method
        drawn[setting, method] = share
    assert drawn.keys() == wanted.keys()
    assert len(drawn) == 3 * 24
    assert all(abs(share - wanted[key]) < 0.001 for key, share in drawn.items())
    bases = [e for e in root.iter(f"{SVG}line") if e.get("class") == "base"]
    assert [round((float(e.get("x1")) - zero[s]) / 200, 2) for s, e in zip(SETTINGS, bases, strict=True)] == [
        round(wanted[s, "Base"], 2) for s in SETTINGS
    ]
