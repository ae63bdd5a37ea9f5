"""Tool calls in the text of a turn, in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}`."""

import json
import re
from typing import Any, NamedTuple

BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class Call(NamedTuple):
    """A call of a tool, with the values of its arguments by name."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str) -> tuple[str, list[Call]]:
    """The text before the first call, and the calls. A text with a call that cannot be read is all text, without calls.

    So does vLLM's server with its parser `hermes`: the environment then sees a message without calls.
    """
    calls = []
    for block in BLOCK.findall(text):
        try:
            call = json.loads(block)
        except ValueError:
            return text, []
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return text, []
        if not isinstance(call.get("arguments"), dict):
            return text, []
        calls.append(Call(call["name"], call["arguments"]))
    return (text[: text.index("<tool_call>")] if calls else text), calls
