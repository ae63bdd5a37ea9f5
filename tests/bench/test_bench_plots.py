"""Plots of measurements: what each panel shows, and that none is empty."""

from itertools import product
from typing import Any

import pytest
from sweeps import SWEPT, swept

from rlplus.bench import plots
from rlplus.bench.output import LOSSES
from rlplus.bench.peers import METHODS

figure = pytest.importorskip("matplotlib.figure")
METHODS_OF = {
    "RL-PLUS": ("cpp", "naive torch", "torch", "CCE none"),
    "GRPO": ("Liger GRPO",),
    "cross-entropy": ("CCE", "torch linear CE"),
}
RATIOS = {"cpp": 1.5, "naive torch": 2.5, "torch": 2.0, "CCE none": 1.25, "Liger GRPO": 3.0, "CCE": 1.1}
RATIOS["torch linear CE"] = 4.0


def measured(dtype: str) -> dict[str, Any]:
    """A main case with a method of each kind."""
    rows = [
        {"method": name, "rho": 1.0, "status": "ok", "ratio": {"median": r, "least": r - 0.5, "greatest": r + 1}}
        for name, r in {"bare-3u": 1.0, **RATIOS}.items()
    ]
    return {"name": "main", "N": 8, "H": 4, "V": 5, "dtype": dtype, "rounds": 5, "rows": rows}


def test_a_sweep_has_one_unit_an_axis() -> None:
    cases = plots.sweeps(swept(SWEPT))
    assert {what: [case[what] for case in several] for what, several in cases.items()} == {
        "N": [256, 512, 1024], "H": [224, 448]
    }  # fmt: skip
    times, memory = figure.Figure().subplots(2)
    plots.draw_times(times, "N", cases["N"])
    plots.draw_memory(memory, "N", cases["N"])
    assert [line.get_ydata().tolist() for line in times.lines] == [[1.31, 1.56, 1.125], [1, 1, 1]]
    assert [line.get_ydata().tolist() for line in memory.lines] == [[3, 3, 3]]
    assert (times.get_ylabel(), memory.get_ylabel()) == ("ms", "MB")
    assert memory.get_ylim()[1] > 3, "the line is inside"


@pytest.mark.parametrize("loss", METHODS_OF)
def test_speeds_are_those_of_one_loss_with_their_spread(loss: str) -> None:
    """Ours in another colour than the peers; the legend has no colour that no bar has."""
    axis = figure.Figure().subplots()
    plots.draw_speeds(axis, measured("float32"), loss)
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == sorted(METHODS_OF[loss], key=lambda name: -RATIOS[name])
    assert axis.get_title().startswith(f"{loss}\n")
    colours = {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_facecolor() for bar in axis.patches}
    own = {name: METHODS[name].package == "rlplus" for name in names}
    assert all((colours[a] == colours[b]) == (own[a] == own[b]) for a, b in product(names, names))
    legend = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    assert legend.keys() == {"bare GEMMs"} | {"rlplus" if mine else "peers" for mine in own.values()}
    spread = {
        names[round(ends[0][1])]: sorted(x for x, _ in ends)
        for bars in axis.collections
        for ends in bars.get_segments()
    }
    assert spread == {name: pytest.approx([RATIOS[name] - 0.5, RATIOS[name] + 1]) for name in names}


def test_a_panel_that_would_be_empty_is_left_out() -> None:
    """Without measured memory, a sweep has its times alone; a loss without measured methods has no row."""
    result = swept(SWEPT)
    rows = plots.panel_rows(result)
    assert [[panel.func for panel in panels] for _, panels in rows] == [[plots.draw_times, plots.draw_memory]] * 2
    for case in result["cases"]:
        case["rows"][-1].pop("extra_mb")
    assert [[panel.func for panel in panels] for _, panels in plots.panel_rows(result)] == [[plots.draw_times]] * 2
    mains = [measured(dtype) for dtype in ("bfloat16", "float32")]
    rows = plots.panel_rows(result | {"cases": mains})
    assert [[panel.keywords["loss"] for panel in panels] for _, panels in rows] == [[loss] * 2 for loss in METHODS_OF]
    assert METHODS_OF.keys() == set(filter(None, LOSSES.values()))
