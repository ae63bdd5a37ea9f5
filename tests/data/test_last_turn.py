"""Prompts of chat messages end in a turn that the model answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplus.train.config import DataConfig
from rlplus.train.data import LoadReport, byte_tokenizer, load_examples

USER = {"role": "user", "content": "1+1?"}
SOLUTION = {"role": "assistant", "content": "It is 2."}


def load(folder: Path, prompts: list[Any], **fields: Any) -> LoadReport:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    config = DataConfig.model_validate({"path": str(path), "max_prompt_length": 1000} | fields)
    return load_examples(config, byte_tokenizer(), max_demonstration_length=1000)[1]


@pytest.mark.parametrize("place", [0, 3, 1500])
def test_a_solution_in_the_prompt_is_refused_wherever_it_is(place: int, tmp_path: Path) -> None:
    """Columns like messages of NuminaMath hold the whole conversation; a few rows among others are enough."""
    prompts = [[USER] for _ in range(1600)]
    prompts[place] = [USER, SOLUTION]
    message = rf"rows\.jsonl:{place + 1}: want chat messages whose last one .* got an assistant's.*'It is 2\.'"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, prompts)


REST = [{"problem": "1+1?", "solution": "s", "source": "x"}, {"generations": ["It is 2."], "uuid": "1"}, {}]


@pytest.mark.parametrize("rest", REST, ids=["NuminaMath", "OpenR1", "TRL"])
@pytest.mark.parametrize("place", [0, 1500])
@pytest.mark.parametrize("role", ["assistant", "Assistant", "model", "gpt"])
def test_the_layouts_of_the_field(role: str, place: int, rest: dict[str, Any], tmp_path: Path) -> None:
    """`messages` with the solution in all rows, or in one of many."""
    rows = [{"messages": [USER, SOLUTION | {"role": role}] if i == place else [USER]} | rest for i in range(1600)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"answer": "2"}) + "\n" for row in rows))
    config = DataConfig.model_validate({"path": str(path), "prompt": "messages", "max_prompt_length": 1000})
    with pytest.raises(ValueError, match=rf"rows\.jsonl:{place + 1}: want chat messages whose last one is a user's"):
        load_examples(config, byte_tokenizer(), max_demonstration_length=1000)


def test_prompt_and_completion_are_a_prompt_and_a_demonstration(tmp_path: Path) -> None:
    """TRL's layout, in which no prompt has the solution."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": [USER], "completion": completion, "answer": "2"} for completion in ([SOLUTION], "It is 2.")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({"path": str(path), "demonstration": "completion", "max_prompt_length": 1000})
    examples, report = load_examples(config, byte_tokenizer(), max_demonstration_length=1000)
    assert report.demonstrations == 2
    decoded = [byte_tokenizer().decode(list(example.demonstration or ())) for example in examples]
    assert all(text.startswith("It is 2.") for text in decoded)
    assert not any("It is 2." in byte_tokenizer().decode(list(example.prompt)) for example in examples)


@pytest.mark.parametrize("chat", [False, True])
def test_messages_as_a_text_of_json_are_refused(chat: bool, tmp_path: Path) -> None:
    """They would be a prompt of brackets and quotes, with the solution in it."""
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: want chat messages as a list; got its JSON as a text"):
        load(tmp_path, ["1+1?", json.dumps([USER, SOLUTION])], chat=chat)
    report = load(tmp_path, ["[1, 2] or [3]?", "[1, 2]", '[{"role": "user"', '[{"a": 1}]'], chat=chat)
    assert report.kept == 4


def test_turns_before_the_last_one_are_context(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "2"}
    report = load(tmp_path, [[USER, SOLUTION, USER], [USER, SOLUTION, tool], "1+1?"], chat=True)
    assert (report.kept, report.prompts_unasked) == (3, 0)


def test_other_roles_are_kept_and_counted(tmp_path: Path) -> None:
    report = load(
        tmp_path, [[USER], [USER, {"role": "ipython", "content": "2"}], [{"role": "system", "content": "2?"}]]
    )
    assert (report.kept, report.prompts_unasked) == (3, 2)
    assert "2 prompts whose last message is neither a user's nor a tool's, kept (first: " in report.summary()
    assert "rows.jsonl:2)" in report.summary()
