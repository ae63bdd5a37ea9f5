"""The tokens that end a response: found in the forms of published templates, named by a key, in demonstrations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, FORGETFUL, TURNS
from ending_models import END_OF_TURN, EOS, GEMMA, turn_tokenizer, write_chat_model
from tokenizers import AddedToken

from rlplus.train.config import DataConfig, EvaluationConfig, ModelConfig
from rlplus.train.data import (
    byte_tokenizer,
    ends_text,
    find_ends,
    load_examples,
    load_problems,
    load_tokenizer,
    response_text,
    turn_end,
    turn_warning,
)

PHI = (  # Phi-3.5's: behind the last turn stands the eos, too
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA = "{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
GLM = "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"  # a turn ends where another begins
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"
)
STRICT = "{% for m in messages %}{{ raise_exception('want a system message') }}{% endfor %}"


def tokenizer_of(template: str | None, tokens: Sequence[str], *, special: bool = True) -> Any:
    """Bytes, <|pad|> 256, <|endoftext|> 257, and these from 258 on."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.add_tokens([AddedToken(each, special=special) for each in tokens])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "tokens", "end"),
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (FORGETFUL, ["<|im_start|>", "<|im_end|>", "</think>"], "<|im_end|>"),
        (GEMMA, ["<start_of_turn>", "<end_of_turn>", "\n\n"], "<end_of_turn>"),
        (GEMMA.replace("<end", "\n\n<end"), ["<end_of_turn>", "\n\n"], "<end_of_turn>"),
        (PHI, ["<|user|>", "<|assistant|>", "<|end|>"], "<|end|>"),
        (LLAMA, ["<|start|>", "<|stop|>", "<|eot_id|>", "<|eom_id|>"], "<|eot_id|>"),
        (LLAMA2, ["[INST]", "[/INST]"], "<|endoftext|>"),
        (TURNS, [], "<|endoftext|>"),
        (HARMONY, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"], "<|return|>"),
        (LLAMA, ["<|eot_id", "<|eot_id|>"], "<|eot_id|>"),
        (GLM, ["[gMASK]", "<|user|>", "<|assistant|>"], None),
        (STRICT, ["<|im_end|>"], None),
        ("{{ messages[0].content }}<|im_end|>", ["<|im_end|>"], None),  # it shows no assistant
        (None, ["<|im_end|>"], None),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_turn(template: str | None, tokens: list[str], end: str | None, special: bool) -> None:
    """Also where the end is an added token that is not special, as in some fine-tuned models."""
    tokenizer = tokenizer_of(template, tokens, special=special)
    found = turn_end(tokenizer)
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == end


def model_files(folder: Path, generation: Any, **config: Any) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("template", "generation", "config", "ends"),
    [
        (GEMMA, {"eos_token_id": [1, 258]}, {"vocab_size": 260}, (258, 1, 257)),
        (GEMMA, {"eos_token_id": 1}, {"eos_token_id": 2}, (258, 1, 257)),
        (GEMMA, {"temperature": 0.6}, {"eos_token_id": 2}, (258, 2, 257)),
        (GEMMA, None, {"text_config": {"eos_token_id": [3, 257]}}, (258, 3, 257)),
        (GEMMA, None, {}, (258, 257)),
        (None, {"eos_token_id": [1, 258]}, {}, (1, 258, 257)),
        (None, None, {}, (257,)),
    ],
)
def test_all_that_the_model_names(
    template: str | None, generation: Any, config: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    assert find_ends(model_files(tmp_path, generation, **config), turn_tokenizer(template)) == ends


def test_a_model_made_on_the_spot_and_one_in_another_place(tmp_path: Path) -> None:
    scratch = ModelConfig.model_validate({"scratch": {}})
    assert find_ends(scratch, load_tokenizer(scratch)) == (EOS,)
    place = model_files(tmp_path / "trained", {"eos_token_id": 9}).path
    other = model_files(tmp_path / "start", {"eos_token_id": 8})
    assert find_ends(other, turn_tokenizer(None), place) == (9, EOS)


def test_named_tokens_replace_the_found_ones(tmp_path: Path) -> None:
    model, tokenizer = model_files(tmp_path, {"eos_token_id": [1, 258]}, vocab_size=260), turn_tokenizer()

    def named(*tokens: str | int) -> tuple[int, ...]:
        return find_ends(model.model_copy(update={"end_tokens": [*tokens]}), tokenizer)

    assert named("<|endoftext|>") == (EOS,)
    assert named(65, "<end_of_turn>", 65) == (65, END_OF_TURN)
    with pytest.raises(ValueError, match=r"model\.end_tokens: .* got '<end_of_tur>'; nearest: <end_of_turn>"):
        named("<end_of_tur>")
    with pytest.raises(ValueError, match=r"model\.end_tokens: want tokens from 0 to 259, .*; got 260\."):
        named(EOS, 260)
    for wrong in ([], [""], [-1], [True], "<end_of_turn>"):
        with pytest.raises(ValueError, match="end_tokens"):
            ModelConfig.model_validate({"path": "model", "end_tokens": wrong})


@pytest.mark.parametrize(
    ("generation", "config", "message"),
    [
        ({"eos_token_id": [257, 300]}, {"vocab_size": 260}, r"files: want tokens from 0 to 259, .*; got 300\. model"),
        (None, {"text_config": {"vocab_size": 258}}, r"0 to 257, .*; got <end_of_turn> \(258\)\. model.end_tokens can"),
        ({"eos_token_id": "<eos>"}, {}, "want eos_token_id .* an integer or a list of integers; got '<eos>'"),
        ([], {}, "want a JSON object in .*generation_config.json: got list"),
    ],
)
def test_ends_that_no_model_can_sample_are_refused(
    generation: Any, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        find_ends(model_files(tmp_path, generation, **config), turn_tokenizer())


ROWS = [
    {"prompt": [{"role": "user", "content": "a"}], "answer": "7", "demonstration": "<7>"},
    {"prompt": "a", "answer": "7", "demonstration": "<7>"},
    {"prompt": [{"role": "user", "content": "a"}], "answer": "7", "demonstration": "<7><end_of_turn>"},
    {"prompt": [{"role": "user", "content": "a"}], "answer": "7", "demonstration": "<7><|endoftext|>"},
]


@pytest.mark.parametrize(
    ("ends", "last"),
    [
        ((), [[258], [257], [258], [257]]),
        ((258, 257), [[258], [257], [258], [257]]),
        ((257,), [[257], [257], [258, 257], [257]]),  # a run that began before the template's end was looked for
        ((65, 258), [[258], [65], [258], [257, 258]]),
        ((65,), [[65], [65], [258, 65], [257, 65]]),
    ],
)
def test_demonstrations_end_as_the_template_does_behind_chat_messages(
    ends: tuple[int, ...], last: list[list[int]], tmp_path: Path
) -> None:
    """And in the tokenizer's eos behind plain text; a text that has an end of the run already gets no second one."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = DataConfig(path=str(path), demonstration="demonstration", max_prompt_length=64)
    examples, _ = load_examples(data, turn_tokenizer(), max_demonstration_length=9, ends=ends)
    assert [example.demonstration for example in examples] == [(*b"<7>", *behind) for behind in last]


def test_the_text_of_a_response_has_no_end_token() -> None:
    """Neither one that is special, nor another; what stands before the last place is the response's own."""
    tokenizer, ends = turn_tokenizer(special=False), (END_OF_TURN, EOS, 33)
    for end in ends:
        assert response_text(tokenizer, [*b"a!b", end], "<", ends) == "<a!b"
    assert response_text(tokenizer, [*b"a!b"], None, ends) == "a!b"
    assert response_text(tokenizer, [END_OF_TURN], None, ends) == ""
    assert response_text(tokenizer, [], None, ends) == ""


def test_a_turn_that_ends_in_none_of_the_tokens_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert turn_warning(turn_tokenizer(), [EOS, END_OF_TURN]) is None
    said = turn_warning(turn_tokenizer(), [EOS])
    assert said is not None
    assert said.startswith("the chat template puts <end_of_turn> (258) behind the assistant's turn, and responses end")
    assert "in <|endoftext|> (257) only" in said
    said = turn_warning(turn_tokenizer(GLM), [EOS])
    assert said is not None
    assert said.startswith("the chat template puts no end token behind")
    path = tmp_path / "rows.jsonl"
    for row, warned in ((ROWS[1], False), (ROWS[0], True)):
        path.write_text(json.dumps(row) + "\n")
        section = EvaluationConfig(data=DataConfig(path=str(path), max_prompt_length=64))
        for ends, expected in (([EOS], warned), ([EOS, END_OF_TURN], False), (None, False)):
            caplog.clear()
            load_problems(section, turn_tokenizer(), ends=ends)
            assert any("puts <end_of_turn>" in each.getMessage() for each in caplog.records) == expected


def test_the_ends_as_text(tmp_path: Path) -> None:
    assert ends_text(turn_tokenizer(), [END_OF_TURN, 300]) == "<end_of_turn> (258), 300"
    folder = write_chat_model(tmp_path)
    model = ModelConfig(path=str(folder))
    assert find_ends(model, load_tokenizer(model)) == (END_OF_TURN, EOS)
