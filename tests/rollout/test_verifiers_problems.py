"""Problems of environments of `verifiers` as data: their tools, those for evaluations, which ones are the same."""

from datetime import date
from typing import Any

import pytest
from chat_templates import byte_turns
from said_texts import Saying

from rlplus.train.config import EnvironmentConfig
from rlplus.train.data import Example, distinct
from rlplus.train.rollout import Request, Sampling, make_respond
from rlplus.train.rollout.environments import load_environment


def configured(kind: str) -> EnvironmentConfig:
    return EnvironmentConfig(library="verifiers", name="games", arguments={"kind": kind}, timeout_s=60.0)


def test_a_problem_of_a_group_has_the_tools_of_its_environment() -> None:
    config, tokenizer = configured("toolbox"), byte_turns()
    rows = list(load_environment(config).problems(held_out=False, count=None))
    assert [[tool["function"]["name"] for tool in row["tools"]] for row in rows] == [[]] * 4 + [["add"]] * 4
    said, texts = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>', []
    for row in (rows[0], rows[-1]):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"] or None, add_generation_prompt=True, return_dict=False
        )
        respond, example = make_respond(None, tokenizer, 258, config), Example(0, tuple(prompt), "", None, columns=row)
        engine: Any = Saying([[said], ["42"]])
        ((completion,),) = respond(engine, [example], [Request(prompt, 1, 200)], Sampling(1.0, 5))
        texts.append(tokenizer.decode(completion.tokens))
    end = "<|endoftext|>"
    assert texts == [said + end, f"{said}{end}\n<|tool|>\n42\n<|assistant|>\n42{end}"]


def test_held_out_problems_are_the_environments_own() -> None:
    """verifiers falls back to the training set."""
    (row,) = load_environment(configured("tested")).problems(held_out=True, count=None)
    assert (row["answer"], row["prompt"][-1]["content"]) == ("9", "say 9")
    for kind in ("single", "group"):
        with pytest.raises(ValueError, match="the environment games has no problems of its own for evaluations"):
            list(load_environment(configured(kind)).problems(held_out=True, count=1))


def test_problems_that_differ_in_their_rows_are_counted_apart_in_an_evaluation() -> None:
    same = [Example(i, (1,), "x", None, columns={"row": {"info": i % 2}}) for i in range(4)]
    assert [example.rows for example in distinct(same)] == [2, 2]
    dated = [Example(i, (1,), "x", None, columns={"row": date(2026, 1, 1 + i % 2)}) for i in range(4)]
    assert [example.rows for example in distinct(dated)] == [2, 2], "a user's own column, which JSON cannot hold"
