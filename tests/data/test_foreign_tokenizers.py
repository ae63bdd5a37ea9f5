"""Tokenizers and chat templates that cannot take the data: one line that says so, from every place that uses them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlplus.tools.init import start
from rlplus.tools.plan import make_cluster
from rlplus.train.config import DataConfig
from rlplus.train.data import byte_tokenizer, read_examples
from rlplus.train.data.prompts import RESPONSE_MARK, encode_prompts

KNOWN = {word: number for number, word in enumerate(("known", "<eos>", "prompt"))}


def without_unknown() -> PreTrainedTokenizerFast:
    """Words only, and no token for others."""
    tokenizer = Tokenizer(models.WordLevel(KNOWN, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rows(folder: Path, **row: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text(f"{json.dumps({'prompt': 'known prompt', 'answer': '1'} | row)}\n" * 40)
    return str(path)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "unheard of"}, {}),
        ({"demonstration": "unheard of"}, {"demonstration": "demonstration"}),
        ({}, {"response_prefix": "unheard of"}),
    ],
)
def test_a_word_that_the_tokenizer_has_no_token_for(row: dict[str, str], keys: dict[str, Any], tmp_path: Path) -> None:
    config = DataConfig(path=rows(tmp_path, **row), **keys)
    with pytest.raises(ValueError, match=r"^the tokenizer of '' cannot encode a text: .*Missing \[UNK\] token"):
        read_examples(config, without_unknown(), max_demonstration_length=64)


@pytest.mark.parametrize("text", [f"unheard of {RESPONSE_MARK} known", f"known {RESPONSE_MARK} unheard of"])
def test_nor_around_the_response_that_a_teacher_sees(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot encode a text: .*Missing \[UNK\] token"):
        encode_prompts([("row 1", text, None)], without_unknown(), None, around_response=True)


TEMPLATES = {
    "{% for i in range(10**9) %}{{ i }}{% endfor %}": "Range too big",
    "{{ 1 // 0 }}": "integer division or modulo by zero",
    "{{ 'a' + 1 }}": "can only concatenate str",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth exceeded",
    "{{ messages[0].x.y }}": "has no attribute 'x'",
    "{{ ''.__class__.__mro__ }}": "is unsafe",
    "{{ messages[": "unexpected 'end of template'",
}


@pytest.mark.parametrize(("template", "reason"), TEMPLATES.items())
def test_a_template_is_a_program_that_may_fail(template: str, reason: str, tmp_path: Path) -> None:
    config = DataConfig(path=rows(tmp_path), chat=True)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: the chat template refuses these messages: .*{reason}"):
        read_examples(config, with_template(template), max_demonstration_length=64)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(without_unknown(), "Missing"), *((with_template(text), "refuses these messages") for text in TEMPLATES)],
    ids=lambda value: "" if isinstance(value, str) else str(value.chat_template),
)
def test_init_refuses_them_too(
    tokenizer: PreTrainedTokenizerFast, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("rlplus.tools.init.columns.load_tokenizer", lambda *_: tokenizer)
    with pytest.raises(ValueError, match=message):
        start(str(tmp_path), rows(tmp_path, prompt="unheard of"), make_cluster(1, "24g"))
