"""The samples of a report, on its page and in the terminal."""

import re
from dataclasses import replace
from math import log
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_pages import keep, kept, run, written

from rlplus.tools.cli import main
from rlplus.tools.report.samples_text import coloured
from rlplus.tools.report.shaded_samples import ANSWER, HEAD, MOST_STEPS, TAIL, count, moments


def test_samples_show_every_token_with_its_shades(tmp_path: Path) -> None:
    shown = {"external": [True, True], "exploration_weight": [0.25, 0.0], "tokens": ["5", "!"], "advantage": None}
    folder = keep(tmp_path / "s", "step-000001", kept(), kept(logprob=[log(0.05), -0.1], reward=0.0), kept(**shown))
    page = written(tmp_path, {"A": run(samples=folder)}, {})
    assert '<i class="p2" data-f="0.75;0.5;;1.5">2</i>' in page.html
    assert '<i class="p9" data-f="0.05;0.5;;1.5"' in page.html
    assert '<i class="p2 w2" data-f="0.75;0.5;0.25;">5</i>' in page.html
    assert "✓ response, reward 1, 2 tokens" in page.text
    assert "✗ response, reward 0, 2 tokens" in page.text
    assert "◆ demonstration, reward 1, 2 tokens" in page.text
    assert page.html.count('class="group"') == 1  # one prompt


def test_the_samples_of_a_page_are_few_and_long_ones_are_cut_in_the_middle(tmp_path: Path) -> None:
    many = range(1, 40)
    for step in many:
        keep(tmp_path, f"step-{step:06d}", kept(step=step), kept(step=step, problem=8))
    length = HEAD + TAIL + 5
    long = kept(step=40, tokens=[f"{i} " for i in range(length)], logprob=[-0.1] * length, external=[False] * length)
    keep(tmp_path, "step-000040", replace(long, entropy=None, advantage=None, exploration_weight=None))
    keep(tmp_path, "step-000040-amc-0-000000", *[kept(step=40)] * 9)  # an evaluation between steps
    found = moments(tmp_path, [])
    assert [(moment.name, moment.step) for moment in found][0::11] == [("step 1", 1), ("step 40", 40)]
    assert len(found) == MOST_STEPS == count(found)
    (shown,) = found[-1].groups[0].members
    assert (len(shown.head), len(shown.tail), shown.left_out) == (HEAD, TAIL, 5)
    assert shown.tail[-1].text == f"{length - 1} "
    page = written(tmp_path, {"A": run(samples=tmp_path)}, {})
    assert "… 5 tokens left out …" in page.text


def test_samples_of_an_evaluation_are_right_and_wrong_ones(tmp_path: Path) -> None:
    samples = [kept(step=None, benchmark="aime", problem=i // 8, reward=float(i % 8 == 5)) for i in range(80)]
    keep(tmp_path, "evaluation-amc-0-000000", *samples)
    (moment,) = moments(tmp_path, [])
    assert moment.name == "evaluation on aime"
    assert [(group.row, [one.verdict for one in group.members]) for group in moment.groups] == [
        (f"row {i} of the data", ["right", "wrong"]) for i in range(1, 5)
    ]
    assert moments(tmp_path / "none", []) == []


def damage(path: Path, how: str) -> None:
    if how == "foreign":
        pq.write_table(pa.table({"step": ["one"], "prompt": [1]}), path)
    else:
        path.write_bytes(path.read_bytes()[: {"truncated": 100, "empty": 0}[how]])


DAMAGES = ["truncated", "empty", "foreign"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_left_out_of_the_page_which_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    for name in ("step-000001", "step-000002", "evaluation-amc-0-000000", "evaluation-math-0-000000"):
        keep(tmp_path, name, kept(benchmark=name.split("-")[1], step=int(name[-1])))
    damaged = ["step-000001", "evaluation-amc-0-000000"]
    for name in damaged:
        damage(tmp_path / f"{name}.parquet", how)
    page = written(tmp_path, {"A": run(samples=tmp_path)}, {})
    assert "A, step 2" in page.text
    assert "A, evaluation on math" in page.text
    assert "A, step 1" not in page.text
    for name, record in zip(damaged, caplog.records, strict=True):
        assert record.levelname == "WARNING"
        assert f"want a file of kept samples in {tmp_path}/{name}.parquet; got" in record.getMessage()
        assert f"A: {' '.join(record.getMessage().split())}" in page.text


def test_a_file_of_another_step_is_left_out_of_the_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is whole, under another step's name."""
    for step in (1, 2):
        keep(tmp_path, f"step-{step:06d}", kept(step=step))
    (tmp_path / "step-000002.parquet").write_bytes((tmp_path / "step-000001.parquet").read_bytes())
    page = written(tmp_path, {"A": run(samples=tmp_path)}, {})
    assert "A, step 1" in page.text
    assert "A, step 2" not in page.text
    assert f"{tmp_path}/step-000002.parquet has those of step 1" in caplog.text


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_does_not_hide_the_others_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    for step in (1, 2, 3):
        keep(tmp_path / "samples", f"step-{step:06d}", kept(step=step))
    damage(tmp_path / "samples/step-000002.parquet", how)
    assert main(["samples", str(tmp_path), "-n", "3"]) == 0
    out, _ = capsys.readouterr()
    assert re.findall(r"step \d", out) == ["step 3", "step 1"]
    (record,) = caplog.records
    assert "step-000002.parquet; got" in record.getMessage()
    for step in (1, 3):
        damage(tmp_path / f"samples/step-00000{step}.parquet", how)
    assert main(["samples", str(tmp_path), "-n", "3"]) == 2
    assert "want samples that can be read; got 3 damaged or empty files in" in capsys.readouterr().err


def test_the_samples_of_a_step_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        keep(tmp_path / "samples", f"step-{step:06d}", kept(step=step))
    keep(tmp_path / "samples", "step-000020-amc-0-000000", kept(step=20, benchmark="amc"))
    keep(tmp_path / "samples", "evaluation-amc-0-000000", kept(step=None, benchmark="amc"))
    assert main(["samples", str(tmp_path), "-n", "5", "--step", "22"]) == 0
    out, _ = capsys.readouterr()
    assert re.findall(r"step .*?, row 8|^amc", out) == ["step 20, row 8", "step 20, amc, row 8"]


def test_the_newest_samples_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text: neither markup nor commands to the terminal."""
    strange = "[red]x[/red]\x1b[2J"
    keep(tmp_path / "run/samples", "step-000001", kept(prompt="old"))
    keep(tmp_path / "run/samples", "step-000010", kept(step=10, prompt=strange, tokens=[strange, "!"]), kept(step=10))
    keep(tmp_path / "other/samples", "step-000003", kept(step=3))
    (tmp_path / "run/config.yaml").write_text("a: 1\n")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "generated_tokens": 1}\n')
    assert main(["samples", str(tmp_path / "run"), "-n", "2"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("step 10, row 8 of the data, right 1 of 1\n") == 2
    assert out.count("[red]x[/red]\\x1b[2J") == 2  # prompt and response
    assert "\x1b" not in out
    assert "old" not in out
    assert main(["samples", str(tmp_path / "run"), "-n", "3"]) == 0
    assert "old" in capsys.readouterr().out
    for name in ("config.yaml", "metrics.jsonl"):  # a folder of `rlplus eval MODEL` has none
        (tmp_path / "run" / name).unlink()
    keep(tmp_path / "run/samples", "evaluation-amc-0-000000", kept(step=None, benchmark="amc"))
    assert main(["samples", str(tmp_path / "run"), "-n", "2"]) == 0
    out, _ = capsys.readouterr()
    assert out.index("amc, row 8") < out.index("step 10, row 8")
    folders = [str(tmp_path / name) for name in ("run", "other")]
    assert main(["samples", *folders, "-n", "1"]) == 0
    found = re.findall(rf"^{tmp_path}/\w+$|^.*row 8", capsys.readouterr().out, flags=re.MULTILINE)
    assert found == [folders[0], "amc, row 8", folders[1], "step 3, row 8"]
    for path in (tmp_path / "run/samples").iterdir():
        path.unlink()
    (tmp_path / "run/config.yaml").touch()
    assert main(["samples", str(tmp_path / "run"), "-n", "1"]) == 2
    assert "run/samples has none (log.samples_every says how often: 0 is never)" in capsys.readouterr().err


def shown_in_terminal(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["samples", str(folder), "-n", *options]) == 0
    return capsys.readouterr().out


def test_each_problem_has_a_right_and_a_wrong_response(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the file, each prompt once, the reference and the grader's reason beside them."""
    samples = []
    for problem in range(4):
        asked = {"step": None, "benchmark": "amc", "problem": problem, "prompt": f"ask {problem}", "answer": "42"}
        rewards = [1.0, None, 0.0, 0.0] if problem % 2 else [1.0, 1.0]
        samples += [
            kept(reward=reward, tokens=[f"r{i}", "."], detail="" if reward else "no box", **asked)
            for i, reward in enumerate(rewards)
        ]
    keep(tmp_path / "samples", "evaluation-amc-0-000000", *samples)
    out = shown_in_terminal(tmp_path, capsys, "2")
    assert out.startswith(
        "amc, row 1 of the data, right 2 of 2\nask 0\nexpected: 42\n"
        "response, reward 1, 2 tokens; graded: right\nr0. \n"
        "amc, row 2 of the data, right 1 of 4, not graded 1\nask 1\nexpected: 42\n"
        "response, reward 1, 2 tokens; graded: right\nr0. \n"
        "response, reward 0, 2 tokens; graded: wrong (no box)\nr2. \n"
        "yellow"
    )
    out = shown_in_terminal(tmp_path, capsys, "2", "--wrong")
    assert re.findall(r"row \d|graded: \w+", out) == ["row 2", "graded: wrong", "row 4", "graded: wrong"]
    keep(tmp_path / "samples", "evaluation-amc-0-000000", *samples[:2])
    assert "no wrong response among those in" in shown_in_terminal(tmp_path, capsys, "2", "--wrong")


def test_the_members_of_a_group_are_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step's ungraded responses are at the end of its file; its demonstrations are shown beside a response."""
    shown = {"external": [True, True], "exploration_weight": [0.25, 0.0], "tokens": ["5", "!"]}
    failed = kept(reward=None, status="timeout", detail="10 s")
    keep(
        tmp_path / "samples", "step-000001", kept(), kept(**shown), kept(problem=8), failed, replace(failed, problem=9)
    )
    out = shown_in_terminal(tmp_path, capsys, "9")
    assert re.findall(r"row .*|(?:demo|resp).*", out) == [
        "row 8 of the data, right 1 of 2, not graded 1",
        "demonstration, reward 1, 2 tokens",
        "response, reward 1, 2 tokens; graded: right",
        "row 9 of the data, right 1 of 1",
        "response, reward 1, 2 tokens; graded: right",
        "row 10 of the data, right 0 of 1, not graded 1",
        "response, not graded, timeout, 2 tokens; graded: no (10 s)",
    ]


def test_a_page_shows_the_expected_answer_and_the_graders_reason(tmp_path: Path) -> None:
    wrong = kept(reward=0.0, answer="<b>4</b>", detail="no letter", problem=870)
    page = written(tmp_path, {"A": run(samples=keep(tmp_path, "step-000001", wrong, replace(wrong, reward=None)))}, {})
    assert (
        "Row 871 of the data 1+1= expected: <b>4</b> ✗ response, reward 0, 2 tokens; graded: wrong (no lett"
        in page.text
    )
    assert "? response, not graded, 2 tokens; graded: no (no letter)" in page.text
    long = written(tmp_path, {"A": run(samples=keep(tmp_path, "step-000001", replace(wrong, answer="7" * 5000)))}, {})
    assert f"expected: {'7' * ANSWER} … (5,000 characters) ✗" in long.text
    old = written(tmp_path, {"A": run(samples=keep(tmp_path, "step-000001", kept()))}, {})
    assert "expected:" not in old.text


@pytest.mark.parametrize(("logprob", "style"), [(-0.1, ""), (-1.0, "yellow"), (-3.0, "red"), (float("nan"), "")])
def test_unlikely_tokens_are_coloured(logprob: float, style: str) -> None:
    text = coloured(kept(logprob=[logprob, 0.0]))
    assert text.plain == "2<e>"
    assert {span.style for span in text.spans if span.start == 0} - {""} == ({style} if style else set())
