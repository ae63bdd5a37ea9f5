"""The report: self-contained, escaped, well formed, and showing the numbers that it was given."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from report_pages import Page, evaluation, keep, kept, run, step_line, written

from rlplus.tools.cli import main
from rlplus.tools.report import RunData, label_styles, load_run, write_report
from rlplus.tools.report.tables import configuration_table, headline
from rlplus.train.evaluation.results import Evaluation, save_results

NASTY = "<script>alert('x')</script> & \"$\\frac$\" ☃ {{ 7 * 7 }}"


def test_a_report_loads_and_runs_nothing_but_itself(tmp_path: Path) -> None:
    page = written(
        tmp_path, {"A": run(), "B": run()}, {"": {"base": evaluation((1, 2, 3)), "A": evaluation((8, 0, 4))}}, "T"
    )
    assert set(page.tags).isdisjoint({"link", "img", "iframe", "object", "base", "form", "use"})
    assert not [name for name, _ in page.attributes if name in ("href", "src", "xlink:href") or name.startswith("on")]
    assert not re.search(r"@import|url\(|https?:", page.html)
    (script,) = re.findall(r"<script>(.*?)</script>", page.html, flags=re.DOTALL)
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'" in page.html
    assert page.html.startswith("<!DOCTYPE html>")
    assert str(tmp_path) not in page.html


def test_a_report_is_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_report(tmp_path / name, {"A": run()}, {"": {"A": evaluation((8, 0, 4))}})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_all_text_is_escaped(tmp_path: Path) -> None:
    folder = keep(tmp_path / "samples", "step-000001", kept(prompt=NASTY, tokens=[NASTY, ""], status=NASTY))
    start = {"date": NASTY, "command": NASTY, "versions": {NASTY: NASTY}, "commits": {NASTY: NASTY}, "hardware": {}}
    nasty_run = run(config=f"a: {json.dumps(NASTY)}", warnings=(NASTY,), samples=folder, starts=(start,))
    runs = {NASTY: nasty_run, "bare": RunData("{}", (step_line(1),))}
    nasty = evaluation((1, 2), statuses={NASTY: 1})
    evaluations = {NASTY: {NASTY: nasty, "other": evaluation((1, 2), problems=(7, 8))}}
    page = written(tmp_path, runs, evaluations, NASTY, [NASTY], {"kind": {0, 1, 7, 8}, NASTY: {0, 1, 7, 8}})
    assert page.tags.count("script") == 1
    assert "49" not in page.text
    # title twice, headline, legend, warning (label and text), note, tables, prompt, token, status, configuration, ...
    assert page.text.count("alert('x')") >= 20


def test_tables_show_the_numbers(tmp_path: Path) -> None:
    first, second = evaluation((0, 0, 4, 8)), evaluation((2, 4, 6, 8))
    text = written(tmp_path, {"run": run(40)}, {"": {"base": first, "run": second}}).text
    one, four = second.pass_at(1), first.pass_at(4)
    assert f"62.5 {100 * one.low:.1f} to {100 * one.high:.1f}" in text
    assert f"{100 * four.mean:.1f} {100 * four.low:.1f} to {100 * four.high:.1f}" in text
    assert "run − base +25.0" in text
    assert "12.3 12.5% 3 timeout" in text
    assert "4 × 8" in text
    assert "run 40 40,000 80 s 0.385" in text  # mean of 0.37, 0.38, 0.39, 0.40


def test_the_result_stands_in_one_sentence(tmp_path: Path) -> None:
    first, second = [evaluation((0, 0, 4, 8))], [evaluation((2, 4, 6, 8))]
    sentence = headline({"run": [run()]}, {"": {"base": first, "run": second}}, "run")
    low, high = (f"{100 * limit:.0f}" for limit in (second[0].pass_at(1).low, second[0].pass_at(1).high))
    four = [f"{100 * one.pass_at(4).mean:.1f}%" for one in (second[0], first[0])]
    assert sentence == (
        f"run solves 62.5% of 4 problems with one sample (95% interval {low} to {high}) and {four[0]} with 4; "
        f"base 37.5% and {four[1]}."
    )
    alone = headline({"run": [run(20)]}, {}, "run")
    assert alone == "run: the mean reward went from 0.015 to 0.195 in 20 steps (the first and the last tenth of them)."
    silent = RunData("{}", ({"step": 3, "generated_tokens": 0},))
    assert headline({"sft": [silent]}, {}, "") == "sft: 3 steps without a reward of its own responses."
    assert sentence in written(tmp_path, {"run": run()}, {"": {"base": first, "run": second}}).text


def test_several_benchmarks_have_a_table_of_all(tmp_path: Path) -> None:
    aime = {"base": evaluation((0, 4)), "run": evaluation((4, 8))}
    page = written(tmp_path, {"run": run()}, {"aime": aime, "math": aime | {"new": evaluation((8, 8))}})
    assert page.titles[:2] == ["aime", "math"]
    assert "run solves 75.0%; base 25.0% of the problems with one sample, as a mean over 2 benchmarks." in page.text
    assert "% aime, pass@1 math, pass@1 mean base 25.0 25.0 25.0 run 75.0 75.0 75.0 new 100.0" in page.text


def test_results_of_different_models_under_one_name_are_pointed_out(tmp_path: Path) -> None:
    """A model that was trained anew, and evaluated on one of the benchmarks only."""
    old, new = evaluation((1, 2), model="runs/a/model@1"), evaluation((1, 2), model="runs/a/model@2", grader="choice")
    page = written(tmp_path, {}, {"aime": {"a": old, "b": old}, "math": {"a": new, "b": evaluation((1, 2))}})
    (warning,) = re.findall(r'<p class="warning">(.*?)</p>', page.html)
    assert warning == (
        "a: results of different models: aime of runs/a/model@1, math of runs/a/model@2. "
        "Evaluate all with the same one."
    )
    assert "3 timeout choice" in page.text


def test_a_difference_is_bold_only_where_zero_is_outside(tmp_path: Path) -> None:
    base = evaluation((1, 2, 3, 4, 2, 3))
    others = {"up": evaluation((4, 5, 6, 7, 5, 6)), "like": evaluation((2, 1, 4, 3, 2, 3))}
    page = written(tmp_path, {}, {"": {"base": base} | others})
    (up,) = re.findall(r'<th scope="row">up − base</th>(.*?)</tr>', page.html)
    (like,) = re.findall(r'<th scope="row">like − base</th>(.*?)</tr>', page.html)
    assert "<b>+37.5</b>" in up
    assert "<b>" not in like


def test_no_difference_is_bold_where_few_seeds_have_two_outcomes(tmp_path: Path) -> None:
    base = [evaluation((1, 1)), evaluation((1, 1)), evaluation((1, 1))]
    alike = [evaluation((5, 5)), evaluation((5, 5)), evaluation((5, 5))]
    apart = [evaluation((2, 2)), evaluation((2, 2)), evaluation((8, 8))]
    page = written(tmp_path, {}, {"": {"base": base, "alike": alike}})
    assert "<b>+50.0</b>" in page.html
    assert "Two outcomes" not in page.text
    page = written(tmp_path, {}, {"": {"base": base, "alike": alike, "apart": apart}})
    (row,) = re.findall(r'<th scope="row">alike − base</th>(.*?)</tr>', page.html)
    assert "+50.0" in row
    assert "<b>" not in row
    assert "Two outcomes: the 3 seeds of apart fall into two groups." in page.text


def test_differences_on_other_problems_are_not_shown_and_said(tmp_path: Path) -> None:
    text = written(tmp_path, {}, {"": {"a": evaluation((1, 2)), "b": evaluation((1, 2), problems=(5, 6))}}).text
    assert "Not comparable, since problems or seeds differ: b − a." in text


def test_a_k_beyond_the_samples_is_left_empty(tmp_path: Path) -> None:
    page = written(tmp_path, {}, {"": {"a": evaluation((1, 2), k=(8,)), "b": evaluation((1, 2), n=4, k=(1,))}})
    (row,) = re.findall(r'<th scope="row">b</th>(.*?)</tr>', page.html)
    assert re.search(r'"pass@1, %">37\.5 .*?"pass@8, %"></td>', row)
    (row,) = re.findall(r'<th scope="row">b − a</th>(.*?)</tr>', page.html)
    assert row.endswith('"pass@8"></td>')


def test_seeds_that_were_asked_for_different_k(tmp_path: Path) -> None:
    """The chart goes as far as all of them have samples."""
    page = written(tmp_path, {}, {"": {"a": [evaluation((1, 2), k=(1, 8)), evaluation((1, 2), n=4, k=(1, 4))]}})
    (chart,) = page.charts
    assert re.findall(r'text-anchor="middle">(\d+)</text>', chart) == ["1", "2", "4"]


def test_seeds_are_pooled(tmp_path: Path) -> None:
    seeds = [evaluation((0, 0)), evaluation((8, 8)), evaluation((4, 4))]
    text = written(tmp_path, {"a": [run(), run(30), run(20)]}, {"": {"a": seeds}}).text
    assert "a 50.0 0.0 to 100.0" in text
    assert "a, run 3 of 3 20 20,000" in text
    assert "9 timeout" in text
    assert "a line per seed" in text
    assert "Seed by seed" not in text  # there is nothing to compare with


def test_seeds_have_a_row_each_and_a_count(tmp_path: Path) -> None:
    one = [evaluation((8, 0, 4), seed=3), evaluation((1, 1, 1), seed=5)]
    other = [evaluation((8, 0, 0), seed=3), evaluation((8, 8, 8), seed=5)]
    text = written(tmp_path, {}, {"": {"a": one, "b": other}}).text
    four = [100 * sum(e.values(4).tolist()) / 3 for e in (*one, *other)]
    assert f"seed a b 3 50.0 / {four[0]:.1f} 33.3 / {four[2]:.1f} 5 12.5 / {four[1]:.1f} 100.0 / 100.0" in text
    assert "pass@4 over all problems is below that of a: b on 1 of 2 seeds." in text
    assert "Seed by seed" not in written(tmp_path, {}, {"": {"a": one, "b": other[:1]}}).text


def test_each_kind_of_problem_has_a_chart(tmp_path: Path) -> None:
    page = written(tmp_path, {}, {"": {"a": evaluation((8, 0, 8, 0))}}, kinds={"easy": {0, 2}, "hard": {1, 3}})
    assert page.titles == ["All problems", "easy", "hard"]
    heights = [re.findall(r'<circle [^>]*cy="([\d.]+)"', chart)[0] for chart in page.charts]
    assert float(heights[1]) < float(heights[0]) < float(heights[2])


def test_the_accent_is_rlplus_and_a_style_belongs_to_its_label() -> None:
    grpo = run(config="algorithm: {preset: grpo}")
    tested = ["base", "GRPO", "RL-PLUS"]
    styles = label_styles({"GRPO": [grpo], "RL-PLUS": [run()], "more": [grpo]}, tested)
    assert styles == {"base": "plain", "GRPO": "other1", "RL-PLUS": "accent", "more": "other2"}
    assert label_styles({"one": [grpo], "two": [grpo]}, []) == {"one": "accent", "two": "other1"}
    assert label_styles({}, ["a", "b"]) == {"a": "other1", "b": "other2"}


def test_what_is_not_logged_or_zero_is_said(tmp_path: Path) -> None:
    bare = tuple({"step": i, "generated_tokens": i, "reward/internal": 0.5} for i in range(1, 5))
    full = tuple(step_line(i, **{"reward/masked": 0.0, "val/aime/pass@1": 0.25}) for i in range(1, 5))
    page = written(tmp_path, {"bare": RunData("{}", bare), "full": RunData("{}", full)}, {})
    assert page.text.count("not logged by bare") == 3
    assert "Zero in every step: Responses not graded." in page.text
    assert page.titles == ["aime/pass@1", "Training reward", "Entropy", "Response length"]
    assert "What the demonstrations do" not in page.text


def test_differences_of_configurations(tmp_path: Path) -> None:
    one = run(config="output_dir: a\ntrain: {lr: 0.001, steps: 3}\nold: 1\n")
    other = run(config="output_dir: b\ntrain: {lr: 0.01, steps: 3}\nrollout: {k: [1, 2]}\n")
    table = configuration_table({"one": [one], "other": [other]})
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["train.lr", "0.001", "0.01"],
        ["old", "1", "(no such key)"],
        ["rollout.k", "(no such key)", "[1, 2]"],
    ]
    assert configuration_table({"one": [one]}) is None
    assert "train.lr 0.001 0.01" in written(tmp_path, {"one": one, "other": other}, {}).text
    same = configuration_table({"one": [one], "two": [one]})
    assert same is not None
    assert "the same but for output_dir" in same.note


def test_a_report_says_where_its_runs_come_from(tmp_path: Path) -> None:
    first = {
        "date": "2026-01-02", "step": 0, "command": "python -m rlplus train x.yaml", "versions": {"torch": "2.13.0"},
        "commits": {"rlplus": "abc123-dirty"}, "hardware": {"ranks": "8 × H100", "cores": 64},
    }  # fmt: skip
    again = first | {"date": "2026-01-03", "step": 17}
    text = written(tmp_path, {"A": run(starts=(first, again))}, {}).text
    for fact in ("started 2026-01-02", "resumed 2026-01-03 at step 17", "python -m rlplus train x.yaml"):
        assert fact in text
    for fact in ("commit, rlplus abc123-dirty", "ranks 8 × H100", "cores 64", "versions torch 2.13.0"):
        assert fact in text


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run or evaluation"):
        write_report(tmp_path / "report.html", {}, {})


def write_run(folder: Path, lines: str, config: str = "a: 1\n") -> Path:
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "run.json").write_text('{"starts": [{"date": "x"}]}')
    return folder


def test_load_run(tmp_path: Path) -> None:
    lines = [json.dumps(step_line(i)) for i in (1, 2, 3)]
    loaded = load_run(write_run(tmp_path, "\n".join(lines) + "\n", "a: 1  # why\nb: {c: [1], d: {}}"))
    assert loaded.config == "a: 1  # why\nb: {c: [1], d: {}}"
    assert loaded.settings == {"a": 1, "b.c": [1], "b.d": {}}
    assert loaded.metrics == (step_line(1), step_line(2), step_line(3))
    assert loaded.curve("reward/internal") == ([1, 2, 3], [0.01, 0.02, 0.03])
    assert (loaded.warnings, loaded.starts) == ((), ({"date": "x", "versions": {}, "commits": {}, "hardware": {}},))
    (tmp_path / "run.json").unlink()
    loaded = load_run(tmp_path)
    assert (loaded.metrics, loaded.starts) == ((step_line(1), step_line(2), step_line(3)), ())
    assert loaded.warnings == (f"{tmp_path}/run.json is missing: the run's dates, commands and versions are unknown",)
    for damage in ("{", "[]", '{"starts": [1]}', "{}"):
        (tmp_path / "run.json").write_text(damage)
        loaded = load_run(tmp_path)  # the numbers are whole
        assert loaded.starts == ()
        assert "run.json is damaged: want the starts of a run; " in loaded.warnings[0]


@pytest.mark.parametrize("left", [1, 20, -1])
def test_load_run_of_a_killed_run(tmp_path: Path, left: int) -> None:
    lines = [json.dumps(step_line(i)) for i in (1, 2, 3)]
    loaded = load_run(write_run(tmp_path, "\n".join([*lines[:2], lines[2][:left]])))
    assert loaded.metrics == (step_line(1), step_line(2))
    assert len(loaded.warnings) == 1
    assert "after step 2" in loaded.warnings[0]
    text = written(tmp_path, {"killed": loaded}, {}).text
    assert "killed: The last line of metrics.jsonl was cut off after step 2" in text


def test_a_damaged_result_is_left_out_of_the_page_which_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, folder in (("math", "a"), ("amc", "a"), ("amc", "b")):
        save_results(tmp_path / folder, {name: evaluation((1, 2), name)})
    for folder in ("a", "b"):
        (tmp_path / folder / "evaluation-amc.json").write_text("{")
    command = ["report", "-o", str(tmp_path / "report.html"), str(tmp_path / "b")]
    assert main([*command, str(tmp_path / "a")]) == 0
    text = Page(tmp_path / "report.html").text
    wanted = f"this result is left out: want an evaluation, as `rlplus eval` writes it, in {tmp_path}"
    for label, record in zip("ba", caplog.records, strict=True):
        assert record.getMessage().startswith(f"{label}: {wanted}/{label}/evaluation-amc.json; got")
        assert f"{label}: {wanted}/{label}/evaluation-amc.json; got" in text
    assert "a 18.8" in text  # the other benchmark's result
    assert main(command) == 2
    assert f"b: {wanted}/b/evaluation-amc.json; got" in capsys.readouterr().err


def test_time_by_phase(tmp_path: Path) -> None:
    """Shares of the steps after the first, without their evaluations."""
    times = {"generate": 4.0, "forward_backward": 2.0, "optimizer": 0.5, "learners": 1.0}  # others have none
    times |= {"sync": 0.25, "score": 0.125, "pack": 0.0625}
    phases = {f"time/{phase}": seconds for phase, seconds in times.items()}
    warm = step_line(1, **{name: 100 * seconds for name, seconds in phases.items()} | {"time/step": 900.0})
    plain = step_line(2, **phases | {"time/step": 8.0})
    evaluated = step_line(3, **phases | {"time/step": 18.0, "time/evaluate": 10.0})
    text = written(tmp_path, {"A": RunData("{}", (warm, plain, evaluated)), "no times": run(1)}, {}).text
    assert "rest overhead: all from sync on A 8 s 50.0% 25.0% 6.2% 12.5% 3.1% 1.6% 0.8% 0.8% 6.2%" in text
    assert "overhead" not in written(tmp_path, {"one step": run(1)}, {}).text


STRANGE = '{"step": 1, "generated_tokens": 1, "reward/internal": "x"}'


def test_a_line_that_is_no_json_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: want a JSON object .*; got 'garbage here'$"):
        load_run(write_run(tmp_path, "garbage here\n"))


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


def test_a_tie_is_rounded_as_in_the_terminal() -> None:
    """1,991 of 2,000 is 99.55 %, which 100 * 0.9955 is not."""
    share = Evaluation("m", tuple(range(20)), (100,) * 20, (100,) * 19 + (91,), (1,), 1.0, 0, 1.0, 0.0, {}, 0.9955)
    assert "solves 99.5% of 20 problems" in headline({}, {"": {"m": [share]}}, "")
