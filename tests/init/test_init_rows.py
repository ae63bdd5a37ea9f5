"""Rows that lack an answer, or have one of another form: `rlplus init` counts them and keeps the others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from init_cases import init, installed_vllm, questions, written

from rlplus.tools.init import start
from rlplus.tools.init.columns import WORKED_GSM8K
from rlplus.tools.plan import make_cluster
from rlplus.tools.plan.data_report import plan_data
from rlplus.train.config import DataConfig, load_config
from rlplus.train.data import byte_tokenizer, load_examples, response_text

vllm_is_installed = installed_vllm


@pytest.mark.parametrize(("count", "odd"), [(1, 0), (1, 39), (4, 7)])
@pytest.mark.parametrize("text", ["No answer here.", "", None, "72"])
def test_rows_without_an_answer_take_no_demonstrations_from_the_others(
    text: str | None, count: int, odd: int, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In GSM8K's layout; they are counted, and the first is named."""
    rows: list[dict[str, Any]] = [{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(40)]
    places = sorted((odd + 9 * i) % 40 for i in range(count))
    for place in places:
        rows[place]["answer"] = text
    data, out = written(tmp_path, rows), tmp_path / "run.yaml"
    assert init(model, data, out, "--gpu", "24g") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"data: 40 rows, {40 - count} kept, {40 - count} demonstrations; {count} rows without an answer, or" in said
    assert f"rows.jsonl:{places[0] + 1})" in said.replace("rows. jsonl", "rows.jsonl")
    config = load_config(out)
    assert (config.algorithm.preset, config.data.answer_pattern) == ("rlplus", "#### (.+)")
    examples, _ = load_examples(config.data, byte_tokenizer(), max_demonstration_length=512)
    assert [e.answer for e in examples] == [str(i + 1) for i in range(40) if i not in places]
    texts = [response_text(byte_tokenizer(), example.demonstration or (), None) for example in examples]
    assert all(t == f"One more.\nThe answer is \\boxed{{{e.answer}}}." for t, e in zip(texts, examples, strict=True))


def test_rows_without_an_answer_are_refused_where_there_are_many(model: str, tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": f"One.\n#### {i}" if i % 3 else "One."} for i in range(40)]
    with pytest.raises(ValueError, match=r"35\.0% of the rows would be dropped.*14 rows without an answer.*jsonl:1"):
        start(model, written(tmp_path, rows), make_cluster(1, "24g"))


@pytest.mark.parametrize("odd", [{"answer": None}, {"answer": "see the book"}])
def test_letters_are_choices_although_a_row_has_none(odd: dict[str, Any], model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}: A or B?", "answer": "A"} for i in range(20)]
    rows[3] |= odd
    assert start(model, written(tmp_path, rows), make_cluster(1, "24g")).config.reward.kind == "choice"


def test_data_of_which_nothing_is_dropped_get_no_line(model: str, tmp_path: Path) -> None:
    begun = start(model, questions(tmp_path), make_cluster(1, "24g"))
    assert not any(reason.startswith("data:") for reason in begun.reasons)


BARE = [str, "\\boxed{{{}}}".format, lambda i: f" ${i}$ ", lambda i: [{"role": "assistant", "content": str(i)}]]


@pytest.mark.parametrize("form", BARE)
@pytest.mark.parametrize("worked", [0, 4, 6])
def test_a_column_that_is_only_the_answer_is_no_demonstration(
    worked: int, form: Callable[[int], Any], model: str, tmp_path: Path
) -> None:
    """As DAPO-Math has it. Given it is a warning, of the plan as well; a tenth of the rows may have a solution."""
    rows = [{"prompt": f"{i}?", "solution": form(i), "reward_model": {"ground_truth": str(i)}} for i in range(40)]
    for row in rows[:worked]:
        row["solution"] = f"Count: {row['reward_model']['ground_truth']}"
    data, only = written(tmp_path, rows), f"'solution' is only the answer in {40 - worked} of 40 rows"
    begun = start(model, data, make_cluster(1, "24g"))
    found = (begun.config.algorithm.preset, begun.config.data.demonstration)
    assert found == (("rlplus", "solution") if worked == 6 else ("grpo", None))
    assert any(only in line and "no demonstrations are taken" in line for line in begun.reasons) == (worked < 6)
    given = start(model, data, make_cluster(1, "24g"), ["data.demonstration=solution", "reward.workers=1"])
    assert (given.config.algorithm.preset, given.config.data.demonstration) == ("rlplus", "solution")
    assert any(only in line for line in given.reasons) == (worked < 6)
    assert any(only in line for line in plan_data(given.config).summaries) == (worked < 6)


def test_worked_solutions_beside_bare_answers_are_the_demonstrations(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": f"Count.\n#### {i}", "solution": i} for i in range(20)]
    begun = start(model, written(tmp_path, rows), make_cluster(1, "24g"))
    assert (begun.config.data.demonstration, begun.config.data.answer_pattern) == ("answer", "#### (.+)")
    assert not any("only the answer" in line for line in begun.reasons)


@pytest.mark.parametrize(("end", "dropped"), [("\n#### {}", 4), ("\nSo $\\boxed{{{}}}$.", 4), ("", 0)])
def test_a_solution_with_another_answer_than_the_row_is_wrong(
    end: str, dropped: int, model: str, tmp_path: Path
) -> None:
    """Behind #### or in a box, though a row has neither; where nothing marks it, a line says what is not known."""
    rows = [{"prompt": f"{i}?", "answer": i, "solution": "Count." + end.format(i % 36)} for i in range(40)]
    rows[9]["solution"] = "Count."
    begun = start(model, written(tmp_path, rows), make_cluster(1, "24g"), ["reward.workers=1"])
    found = plan_data(begun.config)
    kept = 40 - dropped - ("boxed" in end)
    assert f"demonstrations: {kept} of 40 pass the run's own reward" in found.summaries[1]
    unknown = [any("is not looked at" in line for line in lines) for lines in (begun.reasons, found.summaries)]
    assert unknown == [not end] * 2


def test_only_demonstrations_have_a_second_group() -> None:
    with pytest.raises(ValueError, match=r"with exactly one group; got .* with 2"):
        DataConfig(answer_pattern="(x)(?P<answer>y)")
    with pytest.raises(ValueError, match=r"a second one named answer; got .* with 2"):
        DataConfig(demonstration="solution", demonstration_pattern="(?P<answer>x)(y)")


@pytest.mark.parametrize(
    ("solution", "parts"),
    [
        ("Count.\n#### 1,234\n", ("Count.", "1,234")),
        ("Count.\n#### 72\n\nA note.", ("Count.", "72")),
        ("Count.\n#### 72\n#### 73", ("Count.", "72")),
        ("Count.\n#### ", ("Count.", None)),
        ("Count.", ("Count.", None)),
    ],
)
def test_the_answer_of_a_solution_is_the_line_behind_the_mark(solution: str, parts: tuple[str, str | None]) -> None:
    found = re.search(WORKED_GSM8K, solution)
    assert found is not None
    assert found.groups() == parts
