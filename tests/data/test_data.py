"""Files, tokenizers, the order of prompts, and packing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlplus.train.config import DataConfig, ModelConfig, ScratchModel, load_config
from rlplus.train.data import (
    Example,
    LoadReport,
    byte_tokenizer,
    distinct,
    load_examples,
    load_tokenizer,
    response_text,
)

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
GSM8K = [
    {"question": "What is 60 + 12?", "answer": "60 + 12 = <<60+12=72>>72.\nSo 72.\n#### 72"},
    {"question": "What is 1000 + 600?", "answer": "It is 1,600.\n#### 1,600"},
]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows to a JSONL or Parquet file, by its name, and returns its path."""

    def write_rows(rows: list[Any], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


def load(limit_tokens: int = 1000, tokenizer: Any = TOKENIZER, **fields: Any) -> tuple[list[Example], LoadReport]:
    return load_examples(DataConfig(**fields), tokenizer, max_demonstration_length=limit_tokens)


def text(ids: tuple[int, ...] | None) -> str:
    assert ids is not None
    return TOKENIZER.decode(ids)


# Tokenizers


def test_ids_may_have_gaps(write: Write) -> None:
    """Ids beyond the number of tokens: a vocabulary need not number its tokens without one."""
    tokenizer = Tokenizer(models.WordLevel({"1": 7, "<eos>": 900, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    path = write([{"prompt": "1 1", "answer": "x", "demonstration": "1"}])
    (example,), _ = load(tokenizer=fast, path=path, demonstration="demonstration")
    assert (example.prompt, example.demonstration) == ((7, 7), (7, 900))


@given(st.text())
def test_byte_tokenizer_is_utf8(string: str) -> None:
    ids = TOKENIZER(string).input_ids
    assert ids == list(string.encode())
    assert TOKENIZER.decode(ids) == string
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == string


def test_byte_tokenizer_special_tokens_are_ids_only(tmp_path: Path) -> None:
    assert (TOKENIZER.pad_token_id, EOS, len(TOKENIZER)) == (256, 257, 258)
    spelled = "a<|endoftext|>b<|pad|> . ,  é"
    TOKENIZER.save_pretrained(tmp_path)
    for tokenizer in (
        TOKENIZER,
        AutoTokenizer.from_pretrained(tmp_path),
        load_tokenizer(ModelConfig(path=str(tmp_path))),
    ):
        assert tokenizer(spelled).input_ids == list(spelled.encode())
        assert tokenizer.decode(tokenizer(spelled).input_ids) == spelled
        assert tokenizer.decode([97, EOS], skip_special_tokens=True) == "a"
        assert tokenizer.chat_template == TOKENIZER.chat_template


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "what": 2, "two": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)


def test_load_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(ModelConfig(scratch=ScratchModel())).get_vocab() == TOKENIZER.get_vocab()
    word_tokenizer(eos_token="</s>").save_pretrained(tmp_path / "no_pad")
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "no_pad"))).pad_token_id == 1
    word_tokenizer().save_pretrained(tmp_path / "no_eos")
    with pytest.raises(ValueError, match="end token"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "no_eos")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model.path '.*empty'"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "empty")))


# Files


def test_gsm8k_layout_through_the_shipped_configuration(write: Write) -> None:
    root = Path(__file__).parents[2]
    config = load_config(root / "configs" / "gsm8k-tiny.yaml", [f"data.path={write(GSM8K)}"])
    examples, report = load_examples(config.data, TOKENIZER, max_demonstration_length=config.max_demonstration_length)
    assert [example.answer for example in examples] == ["72", "1,600"]
    assert [example.index for example in examples] == [0, 1]
    assert text(examples[0].prompt) == "<|user|>\nWhat is 60 + 12?\n<|assistant|>\n"
    assert text(examples[0].demonstration) == (
        "<think>\n60 + 12 = <<60+12=72>>72.\nSo 72.\n</think>\nThe answer is \\boxed{72}.<|endoftext|>"
    )
    assert (report.rows, report.kept, report.demonstrations) == (2, 2, 2)
    assert report.summary() == "2 rows, 2 kept, 2 demonstrations"


def test_verl_layout(write: Write) -> None:
    rows = [
        {
            "data_source": "aime",
            "prompt": [{"content": "Think.", "role": "system"}, {"content": question, "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "target": [{"role": "assistant", "content": f" {answer}!"}],
        }
        for question, answer in [("q1", "204"), ("q2", "C")]
    ]
    paths = [write(rows, "a.parquet"), write(rows, "b.jsonl")]
    examples, _ = load(path=paths, answer="reward_model.ground_truth", demonstration="target")
    assert [example.answer for example in examples] == ["204", "C"] * 2
    assert [example.index for example in examples] == [0, 1, 2, 3]
    assert text(examples[3].prompt) == "<|system|>\nThink.\n<|user|>\nq2\n<|assistant|>\n"
    assert text(examples[3].demonstration) == " C!<|endoftext|>"  # white space is part of a demonstration
    limited, report = load(path=paths, answer="reward_model.ground_truth", limit=3)
    assert [example.prompt for example in limited] == [example.prompt for example in examples[:3]]
    assert (report.rows, limited[0].demonstration) == (3, None)


def test_plain_prompt_uses_default_special_tokens_and_a_demonstration_none(write: Write) -> None:
    class Prefixing:
        """Puts token 7 before a text unless special tokens are off, as tokenizers with a begin token do."""

        eos_token_id = EOS
        chat_template = None
        name_or_path = "prefixing"

        def __len__(self) -> int:
            return len(TOKENIZER)

        def __call__(self, texts: list[str], add_special_tokens: bool = True) -> Any:
            encoded = TOKENIZER(texts)
            encoded["input_ids"] = [[7] * add_special_tokens + ids for ids in encoded["input_ids"]]
            return encoded

    path = write([{"prompt": "ab", "answer": 5, "demonstration": "cd"}])
    (example,), _ = load(tokenizer=Prefixing(), path=path, demonstration="demonstration")
    assert example == Example(0, (7, 97, 98), "5", (99, 100, EOS))
    with pytest.raises(ValueError, match=r"train.jsonl:1: chat messages need a chat template.*'prefixing' has none"):
        load(tokenizer=Prefixing(), path=path, chat=True)


def test_end_token_is_not_doubled(write: Write) -> None:
    words = word_tokenizer(eos_token="</s>")
    path = write([{"prompt": "what", "answer": "2", "d": "two </s>"}, {"prompt": "what", "answer": "2", "d": "two"}])
    examples, _ = load(tokenizer=words, path=path, demonstration="d")
    assert [example.demonstration for example in examples] == [(3, 1), (3, 1)]


def test_system_prompt(write: Write) -> None:
    plain = write([{"prompt": "hi", "answer": "x"}])
    (example,), _ = load(path=plain, chat=True, system_prompt="Be brief.")
    assert text(example.prompt) == "<|system|>\nBe brief.\n<|user|>\nhi\n<|assistant|>\n"
    with pytest.raises(ValueError, match=r"train.jsonl:1: data.system_prompt wants chat messages"):
        load(path=plain, system_prompt="Be brief.")
    chat = write([{"prompt": [{"role": "system", "content": "s"}], "answer": "x"}])
    with pytest.raises(ValueError, match="has a system message already"):
        load(path=chat, system_prompt="Be brief.")


def test_template_that_refuses_the_messages(write: Write) -> None:
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"train.jsonl:1: .* refuses these messages: no system role"):
        load(tokenizer=strict, path=write([{"prompt": "hi", "answer": "x"}]), chat=True)


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_columns_for_reward_functions(write: Write, name: str) -> None:
    rows = [{"prompt": "p", "answer": "1", "info": {"level": i, "tags": ["a"]}, "source": "s"} for i in range(2)]
    examples, _ = load(path=write(rows, name), columns=["info.level", "info.tags", "source"])
    assert [e.columns for e in examples] == [{"level": i, "tags": ["a"], "source": "s"} for i in range(2)]
    with pytest.raises(ValueError, match=r"want a column 'info.kind'; got .*; nearest: info"):
        load(path=write(rows, name), columns=["info.kind"])
    for wrong in (["a.x", "b.x"], ["a.text"], ["answer"]):
        with pytest.raises(ValueError, match="want columns whose last parts differ, and none text or answer"):
            DataConfig(path="x.jsonl", columns=wrong)


def test_response_prefix_moves_from_demonstrations_to_prompts(write: Write) -> None:
    solutions = ["<think>\na</think>7", " \n<think>\nb", "c <think>\n", "<think>\n \n", None]
    path = write([{"prompt": "p", "answer": "7", "solution": solution} for solution in solutions])
    fields: dict[str, Any] = {"path": path, "demonstration": "solution", "response_prefix": "<think>\n"}
    examples, report = load(**fields)
    assert [text(e.prompt) for e in examples] == ["p<think>\n"] * 5
    assert [e.demonstration and text(e.demonstration[:-1]) for e in examples] == [
        "a</think>7", "b", "c <think>\n", None, None,
    ]  # fmt: skip
    assert (report.demonstrations, report.demonstrations_missing, report.demonstrations_unprefixed) == (3, 2, 1)
    assert "1 demonstrations that did not start with data.response_prefix, kept whole (first: " in report.summary()
    assert [response_text(TOKENIZER, e.demonstration or (), "<think>\n") for e in examples[:2]] == [
        "<think>\na</think>7", "<think>\nb",
    ]  # fmt: skip
    assert response_text(TOKENIZER, [97, EOS], None) == "a"
    lengths = [e.demonstration and len(e.demonstration) for e in load(11, **fields)[0]]
    assert lengths == [11, 2, 11, None, None]  # counts stripped tokens
    assert len(load(**fields, max_prompt_length=9)[0]) == 5
    with pytest.raises(ValueError, match=r"100.0% of the rows would be dropped.*prompts longer than 8 tokens"):
        load(**fields, max_prompt_length=8)


def test_response_prefix_is_tokens_of_its_own(write: Write) -> None:
    """ "whattwo" is unknown to this tokenizer."""
    path = write([{"prompt": "what", "answer": "2", "d": "twowhat"}])
    (example,), _ = load(
        tokenizer=word_tokenizer(eos_token="</s>"), path=path, demonstration="d", response_prefix="two"
    )
    assert (example.prompt, example.demonstration) == ((2, 3), (2, 1))
    with pytest.raises(ValueError, match=r"want data.response_prefix of at least one token; got ' '"):
        load(tokenizer=word_tokenizer(eos_token="</s>"), path=path, response_prefix=" ")


def test_the_papers_prompts_end_in_one_prefix_with_either_template(write: Write) -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "qwen2.5-math-7b.yaml")
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
    path = write([{"prompt": messages, "answer": 2}])
    chat = "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    ours = load_tokenizer(ModelConfig(scratch=ScratchModel(), chat_template=config.model.chat_template))
    stock = load_tokenizer(ModelConfig(scratch=ScratchModel(), chat_template=config.model.chat_template))
    stock.chat_template = stock.chat_template.replace("<think>\\n", "")
    for tokenizer in (ours, stock):
        (example,), _ = load(tokenizer=tokenizer, path=path, response_prefix=config.data.response_prefix)
        assert text(example.prompt) == chat + "<think>\n"
    (example,), _ = load(tokenizer=stock, path=path)
    assert text(example.prompt) == chat


def test_chat_template_of_the_configuration(write: Write, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    template = "{{ messages[0].content }}>"
    (tmp_path / "chat.jinja").write_text(template + "\n")  # Jinja leaves out the newline that ends a file
    path = write([{"prompt": "é", "answer": "x"}])
    for model in ({"path": str(tmp_path / "model")}, {"scratch": ScratchModel()}):
        for choice in (template, str(tmp_path / "chat.jinja")):
            tokenizer = load_tokenizer(ModelConfig(**model, chat_template=choice))
            (example,), _ = load(tokenizer=tokenizer, path=path, chat=True)
            assert text(example.prompt) == "é>"
    (tmp_path / "none.jinja").write_text("no braces")
    (tmp_path / "latin.jinja").write_bytes(b"{{ \xe9 }}")
    for choice, match in [
        (str(tmp_path / "nowhere.jinja"), r"want model.chat_template .*nowhere.jinja': no such file \(current"),
        (str(tmp_path), "it is a folder"),
        (str(tmp_path / "none.jinja"), "the file has none of Jinja's braces"),
        (str(tmp_path / "latin.jinja"), "not UTF-8 text"),
    ]:
        with pytest.raises(ValueError, match=match):
            load_tokenizer(ModelConfig(scratch=ScratchModel(), chat_template=choice))
    wrong = load_tokenizer(ModelConfig(scratch=ScratchModel(), chat_template="{{ messages["))
    with pytest.raises(ValueError, match=r"train.jsonl:1: the chat template refuses these messages: "):
        load(tokenizer=wrong, path=path, chat=True)


def test_rows_with_the_same_benchmark_prompt_and_answer_are_one_problem(write: Write) -> None:
    rows = [("a", "p", "1"), ("a", "q", "1"), ("a", "p", "1"), ("b", "p", "1"), ("a", "p", "2"), ("a", "p", "1")]
    path = write([{"source": source, "prompt": prompt, "answer": answer} for source, prompt, answer in rows])
    examples, _ = load(path=path, benchmark="source")
    merged = distinct(examples)
    assert [(e.index, e.benchmark, text(e.prompt), e.answer, e.rows) for e in merged] == [
        (0, "a", "p", "1", 3), (1, "a", "q", "1", 1), (3, "b", "p", "1", 1), (4, "a", "p", "2", 1),
    ]  # fmt: skip
    assert distinct([*merged, examples[0]])[0].rows == 4


ROW = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([ROW, '{"prompt": "p", \n'], r"train\.jsonl:2: invalid JSON: .* at column 16"),
        ([ROW, f'{{"prompt": {"9" * 5000}}}\n'], r"train\.jsonl:2: invalid JSON: Exceeds the limit"),
        ([ROW, "\n", "[1]\n"], r"train\.jsonl:3: want a JSON object; got list"),
        (
            [ROW, {"promt": "p", "answer": "a"}],
            r"train\.jsonl:2: want a column 'prompt'; got promt, answer; nearest: promt",
        ),
        (
            [{"prompt": None, "answer": "a"}],
            r"train\.jsonl:1: want the prompt as a string or as chat messages .*got None",
        ),
        ([{"prompt": " ", "answer": "a"}], "want the prompt as a string"),
        ([{"prompt": [], "answer": "a"}], "want the prompt as a string"),
        ([{"prompt": [{"role": "user"}], "answer": "a"}], "want the prompt as a string"),
        ([{"prompt": "p", "answer": ["a", "b"]}], r"want the answer as a string or a number; got \['a', 'b'\]"),
        ([{"prompt": "p", "answer": True}], "want the answer as a string or a number; got True"),
        ([], "want at least one row; got 0 rows"),
    ],
)
def test_malformed_rows_are_named(write: Write, rows: list[Any], match: str) -> None:
    path = write(rows)
    with pytest.raises(ValueError, match=match):
        load(path=path)


def test_missing_columns_name_the_nearest(write: Write) -> None:
    rows = [{"prompt": "p", "reward_model": {"ground_truth": "a"}, "solution": "s"}]
    for name in ("x.jsonl", "x.parquet"):
        path = write(rows, name)
        with pytest.raises(ValueError, match=r"'reward_model.groundtruth'; got .*; nearest: reward_model.ground_truth"):
            load(path=path, answer="reward_model.groundtruth")
        with pytest.raises(ValueError, match=r"want a column 'solutions'; got .*; nearest: solution"):
            load(path=path, answer="reward_model.ground_truth", demonstration="solutions")


def test_bad_files(write: Write, tmp_path: Path) -> None:
    good = write([ROW])
    with pytest.raises(ValueError, match=r"data.path .*none\.jsonl: no such file \(current directory"):
        load(path=[good, str(tmp_path / "none.jsonl")])
    with pytest.raises(ValueError, match="it is a folder"):
        load(path=str(tmp_path))
    (tmp_path / "data.csv").write_text("prompt,answer\n")
    with pytest.raises(ValueError, match=r"end in \.jsonl or \.parquet"):
        load(path=str(tmp_path / "data.csv"))
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"text\.parquet: not a readable Parquet file"):
        load(path=str(tmp_path / "text.parquet"))
    (tmp_path / "latin.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "p", "answer": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl:2: want UTF-8"):
        load(path=str(tmp_path / "latin.jsonl"))


# Limits: dropped and counted, never cut


def test_long_prompts_and_demonstrations_are_dropped_and_counted(write: Write) -> None:
    rows = [
        {"prompt": "p" * n, "answer": "a", "solution": "s" * m}
        for n, m in [(5, 9), (6, 1), (5, 10), (1, 1), (2, 2), (3, 0)]
    ]
    fields = {"path": write(rows), "demonstration": "solution", "max_prompt_length": 5}
    examples, report = load(10, **fields, max_dropped_share=0.25)
    assert [example.index for example in examples] == [0, 2, 3, 4, 5]
    lengths = [example.demonstration and len(example.demonstration) for example in examples]
    assert lengths == [10, None, 2, 3, None]  # nine bytes and the end token just fit
    assert (report.prompts_too_long, report.demonstrations_too_long, report.demonstrations_missing) == (1, 1, 1)
    assert (report.rows, report.kept, report.demonstrations) == (6, 5, 3)
    assert report.dropped_share == 1 / 6
    assert report.dropped_demonstration_share == 1 / 4
    assert "1 prompts longer than 5 tokens (first: " in report.summary()
    assert "train.jsonl:2" in report.summary()
    with pytest.raises(ValueError, match=r"25.0% of the demonstrations would be dropped.*allows 20.0%: 6 rows, 5 kept"):
        load(10, **fields, max_dropped_share=0.2)
    with pytest.raises(ValueError, match=r"16.7% of the rows would be dropped.*prompts longer than 5 tokens"):
        load(10, **fields, max_dropped_share=0.1)
    with pytest.raises(ValueError, match="want at least one row; got 6 rows, 0 kept"):
        load(10, path=fields["path"], answer_pattern="(b)", max_dropped_share=1.0)
    with pytest.raises(ValueError, match="want demonstrations in column 'solution'"):
        load(1, **fields, max_dropped_share=1.0)


def test_unmatched_patterns_are_counted(write: Write) -> None:
    rows = [{"question": f"q{i}", "answer": f"work\n#### {i} "} for i in range(8)]
    rows[3]["answer"] = "no final line"
    rows[5]["answer"] = "\n#### 5"
    fields: dict[str, Any] = {
        "path": write(rows),
        "prompt": "question",
        "answer_pattern": r"####\s*(.+)$",
        "demonstration": "answer",
        "demonstration_pattern": r"(?s)^(.*\w)\s*####",
    }
    examples, report = load(**fields, max_dropped_share=0.2)
    assert [example.answer for example in examples] == ["0", "1", "2", "4", "5", "6", "7"]
    assert [example.demonstration is None for example in examples] == [False] * 4 + [True] + [False] * 2
    assert (report.answers_missing, report.demonstrations_unmatched, report.demonstrations) == (1, 1, 6)
    with pytest.raises(ValueError, match=r"12.5% of the rows would be dropped.*not matched.*train.jsonl:4"):
        load(**fields)
