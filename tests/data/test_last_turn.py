"""Prompts of chat messages end in a turn that the model answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplus.config import DataConfig
from rlplus.data import LoadReport, byte_tokenizer, load_examples

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
