"""Prompts: chat messages or text in, token ids out; and the templates with which base models are evaluated."""

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlplus.train.config import DataConfig
from rlplus.train.data.tokenizer import encode

Prompt = str | list[dict[str, str]]
Tools = list[dict[str, Any]]
RESPONSE_MARK = "\ufdd0"  # no character of any text: the place of a response
RESPONSE_ID = -1  # and no token
ANSWERING = ("assistant", "model", "gpt", "bot")  # data sets' roles of the one who answers

# Copies of eval_scripts/generate_vllm.py of github.com/ElliottYan/LUFFY, to the letter: simplerl's braces too.
TEMPLATES = {
    "qwen": "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
    "simplerl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{question}\n"
    "Please reason step by step, and put your final answer within\\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n",
    "prime": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
    "assistant first thinks about the reasoning process in the mind and then provides the user with the answer. The "
    "reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {question}\n\n"
    "Present the answer in LaTex format: \\boxed{Your answer}. Assistant:",
    "none": "{question}",
}


def make_prompt(config: DataConfig, where: str, value: Any) -> Prompt:
    """The prompt of a row from its column's value. ValueError, with the place, if it is no prompt."""
    if config.template != "own":
        return TEMPLATES[config.template].replace("{question}", _question(where, value))
    if isinstance(value, str) and value.strip():
        if _is_json_of_messages(value):
            raise ValueError(f"{where}: want chat messages as a list; got its JSON as a text: {value[:80]!r}")
        if not config.chat:
            if config.system_prompt is not None:
                raise ValueError(f"{where}: data.system_prompt wants chat messages, or data.chat true; got plain text")
            return value
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value and all(_is_message(message) for message in value):
        messages = [{"role": message["role"], "content": message["content"]} for message in value]
    else:
        raise ValueError(f"{where}: want the prompt as a string or as chat messages {{role, content}}; got {value!r}")
    if messages[-1]["role"].casefold() in ANSWERING:
        raise ValueError(
            f"{where}: want chat messages whose last one is a user's or a tool's; got an assistant's, which the model "
            f"would see in its prompt: {messages[-1]['content'][:80]!r}. A solution goes into a column of its own, "
            "data.demonstration, and what every response starts with is data.response_prefix"
        )
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ValueError(f"{where}: the prompt has a system message already: leave data.system_prompt out")
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def make_tools(where: str, value: Any, prompt: Prompt) -> Tools | None:
    """A row's tools from its column's value, None if it has none. ValueError, with the place, if they are no tools."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{where}: want the tools as a list or its JSON; got {value!r} ({error})") from error
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise ValueError(f"{where}: want the tools as a list of definitions; got {value!r}")
    if tools and isinstance(prompt, str):
        raise ValueError(f"{where}: tools want chat messages, or data.chat true; got plain text")
    return tools or None


def with_demonstration(value: Any, template: str, demonstration: str) -> Any:
    """The value of a prompt's column with its text, or its last message's, in the template."""
    if isinstance(value, str):
        return template.format(prompt=value, demonstration=demonstration)
    *before, last = value
    return [*before, last | {"content": template.format(prompt=last["content"], demonstration=demonstration)}]


def _question(where: str, value: Any) -> str:
    """The text, or the only user message's: a template replaces system messages."""
    if isinstance(value, str) and value.strip():
        return value
    users = [m for m in value if _is_message(m) and m["role"] != "system"] if isinstance(value, list) else []
    if len(users) != 1 or users[0]["role"] != "user":
        raise ValueError(f"{where}: data.template wants a prompt that is text or has one user message; got {value!r}")
    return users[0]["content"]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _is_json_of_messages(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def encode_prompts(
    prompts: Sequence[tuple[str, Prompt, Tools | None]],
    tokenizer: PreTrainedTokenizerBase,
    prefix: str | None,
    around_response: bool = False,
) -> list[list[int]]:
    """Token ids of (place, prompt, tools), ending in the prefix. ValueError, with the place, for what does not fit.

    around_response: each prompt has RESPONSE_MARK once, in whose place RESPONSE_ID stands, behind the prefix.
    """
    plain = [] if around_response else [prompt for _, prompt, _ in prompts if isinstance(prompt, str)]
    texts = iter(encode(tokenizer, plain, special=True))
    end = [] if prefix is None else encode(tokenizer, [prefix])[0]
    if prefix is not None and not end:
        raise ValueError(f"want data.response_prefix of at least one token; got {prefix!r}")

    def ending(ids: list[int]) -> list[int]:
        # A chat template may end in the prefix itself, in any tokens, each of at least one byte.
        if prefix is None or not ids or tokenizer.decode(ids[-len(prefix.encode()) :]).endswith(prefix):
            return ids
        return [*ids, *end]

    encoded = []
    for where, prompt, tools in prompts:
        if around_response:
            before, behind = _around_response(where, prompt, tools, tokenizer, prefix)
            encoded.append([*before, RESPONSE_ID, *(ending(behind) or end)])
        elif isinstance(prompt, str):
            encoded.append(ending(next(texts)))
        else:
            encoded.append(ending(list(_in_chat(where, prompt, tools, tokenizer))))
    return encoded


def _around_response(
    where: str, prompt: Prompt, tools: Tools | None, tokenizer: PreTrainedTokenizerBase, prefix: str | None
) -> tuple[list[int], list[int]]:
    """Token ids before the place of a response, with the prefix, and behind it."""
    plain = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else _in_chat(where, prompt, tools, tokenizer, tokenize=False)
    parts = text.split(RESPONSE_MARK)
    if len(parts) != 2:
        raise ValueError(
            f"{where}: want one place for the response that a teacher sees, {{demonstration}} of "
            f"algorithm.recipe.template, in the prompt that the chat template makes; got {len(parts) - 1}"
        )
    before = encode(tokenizer, [parts[0] + (prefix or "")], special=plain)[0]
    return before, encode(tokenizer, [parts[1]])[0]


def with_response(prompt: Sequence[int], response: Sequence[int]) -> list[int]:
    """The prompt with the response in the place of RESPONSE_ID."""
    place = prompt.index(RESPONSE_ID)
    return [*prompt[:place], *response, *prompt[place + 1 :]]


def _in_chat(
    where: str,
    messages: list[dict[str, str]],
    tools: Tools | None,
    tokenizer: PreTrainedTokenizerBase,
    tokenize: bool = True,
) -> Any:
    """Token ids of the messages in the chat template, or its text."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where}: chat messages need a chat template, and the tokenizer of {tokenizer.name_or_path!r} has none"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, tokenize=tokenize
        )
    except Exception as error:  # a template is a program: it divides by zero, or calls itself without end
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"{where}: the chat template refuses these messages: {reason}") from error
