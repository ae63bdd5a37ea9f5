"""The tokens that end a response: those that the chat template, the model's generation settings and the tokenizer name.

Many chat models end a turn in another token than the tokenizer's `eos_token`: Gemma's in `<end_of_turn>`, Phi's in
`<|end|>`, Qwen's base models in `<|im_end|>`. Engines, evaluations, demonstrations and the exported model take the same
tokens from `find_ends`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from rlplus.common.errors import hint
from rlplus.common.textfiles import read_text
from rlplus.train.config import ModelConfig
from rlplus.train.data.prompts import RESPONSE_MARK


def find_ends(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> tuple[int, ...]:
    """The ids of the tokens that end a response: `model.end_tokens`, or all that the model in `path` (the run's) names.

    These are the end of the template's turns, what `generation_config.json` names (without it, `config.json`) and the
    tokenizer's `eos_token`, in this order. ValueError for tokens that the tokenizer or the model does not have.
    """
    settings = _read(path or model.path, "generation_config.json")
    config = _read(path or model.path, "config.json")
    if model.end_tokens is not None:
        found = [_id(tokenizer, token) for token in model.end_tokens]
    else:
        turn = turn_end(tokenizer)
        named = _ids(settings) or _ids(config)
        found = [token for token in (turn, *named, tokenizer.eos_token_id) if token is not None]
    vocabulary = _field(config, "vocab_size")
    if vocabulary is not None and (outside := [token for token in found if not 0 <= token < vocabulary]):
        whose = "the end tokens of the model's files" if model.end_tokens is None else "model.end_tokens"
        raise ValueError(
            f"{whose}: want tokens from 0 to {vocabulary - 1}, the vocabulary of {path or model.path}; got "
            f"{ends_text(tokenizer, outside)}. model.end_tokens can name others"
        )
    return tuple(dict.fromkeys(found))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the chat template ends an assistant's turn; None without such a template or token.

    It is the first token behind the message that was added to the tokenizer's vocabulary and is no white space: special
    tokens are, and some fine-tuned models add their end as one that is not special.
    """
    if not (behind := _behind_message(tokenizer)):
        return None
    found = [
        (behind.find(token.content), -len(token.content), number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and token.content in behind
    ]
    return min(found)[-1] if found else None


def demonstration_end(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], *, chat: bool) -> int:
    """The token in which demonstrations end: the template's behind chat messages, else the tokenizer's `eos_token`.

    ends: the run's; where it has neither, its first one. Empty: any.
    """
    turn = turn_end(tokenizer) if chat else None
    preferred = [token for token in (turn, tokenizer.eos_token_id) if token is not None]
    return next((token for token in preferred if not ends or token in ends), (*ends, *preferred)[0])


def ends_text(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> str:
    """The tokens and their ids, such as "<|im_end|> (2), <|endoftext|> (0)"; an id alone where it has no text."""
    texts = [(tokenizer.convert_ids_to_tokens(token), token) for token in ends]
    return ", ".join(f"{text} ({token})" if text else str(token) for text, token in texts)


def turn_warning(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> str | None:
    """A warning where the chat template ends the assistant's turn in none of the tokens; None where it does."""
    turn = turn_end(tokenizer)
    if turn in ends:
        return None
    behind = "no end token" if turn is None else ends_text(tokenizer, [turn])
    return (
        f"the chat template puts {behind} behind the assistant's turn, and responses end in "
        f"{ends_text(tokenizer, ends)} only: those of a model that learned another end run to their limit. "
        "model.end_tokens names all ends"
    )


def _behind_message(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the chat template puts behind an assistant's message; empty where it does not render one."""
    if tokenizer.chat_template is None:
        return ""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": RESPONSE_MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # foreign templates can raise anything; where it matters, `turn_warning` says that none was found
        return ""
    return str(text).rpartition(RESPONSE_MARK)[2] if RESPONSE_MARK in text else ""


def _id(tokenizer: PreTrainedTokenizerBase, token: int | str) -> int:
    if isinstance(token, int):
        return token
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        known = [added.content for added in tokenizer.added_tokens_decoder.values()]
        raise ValueError(
            f"model.end_tokens: want tokens of the tokenizer, or their ids; got {token!r}{hint(token, known)}"
        )
    number: int = vocabulary[token]
    return number


def _read(path: str | None, name: str) -> dict[str, Any]:
    """The contents of a model's file; {} where it is missing."""
    file = None if path is None else cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return {}
    text = read_text(Path(file))
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"got {type(fields).__name__}")
    except ValueError as error:
        raise ValueError(f"want a JSON object in {file}: {error}") from error
    return fields


def _field(fields: dict[str, Any], name: str) -> Any:
    """The field of a file, or of the language model in it."""
    return fields.get(name, (fields.get("text_config") or {}).get(name))


def _ids(fields: dict[str, Any]) -> list[int]:
    """The end tokens that a file names."""
    value = _field(fields, "eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in ids):
        raise ValueError(f"want eos_token_id of the model's files an integer or a list of integers; got {value!r}")
    return ids
