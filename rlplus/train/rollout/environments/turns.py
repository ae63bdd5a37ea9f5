"""A response of several turns: sampled tokens as they were sampled, and between them what the chat template adds.

An environment speaks in chat messages, and the trainer wants the tokens that were sampled. So a turn is never
tokenised again: its tokens stay, and behind its end token come the tokens of the text by which the template's rendering
of all messages is longer. That works only where the template changes nothing that was rendered before; it is checked.
A turn that was sampled with another end token than the template's keeps it:

    rendered for the last turn | what the policy said | end token | inserted: next message, "<|im_start|>assistant\\n"
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlplus.common.errors import RunFailed, one_line
from rlplus.train.data import turn_end
from rlplus.train.rollout.custom_engine import Response
from rlplus.train.rollout.environments.tool_calls import Call, parse_calls

Message = dict[str, Any]
"""A message as chat templates take it: role, content, and tool_calls of {function: {name, arguments}}."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy: its text without calls, the calls, the number of its tokens, whether it was cut."""

    content: str
    calls: list[Call]
    tokens: int
    truncated: bool


class Turns:
    """The turns of a response."""

    def __init__(self, response: Response, tokenizer: PreTrainedTokenizerBase) -> None:
        self.response = response
        self.tokenizer = tokenizer
        end = turn_end(tokenizer)
        self._end_id: int = tokenizer.eos_token_id if end is None else end
        self._end = str(tokenizer.convert_ids_to_tokens(self._end_id))
        self._rendered: str | None = None  # everything before the last turn
        self._start = 0  # the last turn's place in the response's tokens
        self._turn: Turn | None = None

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> bool:
        """Insert what came behind the last turn, so that the policy can take the next one; False if it does not fit.

        messages: all of them from the first on. RunFailed where they do not continue the response.
        """
        if self.response.truncated:
            return False
        text = self._render(messages, tools)
        if self._rendered is None:
            self._compare_prompt(text)
        else:
            inserted = self._encode_behind(self._added(text))
            if not self.response.ended:  # cut at max_turn_tokens
                inserted = [self._end_id, *inserted]
            self.response.ended = False
            self.response.insert(inserted)
        self._rendered = text
        self._start = len(self.response.tokens)
        return not self.response.ended

    def close(self, *, tools: bool) -> Turn:
        """The turn that was sampled since `open`. tools: whether its calls are to be read."""
        tokens = self.response.tokens[self._start :]
        cut = self.response.truncated or not self.response.ended
        text: str = self.tokenizer.decode(tokens if cut else tokens[:-1], skip_special_tokens=True)
        content, calls = parse_calls(text) if tools else (text, [])
        if any(self._end in json.dumps(call, ensure_ascii=False) for call in calls):
            content = text  # a rendering of the call would hide where the turn ends
            calls = []
        self._turn = Turn(content, calls, len(tokens), cut)
        return self._turn

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> str:
        if self.tokenizer.chat_template is None:
            raise RunFailed("want a tokenizer with a chat template, or model.chat_template; got none")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program, and may fail in any way
            reason = " ".join(str(error).split()) or repr(error)
            raise RunFailed(f"the chat template refuses the environment's messages: {reason}") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        """Token ids; RunFailed for a lone surrogate, which JSON can bring, and a text that the tokenizer refuses."""
        if sign := re.search("[\ud800-\udfff]", text):
            raise RunFailed(f"want text of the environment that UTF-8 can hold; got the lone surrogate {sign[0]!r}")
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # its library raises plain ones
            raise RunFailed(f"the tokenizer cannot encode the environment's text: {one_line(error)}") from error

    def _compare_prompt(self, text: str) -> None:
        """RunFailed unless the first messages are the data's prompt, behind which the response begins."""
        if self._encode(text) == list(self.response.task.prompt):
            return
        have = self.tokenizer.decode(list(self.response.task.prompt))
        same = next((i for i, (a, b) in enumerate(zip(text, have, strict=False)) if a != b), min(len(text), len(have)))
        raise RunFailed(
            "want the environment's first messages as the data's prompt, which `rlplus problems` writes, with its "
            f"tools by data.tools; behind {text[max(0, same - 40) : same]!r} the environment has "
            f"{text[same : same + 40]!r}, the data {have[same : same + 40]!r}"
        )

    def _added(self, text: str) -> str:
        """The text behind the last turn's end token. RunFailed where the text before it is not what was sampled."""
        assert self._rendered is not None
        assert self._turn is not None
        if not text.startswith(self._rendered):
            raise RunFailed(
                "the messages before the last turn changed: the environment rewrites them, or the chat template "
                "renders earlier turns differently from the last one (some drop their thinking). The policy's tokens "
                "cannot stay as they were sampled: want a model.chat_template that keeps them, or another environment"
            )
        rest = text[len(self._rendered) :]
        end = self._end
        at = -1
        for _ in range(self._turn.content.count(end) + 1):
            at = rest.find(end, at + 1)
            if at < 0:
                raise RunFailed(
                    f"want a chat template that ends the policy's messages with the end token {end!r}, as the policy "
                    f"does; its rendering of one and of what follows is {rest[:120]!r}"
                )
        if _squeezed(self._turn.content) not in _squeezed(rest[:at]):
            raise RunFailed(
                f"the chat template or the environment leaves out a part of what the policy said: "
                f"{self._turn.content[:120]!r} became {rest[:at][:120]!r} (some templates drop thinking). Want a "
                "model.chat_template that keeps it"
            )
        return rest[at + len(end) :]

    def _encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that follows the end token."""
        end = self._end
        start = self._encode(end)
        both = self._encode(end + text)
        if both[: len(start)] != start:
            raise RunFailed(f"want a tokenizer that splits text behind its end token {end!r}; this one joins them")
        return both[len(start) :]


def _squeezed(text: str) -> str:
    """Without white space, which templates change at both ends of a message and of thinking."""
    return re.sub(r"\s", "", text)


def call_message(content: str, calls: Sequence[tuple[str, str]]) -> Message:
    """The policy's message with calls of (name, arguments as JSON)."""
    functions = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }
