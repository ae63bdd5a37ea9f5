"""The script that makes POPE's data: which problems are hard, and the shortest beginning behind which one is solved."""

import json
import re
import runpy
import shlex
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_runs import write_start
from trainer_runs import metrics, run_config

from rlplus.train.config import Config, load_config
from rlplus.train.data import byte_tokenizer, load_examples
from rlplus.train.rollout import Completion
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import train

SCRIPT = Path(__file__).parents[2] / "examples/guide_hard_problems.py"
TEMPLATE = "{prompt}|{demonstration}"
END = 257
TOLD = ["data.max_prompt_length=7", "data.limit=null"]  # for the longest prompt, and for twice the rows
# Problems: the length of a beginning of the demonstration from which on every second response is right.
NEEDED = {"a": 0, "b": 1, "c": 3, "d": 4, "e": 9, "f": 2, "g": 0}


def row(name: str) -> dict[str, Any]:
    return {"task": {"text": f"{name}="}, "answer": name.upper(), "demonstration": f"{name * 15}<{name.upper()}>"}


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replaces the engine's answers by the table's; -> how often each prompt was asked."""
    asked: Counter[str] = Counter()

    def generate(engine: Any, requests: Any, sampling: Any) -> list[list[Completion]]:
        asked[f"at {sampling.temperature}"] += 1
        groups = []
        for request in requests:
            prompt = bytes(request.prompt).decode()
            asked[prompt] += request.n
            problem, _, shown = prompt.partition("=")
            right = len(shown.lstrip("|")) >= NEEDED[problem]
            texts = [f"<{problem.upper()}>" if right and i % 2 else "<?>" for i in range(request.n)]
            groups.append([Completion([*text.encode(), END], [-1.0] * (len(text) + 1), False) for text in texts])
        return groups

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    return asked


def write_run(folder: Path, rows: list[dict[str, Any]], **data: Any) -> tuple[Path, Config]:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    data = {"path": str(path), "prompt": "task.text", "max_prompt_length": 4} | data
    start = write_start(folder / "start", tied=True)
    config = run_config(
        folder,
        model={"scratch": None, "path": str(start)},
        data=data,
        rollout={"engine": "transformers", "group_size": 4, "max_response_length": 20},
        algorithm={"preset": "pope"},
        train={"steps": 2, "prompts_per_step": 4},
    )
    (folder / "run.yaml").write_text(config.to_yaml())
    return folder / "run.yaml", config


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_hard_problems_get_the_shortest_beginning_that_helps(
    tmp_path: Path,
    script: Any,
    asked: Counter[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to a quarter of 18 tokens in four parts: 1, 2, 3 and 4 of them."""
    rows = [*(row(name) for name in "abcde"), row("f") | {"demonstration": None}, row("b") | {"note": [1, None]}]
    rows += [row("g") | {"demonstration": "wrong<F>"}, row("f")]
    run, config = write_run(tmp_path, rows, max_demonstration_length=20, demonstration_choice="random")
    output = tmp_path / "guided.jsonl"
    arguments = [str(run), "--output", str(output), "--samples", "6", "--template", TEMPLATE, "data.limit=8"]
    script["main"](arguments)
    shown = {"b": 1, "c": 3, "d": 4, "e": 4}
    want = []
    for each in (*rows[1:5], rows[6]):
        name = each["task"]["text"][0]
        want += [each, each | {"task": {"text": f"{name}=|{name * shown[name]}"}}]
    assert lines(output) == want
    once = {f"{name}=": 6 for name in "acde"} | {"b=": 12}  # f has no demonstration; b is there twice
    behind = {f"{name}=|{name * part}": 6 for name in "cde" for part in (1, 2, 3, 4)}
    assert asked.pop("at 0.8") == 2  # by the number of parts
    assert asked == Counter(once) + Counter(behind) + Counter({f"b=|{'b' * part}": 12 for part in (1, 2, 3, 4)})
    printed = capsys.readouterr().out
    assert "6 of 7 demonstrations pass the run's own reward" in printed
    assert "5 of 6 problems are hard" in printed
    assert "4 of them were solved behind a beginning, the others have the longest one\n10 rows written" in printed
    assert "neither 0 nor 1" not in printed
    asked.clear()
    script["main"](arguments)  # once more: from the responses that were kept
    assert (asked, lines(output)) == (Counter(), want)
    data = config.data.model_copy(update={"path": str(output), "max_prompt_length": 8})
    examples, _ = load_examples(data, byte_tokenizer(), max_demonstration_length=20)
    assert [bytes(e.prompt).decode() for e in examples[:4]] == ["b=", "b=|b", "c=", "c=|ccc"]
    monkeypatch.undo()
    (told,) = re.findall(r"^ +rlplus train (.*)", printed, re.M)
    path, *overrides = shlex.split(told)
    assert overrides == ["data.limit=8", f"data.path={output}", "algorithm.preset=pope", *TOLD]
    assert len(metrics(train(load_config(path, overrides)))) == 2


def test_chat_messages_keep_their_roles(tmp_path: Path, script: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
    (made,) = [script["with_prompt"]({"prompt": messages, "n": 1}, "prompt", "{prompt} so: {demonstration}", "two")]
    assert made == {"prompt": [messages[0], {"role": "user", "content": "1+1= so: two"}], "n": 1}
    nested = script["with_prompt"]({"a": {"b": {"c": "x"}, "d": 2}}, "a.b.c", TEMPLATE, "y")
    assert nested == {"a": {"b": {"c": "x|y"}, "d": 2}}


def test_problems_that_cannot_be_graded_are_not_called_hard(
    tmp_path: Path, script: Any, asked: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    grader = tmp_path / "grade.py"
    grader.write_text(
        "def grade(text, answer):\n"
        "    assert answer != 'B' or len(text) > 9, 'unknown'\n"
        "    return float(f'<{answer}>' in text)\n"
    )
    run, _ = write_run(tmp_path, [row("b"), row("c")])
    output = tmp_path / "guided.jsonl"
    reward = [f"reward={{function: '{grader}:grade', workers: 1}}"]
    script["main"]([str(run), *reward, "--output", str(output), "--template", TEMPLATE])
    assert [each["task"]["text"] for each in lines(output)] == ["c=", "c=|ccc"]
    assert "1 of 2 problems are hard" in capsys.readouterr().out


def test_rewards_between_0_and_1_are_told(
    tmp_path: Path, script: Any, asked: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    grader = tmp_path / "grade.py"
    grader.write_text("def grade(text, answer):\n    return (f'<{answer}>' in text) * (1 if len(text) > 9 else 0.5)\n")
    run, _ = write_run(tmp_path, [row("a")])
    reward = f"reward={{function: '{grader}:grade', workers: 1}}"
    script["main"]([str(run), reward, "--output", str(tmp_path / "guided.jsonl"), "--template", TEMPLATE])
    printed = capsys.readouterr().out
    assert "1 of 1 problems are hard" in printed
    assert "some rewards are neither 0 nor 1; a response counts as right with a reward of at least 1" in printed


def test_the_first_right_demonstration_of_several_is_shown_in_whole_characters(
    tmp_path: Path, script: Any, asked: Counter[str]
) -> None:
    """Four parts of a quarter of 19 bytes: 1, 2, 4 and 5, of which an é has two."""
    several = ["no<D>", "xéx" + "y" * 12 + "<C>"]
    run, _ = write_run(tmp_path, [row("c") | {"demonstration": several, "day": "2026-11-28"}])
    script["main"]([str(run), "--output", str(tmp_path / "guided.jsonl"), "--template", TEMPLATE])
    assert {prompt for prompt in asked if "|" in prompt} == {"c=|x", "c=|xéx", "c=|xéxy"}
    assert lines(tmp_path / "guided.jsonl")[1]["task"]["text"] == "c=|xéx"


def test_parquet_rows_become_json(tmp_path: Path, script: Any, asked: Counter[str]) -> None:
    path = tmp_path / "problems.parquet"
    whole = row("c") | {"day": date(2026, 11, 28), "raw": b"x"}
    run, _ = write_run(tmp_path, [row("c")])
    pq.write_table(pa.Table.from_pylist([whole]), path)
    script["main"]([str(run), f"data.path={path}", "--output", str(tmp_path / "guided.jsonl"), "--template", TEMPLATE])
    first, second = lines(tmp_path / "guided.jsonl")
    assert first == row("c") | {"day": "2026-11-28", "raw": "b'x'"}
    assert second == first | {"task": {"text": "c=|ccc"}}


def test_answers_that_a_pattern_makes_equal_are_problems_of_their_own(
    tmp_path: Path, script: Any, asked: Counter[str]
) -> None:
    rows = [row("c") | {"answer": f"{how} #C"} for how in ("so", "thus")]
    run, _ = write_run(tmp_path, rows, answer_pattern="#(.*)")
    script["main"]([str(run), "--output", str(tmp_path / "guided.jsonl"), "--template", TEMPLATE])
    assert [each["answer"] for each in lines(tmp_path / "guided.jsonl")] == ["so #C"] * 2 + ["thus #C"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "want samples and parts above 0, most in (0, 1); got 0, 4, 0.25"),
        (["--most", "1"], "most in (0, 1); got 16, 4, 1"),
        (["--template", "{prompt}"], "--template: want the fields {prompt} and {demonstration}, other braces doubled"),
        (["--template", "{prompt}{demonstration} \\boxed{}"], "--template: want a str.format template, braces doubled"),
        (["--output", "none/guided.jsonl"], "want an existing folder for the output; there is no none"),
        (["--output", "problems.jsonl"], "want another output than the run's data, problems.jsonl"),
        (["data.columns=[task.row]"], "want data.columns without 'row', which is used here; got ['task.row']"),
        (["data.max_prompt_length=1"], "rows"),
        (["model.path=null", "model.scratch={}"], "want a model that samples, model.path; the run has model.scratch"),
        (["data.demonstration=null"], "want data with right demonstrations of at least two tokens"),
    ],
)
def test_wrong_input_says_what_is_wanted(
    tmp_path: Path,
    script: Any,
    asked: Counter[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    """And nothing is sampled before."""
    run, _ = write_run(tmp_path, [row("a")])
    before = (tmp_path / "problems.jsonl").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError)) as error:
        script["main"]([str(run), "--output", "guided.jsonl", *arguments])
    assert message in f"{error.value}{capsys.readouterr().err}"
    assert not asked
    assert not (tmp_path / "guided.jsonl").exists()
    assert (tmp_path / "problems.jsonl").read_text() == before


def test_prompts_too_long_for_the_model_are_refused_before_the_first_response(
    tmp_path: Path, script: Any, asked: Counter[str]
) -> None:
    run, _ = write_run(tmp_path, [row("c")])
    with pytest.raises(ValueError, match="max_position_embeddings"):
        script["main"]([str(run), "--output", str(tmp_path / "guided.jsonl"), "--template", "x" * 999 + TEMPLATE])
    assert not asked


def test_nothing_is_written_where_every_problem_is_solved(tmp_path: Path, script: Any, asked: Counter[str]) -> None:
    run, _ = write_run(tmp_path, [row("a")])
    with pytest.raises(SystemExit, match="there is nothing to train on"):
        script["main"]([str(run), "--output", str(tmp_path / "guided.jsonl"), "--template", TEMPLATE])
    assert not (tmp_path / "guided.jsonl").exists()
