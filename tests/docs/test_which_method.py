"""The tables and the figure of docs/which-method.md against the committed results, read and counted here."""

import json
import re
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from manual import ROOT

from docs import which_method
from docs.which_method import CHOICES, CONTRAST, FORMS, OTHER, OWN, Runs

SVG = "{http://www.w3.org/2000/svg}"
PAGE = (ROOT / "docs/which-method.md").read_text()
NAMES = {"p/p_ω": ("p/p_ω", "omega")}
EVERY = [runs for each in FORMS.values() for runs in each]


def outcomes(file: str, setting: str, method: str) -> list[dict[str, Any]]:
    """The runs of a method, by seed."""
    every = json.loads((ROOT / f"experiments/compare/results/{file}.json").read_text())["outcomes"]
    names = NAMES.get(method, (method,))
    return sorted((o for o in every if o["setting"] == setting and o["method"] in names), key=lambda o: o["seed"])


def of(runs: Runs, method: str) -> list[dict[str, Any]]:
    return outcomes(
        runs.file, runs.undemonstrated if method == "GRPO" and runs.undemonstrated else runs.setting, method
    )


def share(outcome: dict[str, Any]) -> float:
    sets = outcome["results"].values()
    return fmean(c / n for each in sets for c, n in zip(each["correct"], each["n"], strict=True))


def finds(outcome: dict[str, Any]) -> bool:
    """Whether half of the hard problems, every second one, are solved."""
    sets = outcome["results"]
    one = sets.get("trained") or sets["test"]
    return fmean(c / n for c, n in zip(one["correct"][1::2], one["n"][1::2], strict=True)) >= 0.5


def rows(part: str) -> list[list[str]]:
    text = PAGE[PAGE.index(f"<!-- begin {part} -->") : PAGE.index(f"<!-- end {part} -->")]
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_the_decision_has_each_methods_mean_and_find_rate() -> None:
    for row, choice in zip(rows("which-method"), CHOICES, strict=True):
        for cell, method in zip(row[-1].split("; "), choice.methods, strict=True):
            runs = of(choice.runs, method)
            found = re.fullmatch(rf"{re.escape(method)} ([\d.]+)(?:, (\d+) of (\d+) \((\d+) to (\d+) %\))?", cell)
            assert found is not None, cell
            assert abs(float(found[1]) - 100 * fmean(map(share, runs))) < 0.051
            if choice.runs.finds:
                assert (int(found[2]), int(found[3])) == (sum(map(finds, runs)), len(runs))
                assert int(found[4]) <= 100 * int(found[2]) / int(found[3]) <= int(found[5])


def test_every_comparison_has_its_seeds_and_the_paired_difference_with_its_p() -> None:
    found = iter(rows("beside-grpo"))
    for form, each in FORMS.items():
        assert next(found)[0] == f"**{form}**"
        for runs in each:
            row = next(found)
            grpo, ours = ({o["seed"]: share(o) for o in of(runs, method)} for method in ("GRPO", "RL-PLUS"))
            differences = [ours[seed] - grpo[seed] for seed in ours.keys() & grpo.keys()]
            assert row[:3] == [runs.demonstrations, runs.rate, str(len(differences))]
            mean, low, high = map(number, re.findall(r"[+−][\d.]+", row[-2]))
            assert abs(mean - 100 * fmean(differences)) < 0.051
            assert high - low >= 2 * 100 * stdev(differences) / sqrt(len(differences)) * 1.96, "Student's t or wider"
            if len(differences) <= 10:  # all signs, one by one
                sums = [
                    sum(s * d for s, d in zip(signs, differences, strict=True))
                    for signs in product((1, -1), repeat=len(differences))
                ]
                p = fmean(abs(each) >= abs(sum(differences)) - 1e-12 for each in sums)
                assert abs(number(row[-1]) - p) < 0.00006
    assert next(found, None) is None


def test_the_sign_of_the_difference_follows_the_form() -> None:
    """The sentences of the page and of docs/paper.md, with their numbers."""
    means = {
        form: [
            100
            * (fmean(map(share, of(runs, "RL-PLUS"))) - fmean(share(o) for o in of(runs, "GRPO") if o["seed"] in seeds))
            for runs in each
            for seeds in [{o["seed"] for o in of(runs, "RL-PLUS")}]
        ]
        for form, each in FORMS.items()
    }
    assert (round(min(means[OWN])), round(max(means[OWN]))) == (17, 50)
    assert (round(min(means[OTHER])), round(max(means[OTHER]))) == (-25, 2)
    assert sum(mean > 0 for mean in means[OTHER]) == 1
    first = {
        form: [which_method.familiarity(list(runs.of("RL-PLUS").values())) for runs in FORMS[form]] for form in FORMS
    }
    assert f"{min(first[OWN]):.2f}"[1:] in PAGE
    assert f"{max(first[OTHER]):.2f}"[1:] in PAGE


def test_the_clean_contrast_has_the_same_base_models() -> None:
    bases = [
        [[each["correct"] for each in o["results"].values()] for o in outcomes(file, setting, "Base")]
        for file, setting in CONTRAST.values()
    ]
    assert bases[0] == bases[1]
    runs = [outcomes(file, setting, "RL-PLUS") for file, setting in CONTRAST.values()]
    assert {o["rate"] for each in runs for o in each} == {1e-3}
    for row, each in zip(rows("contrast"), runs, strict=True):
        shares = [100 * share(o) for o in each]
        assert list(map(float, row[1:-1])) == pytest.approx([*shares, fmean(shares)], abs=0.051)
        assert int(row[-1]) == sum(map(finds, each))
    assert all(share(a) > share(b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("file", "runs_part", "tests_part"),
    [("form", "form-runs", "form-tests"), ("form-rates", "form-own-rates", "form-own-rate-tests")],
)
def test_the_comparison_of_the_form_alone_has_its_runs_and_tests(file: str, runs_part: str, tests_part: str) -> None:
    short = "without the first number"
    places = [("own", "GRPO"), (short, "RL-PLUS"), ("own", "RL-PLUS")]
    runs = {place: outcomes(file, *place) for place in places}
    seeds = [o["seed"] for o in runs["own", "GRPO"]]
    assert len(seeds) >= 10
    assert seeds == [*range(200, 200 + len(seeds))]
    assert all([o["seed"] for o in each] == seeds for each in runs.values())
    searched = json.loads((ROOT / f"experiments/compare/results/{file}.json").read_text())["rates"]
    for (setting, method), each in runs.items():
        tried = searched[setting][method] if searched else {"0.001": 1}
        assert {o["rate"] for o in each} == {float(max(sorted(tried, key=float), key=lambda rate: tried[rate]))}
    bases = [
        [[each["correct"] for each in o["results"].values()] for o in outcomes(file, setting, "Base")]
        for setting in ("own", short)
    ]
    assert bases[0] == bases[1], "the same base models"
    for row, place in zip(rows(runs_part), places, strict=True):
        parts = {at: [100 * share(o) for o in runs[place] if finds(o) == at] for at in (True, False)}
        assert float(row[1]) == pytest.approx(fmean(parts[True] + parts[False]), abs=0.051)
        assert row[2].startswith(f"{len(parts[True])} of {len(seeds)} (")
        for cell, each in zip(row[3:], parts.values(), strict=True):
            assert not (cell or each) or float(cell) == pytest.approx(fmean(each), abs=0.051)
    signs = np.array([*product((1, -1), repeat=len(seeds))])
    raw, shown = [], rows(tests_part)
    grpo, other, own = places
    for row, (first, second) in zip(shown, [(own, other), (own, grpo), (other, grpo)], strict=True):
        differences = np.array([share(a) - share(b) for a, b in zip(runs[first], runs[second], strict=True)])
        raw.append(np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9))
        assert number(row[1]) == pytest.approx(100 * differences.mean(), abs=0.051)
        assert row[2] == f"{sum(differences > 0)} of {len(seeds)}"
        assert row[3] == ("< .0001" if raw[-1] < 1e-4 else f"{raw[-1]:.4f}")
    least = 0.0
    for left, (p, row) in zip((3, 2, 1), sorted(zip(raw, shown, strict=True)), strict=True):
        least = max(least, left * p)
        assert row[4] == ("< .0001" if least < 1e-4 else f"{min(1, least):.4f}")


def test_the_figure_has_a_dot_for_each_seed_and_a_stroke_at_the_mean() -> None:
    root = ElementTree.parse(ROOT / "docs/which-method.svg").getroot()
    marks = {e.text: float(e.get("x", "")) for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "middle"}
    drawn = 0
    for group in root.iter(f"{SVG}g"):
        if (title := group.findtext(f"{SVG}title")) is None:
            continue
        file, setting, rest = title.split(", ", 2)
        runs = next(runs for runs in EVERY if (runs.file, runs.setting) == (file, setting))
        shares = [share(o) for o in of(runs, rest.split(":")[0])]
        at = [(float(e.get("cx", "")) - marks["0"]) / (marks["100"] - marks["0"]) for e in group.iter(f"{SVG}circle")]
        stroke = group.find(f"{SVG}line")
        assert stroke is not None
        assert at == pytest.approx(shares, abs=0.001)
        assert (float(stroke.get("x1", "")) - marks["0"]) / (marks["100"] - marks["0"]) == pytest.approx(
            fmean(shares), abs=0.001
        )
        drawn += 1
    assert drawn == 2 * len(which_method.DRAWN)
