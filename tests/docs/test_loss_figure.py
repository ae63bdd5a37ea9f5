"""The figure of README.md against the committed results."""

import json
from xml.etree import ElementTree

import pytest
from manual import ROOT

from docs.loss_figure import METHODS

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_have_the_lengths_and_the_numbers_of_the_results() -> None:
    cases = json.loads((ROOT / "bench/results/gpu.json").read_text())["cases"]
    (main,) = (case for case in cases if (case["name"], case["dtype"]) == ("main", "bfloat16"))
    alike = [
        case for case in cases if not case["forward"] and all(case[s] == main[s] for s in ("N", "H", "V", "dtype"))
    ]
    rows: dict[str, dict] = {}
    for row in (row for case in alike for row in case["rows"] if row["rho"] == 1):
        rows.setdefault(row["method"], row)
    ms = [rows[name]["ms"]["median"] for name in METHODS]
    gb = [rows[name]["extra_mb"] / 1000 for name in METHODS]
    assert min(ms) == ms[0], "ours, the first"
    root = ElementTree.parse(ROOT / "docs/loss.svg").getroot()
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert [text for text in texts if text in METHODS.values()] == list(METHODS.values())
    numbers = [text for text in texts if text.endswith((" ms", " GB")) and text[0].isdigit()]
    assert numbers == [*(f"{value:.0f} ms" for value in ms), *(f"{value:.1f} GB" for value in gb)]
    assert f"{main['N']:,} tokens, vocabulary of {main['V']:,}" in texts[0]
    _, *bars = root.iter(f"{SVG}rect")  # after the ground
    lengths = [float(bar.get("width", "")) for bar in bars]
    for values, drawn in ((ms, lengths[: len(ms)]), (gb, lengths[len(ms) :])):
        assert [length / max(drawn) for length in drawn] == pytest.approx([v / max(values) for v in values], abs=1e-3)
