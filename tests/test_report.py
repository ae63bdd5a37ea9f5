"""The report: self-contained, escaped, well formed, and showing the numbers that it was given."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlplus.evaluation import Evaluation
from rlplus.report import RunData, load_run, write_report
from rlplus.report.charts import _moving_average

NASTY = "<script>alert('x')</script> & \"$\\frac$\" ☃"


def step_line(step: int, **metrics: float) -> dict[str, float]:
    base = {"step": step, "generated_tokens": 1000 * step, "time/step": 2.0, "reward/internal": step / 100}
    return base | {"actor/entropy_internal": 1 / step, "response_length/mean": 20.0} | metrics


def run(steps: int = 40, config: str = "train:\n  lr: 1.0e-3\n", warnings: tuple[str, ...] = ()) -> RunData:
    return RunData(config, tuple(step_line(i) for i in range(1, steps + 1)), warnings)


def evaluation(correct: tuple[int, ...], name: str = "m", n: int = 8, **changes: object) -> Evaluation:
    fields: dict[str, object] = {
        "name": name,
        "problems": tuple(range(len(correct))),
        "n": (n,) * len(correct),
        "correct": correct,
        "k": (1, 4),
        "temperature": 1.0,
        "seed": 0,
        "mean_response_length": 12.34,
        "truncated_share": 0.125,
        "statuses": {"ok": n * len(correct) - 3, "timeout": 3},
    }
    return Evaluation(**(fields | changes))  # type: ignore[arg-type]


class Page(HTMLParser):
    """Text, attributes and ids of a page; checks that tags are closed in order."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())
        self.svgs = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
        self.ids = re.findall(r'\sid="([^"]*)"', text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def test_report_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, {"A": run(), "B": run()}, {"base": evaluation((1, 2, 3)), "A": evaluation((8, 0, 4))}, "Title")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    for name, value in page.attributes:
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
            assert value[1:] in page.ids
        for target in re.findall(r"url\((.*?)\)", value):
            assert target.strip("\"'").startswith("#")
            assert target.strip("\"'")[1:] in page.ids
    assert not re.search(r"@import|url\(\s*[\"']?http", text)
    assert len(page.ids) == len(set(page.ids))
    assert len(page.svgs) == 4
    for svg in page.svgs:
        ElementTree.fromstring(svg)
    assert str(tmp_path) not in text


def test_report_is_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_report(tmp_path / name, {"A": run()}, {"A": evaluation((8, 0, 4))})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_all_text_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    runs = {NASTY: run(config=NASTY, warnings=(NASTY,)), "bare": RunData("", (step_line(1),))}
    nasty = evaluation((1, 2), statuses={NASTY: 1})
    write_report(path, runs, {NASTY: nasty, "other": evaluation((1, 2), problems=(7, 8))}, NASTY, [NASTY])
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    page = Page(text)
    # title twice, note, legend, warning (label and text), two tables, "not comparable", summary, configuration
    assert page.text.count("alert('x')") >= 10
    for svg in page.svgs:
        ElementTree.fromstring(svg)


def test_tables_show_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    first, second = evaluation((0, 0, 4, 8)), evaluation((2, 4, 6, 8))
    write_report(path, {"run": run(40)}, {"base": first, "run": second})
    text = Page(path.read_text(encoding="utf-8")).text
    one, four = second.pass_at(1), first.pass_at(4)
    assert f"0.625 [{one.low:.3f}, {one.high:.3f}]" in text
    assert f"{four.mean:.3f} [{four.low:.3f}, {four.high:.3f}]" in text
    assert "run − base +0.250" in text
    assert "12.3 12.5% 3 timeout" in text
    assert "4 × 8" in text
    assert "run 40 40,000 80 s 0.385" in text  # mean of 0.37, 0.38, 0.39, 0.40


def test_difference_is_bold_only_where_zero_is_outside(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    base = evaluation((1, 2, 3, 4, 2, 3))
    write_report(path, {}, {"base": base, "up": evaluation((4, 5, 6, 7, 5, 6)), "like": evaluation((2, 1, 4, 3, 2, 3))})
    text = path.read_text(encoding="utf-8")
    (up,) = re.findall(r"<td>up − base</td><td>(.*?)</td>", text)
    (like,) = re.findall(r"<td>like − base</td><td>(.*?)</td>", text)
    assert up.startswith("<b>+0.375")
    assert not like.startswith("<b>")


def test_differences_on_other_problems_are_not_shown_and_said(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, {}, {"a": evaluation((1, 2)), "b": evaluation((1, 2), problems=(5, 6))})
    text = Page(path.read_text(encoding="utf-8")).text
    assert "Not comparable, since problems or seeds differ: b − a." in text


def test_a_k_beyond_the_samples_is_left_empty(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, {}, {"a": evaluation((1, 2), k=(8,)), "b": evaluation((1, 2), n=4, k=(1,))})
    text = path.read_text(encoding="utf-8")
    assert re.search(r"<td>b</td><td>[^/]*0\.375.*?</td><td></td>", text)
    assert re.search(r"<td>b − a</td><td>.+?</td><td></td>", text)


def test_seeds_that_were_asked_for_different_k(tmp_path: Path) -> None:
    """The chart goes as far as all of them have samples."""
    path = tmp_path / "report.html"
    write_report(path, {}, {"a": [evaluation((1, 2), k=(1, 8)), evaluation((1, 2), n=4, k=(1, 4))]})
    (chart,) = Page(path.read_text(encoding="utf-8")).svgs
    assert re.findall(r">(\d+)</text>", chart) == ["1", "2", "4"]


def test_seeds_are_pooled(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    seeds = [evaluation((0, 0)), evaluation((8, 8)), evaluation((4, 4))]
    write_report(path, {"a": [run(), run(30), run(20)]}, {"a": seeds})
    text = Page(path.read_text(encoding="utf-8")).text
    assert re.search(r"a 0\.500 \[0\.000, 1\.000\]", text)
    assert "a, run 3 of 3 20 20,000" in text
    assert "9 timeout" in text
    assert "Seed by seed" not in text  # there is nothing to compare with


def test_seeds_have_a_row_each_and_a_count(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    one = [evaluation((8, 0, 4), seed=3), evaluation((1, 1, 1), seed=5)]
    other = [evaluation((8, 0, 0), seed=3), evaluation((8, 8, 8), seed=5)]
    write_report(path, {}, {"a": one, "b": other})
    text = Page(path.read_text(encoding="utf-8")).text
    four = [sum(e.values(4).tolist()) / 3 for e in (*one, *other)]
    assert f"Seed a b 3 0.500 / {four[0]:.3f} 0.333 / {four[2]:.3f} 5 0.125 / {four[1]:.3f} 1.000 / 1.000" in text
    assert "pass@4 over all problems is below that of a: b on 1 of 2 seeds." in text
    write_report(path, {}, {"a": one, "b": other[:1]})
    assert "Seed by seed" not in path.read_text(encoding="utf-8")


def test_colour_belongs_to_the_label(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, {"B": run(), "C": run()}, {"base": evaluation((1, 2)), "B": evaluation((2, 3))})
    text = path.read_text(encoding="utf-8")
    colours = dict(re.findall(r'<i style="background:(#\w+)"></i>(\w+)', text))
    by_label = {label: colour for colour, label in colours.items()}
    assert len(by_label) == 3
    pass_chart, reward_chart = Page(text).svgs[:2]
    assert by_label["base"] in pass_chart
    assert by_label["B"] in pass_chart
    assert by_label["B"] in reward_chart
    assert by_label["C"] in reward_chart
    assert by_label["base"] not in reward_chart


def test_a_metric_that_is_not_logged_is_said(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    bare = RunData("", tuple({"step": i, "generated_tokens": i, "reward/internal": 0.0} for i in range(1, 5)))
    write_report(path, {"bare": bare, "full": run()}, {})
    assert Page(path.read_text(encoding="utf-8")).text.count("not logged by bare") == 2


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run or evaluation"):
        write_report(tmp_path / "report.html", {}, {})


def test_moving_average() -> None:
    assert _moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 0) == [1.0, 2.0, 6.0, 3.0, 8.0]
    assert _moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 1) == pytest.approx([1.0, 3.0, 11 / 3, 17 / 3, 5.5])
    line = [0.5 * i for i in range(30)]
    assert _moving_average(line, 7)[:23] == pytest.approx(line[:23])


def write_run(folder: Path, lines: str, config: str = "a: 1\n") -> Path:
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_load_run(tmp_path: Path) -> None:
    lines = [json.dumps(step_line(i)) for i in (1, 2, 3)]
    loaded = load_run(write_run(tmp_path, "\n".join(lines) + "\n", "a: 1  # why\n"))
    assert loaded == RunData("a: 1  # why\n", (step_line(1), step_line(2), step_line(3)))
    assert loaded.curve("reward/internal") == ([1000, 2000, 3000], [0.01, 0.02, 0.03])


@pytest.mark.parametrize("left", [1, 20, -1])
def test_load_run_of_a_killed_run(tmp_path: Path, left: int) -> None:
    lines = [json.dumps(step_line(i)) for i in (1, 2, 3)]
    loaded = load_run(write_run(tmp_path, "\n".join([*lines[:2], lines[2][:left]])))
    assert loaded.metrics == (step_line(1), step_line(2))
    assert len(loaded.warnings) == 1
    assert "after step 2" in loaded.warnings[0]
    write_report(tmp_path / "report.html", {"killed": loaded}, {})
    assert "killed: The last line of metrics.jsonl was cut off after step 2" in (tmp_path / "report.html").read_text()


def test_time_by_phase(tmp_path: Path) -> None:
    """Shares of the steps after the first, without their evaluations."""
    times = {"generate": 4.0, "forward_backward": 2.0, "optimizer": 0.5, "learners": 1.0}  # others have none
    times |= {"sync": 0.25, "score": 0.125, "pack": 0.0625}
    phases = {f"time/{phase}": seconds for phase, seconds in times.items()}
    warm = step_line(1, **{name: 100 * seconds for name, seconds in phases.items()} | {"time/step": 900.0})
    plain = step_line(2, **phases | {"time/step": 8.0})
    evaluated = step_line(3, **phases | {"time/step": 18.0, "time/evaluate": 10.0})
    path = tmp_path / "report.html"
    write_report(path, {"A": RunData("", (warm, plain, evaluated)), "no times": run(1)}, {})
    text = Page(path.read_text()).text
    assert "rest overhead: all from sync on A 8 s 50.0% 25.0% 6.2% 12.5% 3.1% 1.6% 0.8% 0.8% 6.2%" in text
    write_report(path, {"one step": run(1)}, {})
    assert "overhead" not in Page(path.read_text()).text


STRANGE = '{"step": 1, "generated_tokens": 1, "reward/internal": "x"}'


@pytest.mark.parametrize("bad", ['{"step": 1', "[1]", '{"step": 1}', "7", "", "[" * 100_000, STRANGE])
def test_load_run_names_a_bad_line(tmp_path: Path, bad: str) -> None:
    good = json.dumps(step_line(1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: want a JSON object"):
        load_run(write_run(tmp_path, f"{good}\n{bad}\n{good}\n"))


def test_load_run_without_files_or_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.yaml"):
        load_run(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="no complete step"):
        load_run(write_run(tmp_path, '{"step": 1'))
