"""Turns as tokens: what was sampled stays, what the template adds is not trained on, nothing else is accepted."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import CHATML, FORGETFUL, byte_turns, word_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rlplus.common.errors import RunFailed
from rlplus.train.data import Example
from rlplus.train.rollout import Response
from rlplus.train.rollout.environments.tool_calls import Call, parse_calls
from rlplus.train.rollout.environments.turns import Message, Turns, call_message

USER: Message = {"role": "user", "content": "guess"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}}


def opened(tokenizer: Any, *messages: Message, tools: Any = None, room: int = 400) -> Turns:
    """A response to the messages, as the data's prompt has them."""
    prompt = tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, return_dict=False)
    turns = Turns(Response(Example(0, tuple(prompt), "", None), room), tokenizer)
    assert turns.open(messages, tools)
    return turns


def say(turns: Turns, tokens: Sequence[int], *, end: bool = True) -> None:
    """Sample these tokens, and the end token."""
    response, said = turns.response, [*tokens, *[turns.tokenizer.eos_token_id] * end]
    response.tokens += said
    response.trained += [True] * len(said)
    response.logprob += [-1.0] * len(said)
    response.ended = end


def inserted(response: Response) -> list[list[int]]:
    """The stretches of tokens that are not trained on."""
    parts: list[list[int]] = []
    for place, (token, on) in enumerate(zip(response.tokens, response.trained, strict=True)):
        if not on:
            if place == 0 or response.trained[place - 1]:
                parts.append([])
            parts[-1].append(token)
    return parts


@pytest.mark.parametrize("make", [byte_turns, word_tokenizer])
def test_prompt_and_response_are_the_rendered_dialogue_whatever_was_sampled(make: Any) -> None:
    """Compared with one rendering of the whole, as text: the tokens of a turn are any that spell it."""
    tokenizer, rng = make(), random.Random(0)
    messages: list[Message] = [{"role": "system", "content": "You ."}, USER]
    turns = opened(tokenizer, *messages)
    sampled = []
    for turn in range(4):
        text = rng.choice(["7", "lower guess", " 1\n2 ", "", "é 世"])
        pieces = [tokenizer.encode(sign, add_special_tokens=False) for sign in text]  # not as it splits the whole
        say(turns, sampled_now := [token for piece in pieces for token in piece])
        sampled.append([*sampled_now, tokenizer.eos_token_id])
        assert turns.close(tools=False).content == text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"higher {turn}"}]
        assert turns.open(messages, None)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode([*turns.response.task.prompt, *turns.response.tokens]) == whole
    response = turns.response
    assert [t for t, on in zip(response.tokens, response.trained, strict=True) if on] == [
        token for turn_ in sampled for token in turn_
    ]
    assert len(inserted(response)) == 4


def test_what_is_inserted_has_the_tokens_that_it_has_in_a_rendering_of_the_whole() -> None:
    tokenizer = word_tokenizer()
    turns = opened(tokenizer, USER)
    say(turns, tokenizer.encode("lower guess 7", add_special_tokens=False))
    turns.close(tools=False)
    messages = [USER, {"role": "assistant", "content": "lower guess 7"}, {"role": "user", "content": "higher"}]
    turns.open(messages, None)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert [*turns.response.task.prompt, *turns.response.tokens] == whole
    assert inserted(turns.response) == [
        tokenizer.encode("\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n")
    ]


def test_a_turn_that_was_cut_gets_an_end_token_that_is_not_trained_on() -> None:
    tokenizer = byte_turns()
    turns = opened(tokenizer, USER)
    say(turns, b"ab", end=False)
    turn = turns.close(tools=False)
    assert (turn.content, turn.truncated, turn.tokens) == ("ab", True, 2)
    turns.open([USER, {"role": "assistant", "content": "ab"}, USER], None)
    assert inserted(turns.response) == [[tokenizer.eos_token_id, *b"\n<|user|>\nguess\n<|assistant|>\n"]]


def test_a_message_without_room_ends_the_response() -> None:
    turns = opened(byte_turns(), USER, room=20)
    say(turns, b"ab")
    turns.close(tools=False)
    assert not turns.open([USER, {"role": "assistant", "content": "ab"}, USER], None)
    response = turns.response
    assert (len(response.tokens), response.ended, response.truncated) == (3, True, True)
    assert not turns.open([], None), "it stays ended"


def test_calls_of_tools_become_messages_with_calls() -> None:
    tokenizer = word_tokenizer()
    turns = opened(tokenizer, USER, tools=[TOOL])
    text = 'so\n<tool_call>\n{"arguments": {"a": 2}, "name": "add"}\n</tool_call>'
    say(turns, tokenizer.encode(text, add_special_tokens=False))
    turn = turns.close(tools=True)
    assert (turn.content, turn.calls) == ("so\n", [Call("add", {"a": 2})])
    answer = {"role": "tool", "content": "4", "tool_call_id": "1"}
    turns.open([USER, call_message(turn.content, [("add", '{"a": 2}')]), answer], [TOOL])
    assert inserted(turns.response) == [tokenizer.encode("\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("7", "7", []),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", {})]),
        ('a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>b<tool_call>{"name": "g", "arguments": {}}', "a",
         [("f", {"x": 1}), ("g", {})]),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
        ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>no</tool_call>',
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>no</tool_call>',
            [],
        ),
    ],
)  # fmt: skip
def test_calls_are_read_or_the_text_is_left_whole(text: str, content: str, calls: list[Any]) -> None:
    assert parse_calls(text) == (content, calls)


def refused(template: str, said: str, then: list[Message], message: str) -> None:
    tokenizer = word_tokenizer(template)
    turns = opened(tokenizer, USER)
    say(turns, tokenizer.encode(said, add_special_tokens=False))
    turns.close(tools=False)
    with pytest.raises(RunFailed, match=message):
        turns.open(then, None)


def test_templates_that_change_what_was_said_are_refused() -> None:
    said = {"role": "assistant", "content": "<think>hm</think>7"}
    refused(FORGETFUL, said["content"], [USER, said, USER], "leaves out a part of what the policy said: '<think>hm")
    no_end = CHATML.replace("<|im_end|>", "")
    refused(no_end, "7", [USER, {"role": "assistant", "content": "7"}, USER], "ends the policy's messages with the end")
    counted = "{{ messages | length }}" + CHATML
    refused(counted, "7", [USER, {"role": "assistant", "content": "7"}, USER], "messages before the last turn changed")


def test_environments_that_rewrite_the_dialogue_are_refused() -> None:
    other = {"role": "user", "content": "another"}
    refused(CHATML, "7", [other, {"role": "assistant", "content": "7"}, USER], "the environment rewrites them")
    refused(CHATML, "7", [USER, {"role": "assistant", "content": "8"}, USER], "what the policy said: '7' became '8'")


def test_a_message_that_spells_the_end_token_is_no_end() -> None:
    tokenizer = byte_turns()
    turns = opened(tokenizer, USER)
    say(turns, b"a<|endoftext|>b")
    content = turns.close(tools=False).content
    turns.open([USER, {"role": "assistant", "content": content}, USER], None)
    assert inserted(turns.response) == [list(b"\n<|user|>\nguess\n<|assistant|>\n")]


@pytest.mark.parametrize("spelled", ["<|endoftext|>", r"<\u007cendoftext|>"])
def test_a_call_that_spells_the_end_token_is_no_call(spelled: str) -> None:
    """Templates write a call anew, and may spell the token in another way."""
    tokenizer = byte_turns()
    turns = opened(tokenizer, USER, tools=[TOOL])
    text = 'so<tool_call>{"name": "add", "arguments": {"a": ["' + spelled + '"]}}</tool_call>'
    say(turns, text.encode())
    turn = turns.close(tools=True)
    assert (turn.content, turn.calls) == (text, [])
    turns.open([USER, {"role": "assistant", "content": text}, USER], [TOOL])
    assert inserted(turns.response) == [list(b"\n<|user|>\nguess\n<|assistant|>\n")]


def test_a_prompt_that_is_not_the_environments_is_refused() -> None:
    tokenizer = byte_turns()
    turns = Turns(Response(Example(0, tuple(b"<|user|>\nother\n<|assistant|>\n"), "", None), 9), tokenizer)
    with pytest.raises(RunFailed, match=r"data's prompt.*behind '<\|user\|>\\n' the environment has 'guess.*'other"):
        turns.open([USER], None)


def test_without_a_template_there_are_no_turns() -> None:
    tokenizer = byte_turns()
    turns = Turns(Response(Example(0, (1,), "", None), 9), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(RunFailed, match="want a tokenizer with a chat template"):
        turns.open([USER], None)
    tokenizer.chat_template = "{{ raise_exception('no tools') }}"
    with pytest.raises(RunFailed, match="refuses the environment's messages: no tools"):
        turns.open([USER], None)


@pytest.mark.parametrize("place", ["first", "behind"])
def test_a_lone_surrogate_of_an_environment_ends_the_run_with_a_line(place: str) -> None:
    """JSON can bring one, and no tokenizer takes it."""
    wrong = {"role": "user", "content": json.loads('"x\\ud800y"')}
    if place == "first":
        turns, messages = Turns(Response(Example(0, (1,), "", None), 9), byte_turns()), [wrong]
    else:
        turns, messages = opened(byte_turns(), USER), [USER, {"role": "assistant", "content": "7"}, wrong]
        say(turns, b"7")
        turns.close(tools=False)
    with pytest.raises(RunFailed, match=r"want text of the environment that .*; got the lone surrogate '.ud800'"):
        turns.open(messages, None)


def test_a_word_of_an_environment_that_has_no_token_is_refused() -> None:
    tokenizer = byte_turns()
    words = Tokenizer(WordLevel({"known": 0}, unk_token="[UNK]"))
    tokenizer.encode = lambda text, **_: words.encode(text).ids
    with pytest.raises(RunFailed, match=r"cannot encode the environment's text: .*Missing \[UNK\] token"):
        Turns(Response(Example(0, (1,), "", None), 9), tokenizer).open([USER], None)


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
def test_a_template_that_fails_in_another_way_is_refused(template: str) -> None:
    tokenizer = byte_turns()
    turns = Turns(Response(Example(0, (1,), "", None), 9), tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(RunFailed, match=r"refuses the environment's messages: [a-z]"):
        turns.open([USER], None)
