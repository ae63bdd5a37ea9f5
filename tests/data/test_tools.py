"""The column of tools: the chat template gets it, and what is none is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import byte_turns

from rlplus.train.config import DataConfig
from rlplus.train.data import load_examples

TOOL = {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}}


def loaded(folder: Path, *tools: Any, **changes: Any) -> list[str]:
    """The prompts, as text."""
    rows = [{"prompt": [{"role": "user", "content": "2+2"}], "answer": "4", "tools": value} for value in tools]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row | changes) + "\n" for row in rows))
    config = DataConfig(path=str(path), tools="tools")
    examples, _ = load_examples(config, byte_turns(), max_demonstration_length=1)
    return [bytes(example.prompt).decode() for example in examples]


def test_the_template_gets_a_rows_tools(tmp_path: Path) -> None:
    plain = "<|user|>\n2+2\n<|assistant|>\n"
    shown = f"{json.dumps([TOOL])}\n{plain}"
    assert loaded(tmp_path, [TOOL], json.dumps([TOOL]), None, []) == [shown, shown, plain, plain]


@pytest.mark.parametrize(
    ("tools", "changes", "message"),
    [
        ("[{", {}, r"rows.jsonl:1: want the tools as a list or its JSON; got '\[\{'"),
        ({"name": "add"}, {}, r"rows.jsonl:1: want the tools as a list of definitions; got \{"),
        (["add"], {}, r"rows.jsonl:1: want the tools as a list of definitions; got \['add'\]"),
        ([TOOL], {"prompt": "2+2"}, "rows.jsonl:1: tools want chat messages, or data.chat true; got plain text"),
    ],
)
def test_what_are_no_tools_is_refused(tmp_path: Path, tools: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, tools, **changes)


def test_a_missing_column_of_tools_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "4", "tool": []}\n')
    with pytest.raises(ValueError, match=r"want a column 'tools'; got .*nearest: tool \(data.tools names it\)"):
        load_examples(
            DataConfig(path=str(tmp_path / "rows.jsonl"), tools="tools"), byte_turns(), max_demonstration_length=1
        )


def test_a_template_of_ours_shows_no_tools() -> None:
    with pytest.raises(ValueError, match="tools are for the chat template, and template qwen takes its place"):
        DataConfig(path="x.jsonl", tools="tools", template="qwen")
