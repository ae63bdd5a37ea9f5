"""Files, tokenizers, the order of prompts, and packing."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2Model
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from rlplus.config import DataConfig, ModelConfig, ScratchModel, load_config
from rlplus.data import (
    Example,
    LoadReport,
    MicroBatch,
    PromptSampler,
    Sample,
    byte_tokenizer,
    load_examples,
    load_tokenizer,
    pack,
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
    root = Path(__file__).parent.parent
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


ROW = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([ROW, '{"prompt": "p", \n'], r"train\.jsonl:2: invalid JSON: .* at column 16"),
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


# The order of prompts


@given(n=st.integers(1, 12), seed=st.integers(0, 5), data=st.data())
def test_sampler_epochs_are_permutations(n: int, seed: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, n))
    sampler = PromptSampler(n, batch, seed)
    drawn = [index for _ in range(4 * n) for index in sampler.next()]
    for start in range(0, len(drawn) - n + 1, n):
        assert sorted(drawn[start : start + n]) == list(range(n))


@given(n=st.integers(1, 9), before=st.integers(0, 12), seed=st.integers(0, 3), data=st.data())
def test_sampler_resumes_exactly(n: int, before: int, seed: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, n))
    sampler = PromptSampler(n, batch, seed)
    for _ in range(before):
        sampler.next()
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(n, batch, seed)
    resumed.next()
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(9)] == [sampler.next() for _ in range(9)]


def test_sampler_shuffles_by_seed_and_epoch() -> None:
    orders = {(s, e): tuple(order) for s in range(3) for e, order in enumerate(draw(PromptSampler(50, 50, s), 3))}
    assert len(set(orders.values())) == 9
    assert draw(PromptSampler(50, 50, 0), 1) == [list(orders[0, 0])]


def draw(sampler: PromptSampler, times: int) -> list[list[int]]:
    return [sampler.next() for _ in range(times)]


def test_sampler_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(
        ValueError, match=r"want a batch \(prompts_per_step\) between 1 and the number of prompts, 3; got 4"
    ):
        PromptSampler(3, 4, 0)
    sampler = PromptSampler(8, 2, 0)
    for state in ({"n": 9, "seed": 0, "drawn": 4}, {"n": 8, "seed": 1, "drawn": 4}, {"drawn": 4}):
        with pytest.raises(ValueError, match="want the state of a sampler with n 8 and seed 0"):
            sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="want drawn >= 0"):
        sampler.load_state_dict({"n": 8, "seed": 0, "drawn": -1})


# Packing


def sample(prompt: int, response: int, seed: int = 0, **fields: Any) -> Sample:
    ids = torch.randint(1, 250, (prompt + response,), generator=torch.Generator().manual_seed(seed)).tolist()
    values = {"group": 0, "external": False, "truncated": False, "engine_logprob": None} | fields
    return Sample(ids[:prompt], ids[prompt:], **values)


lengths_of_samples = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=12)


@given(lengths=lengths_of_samples, extra=st.integers(0, 40), budget=st.integers(1, 150))
def test_pack_loses_nothing(lengths: list[tuple[int, int]], extra: int, budget: int) -> None:
    row_length = max((p + r for p, r in lengths), default=1) + extra
    samples = [
        sample(
            p,
            r,
            i,
            advantage=float(i),
            external=i % 3 == 0,
            engine_logprob=None if i % 2 else [-i - j / 64 for j in range(r)],
        )
        for i, (p, r) in enumerate(lengths)
    ]
    weights = [torch.arange(len(s.response)) + 100.0 * i for i, s in enumerate(samples)]
    batches = pack(samples, weights, row_length=row_length, tokens_per_micro_batch=budget, pad_id=256)
    seen: Counter[int] = Counter()
    for batch in batches:
        count, width = batch.input_ids.shape
        assert width <= row_length
        assert count == 1 or count * width <= budget
        check_micro_batch(batch, samples, weights)
        seen.update(batch.sequence.unique().tolist())
    assert seen == Counter(range(len(samples)))  # every sample, in one micro-batch only
    assert sum(batch.tokens for batch in batches) == sum(p + r for p, r in lengths)


def check_micro_batch(batch: MicroBatch, samples: list[Sample], weights: list[torch.Tensor]) -> None:
    """Every per-token value is its sample's, and each row is whole sequences and then padding."""
    flat, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
    used = torch.zeros_like(flat, dtype=torch.bool)
    for index in batch.sequence.unique().tolist():
        own, s = batch.sequence == index, samples[index]
        assert batch.target[own].tolist() == s.response
        assert batch.token_weight[own].equal(weights[index])
        assert batch.advantage[own].eq(s.advantage).all()
        assert batch.external[own].eq(s.external).all()
        logprob = batch.engine_logprob[own]
        assert logprob.isnan().all() if s.engine_logprob is None else logprob.tolist() == s.engine_logprob
        rows = batch.rows[own].tolist()
        start = rows[0] - len(s.prompt) + 1
        end = start + len(s.prompt) + len(s.response)
        assert rows == list(range(rows[0], end - 1))
        assert flat[start:end].tolist() == [*s.prompt, *s.response]
        assert positions[start:end].tolist() == list(range(end - start))
        assert start // batch.input_ids.shape[1] == (end - 1) // batch.input_ids.shape[1]
        assert not used[start:end].any()
        used[start:end] = True
    assert batch.tokens == used.sum()
    assert flat[~used].eq(256).all()
    for row, row_used in zip(batch.position_ids, used.view_as(batch.input_ids), strict=True):
        tail = int((~row_used).sum())
        assert row_used[: len(row) - tail].all()
        assert row[len(row) - tail :].tolist() == list(range(tail))
    assert batch.rows.dtype == batch.target.dtype == batch.sequence.dtype == torch.int64
    assert batch.advantage.dtype == batch.token_weight.dtype == batch.engine_logprob.dtype == torch.float32


def test_pack_is_first_fit_decreasing_and_rows_shrink() -> None:
    samples = [sample(1, n - 1, n) for n in (3, 7, 4, 6, 2)]
    weights = [torch.ones(len(s.response)) for s in samples]
    one = pack(samples, weights, row_length=10, tokens_per_micro_batch=1000, pad_id=256)
    assert [batch.input_ids.shape for batch in one] == [(3, 10)]  # 7 + 3, 6 + 4, 2
    assert one[0].sequence.unique_consecutive().tolist() == [1, 0, 3, 2, 4]
    two = pack(samples, weights, row_length=10, tokens_per_micro_batch=20, pad_id=256)
    assert [batch.input_ids.shape for batch in two] == [(2, 10), (1, 2)]


def test_pack_refuses_what_does_not_fit() -> None:
    def refuse(match: str, *samples: Sample, weights: list[torch.Tensor] | None = None, row_length: int = 8) -> None:
        weights = [torch.ones(len(s.response)) for s in samples] if weights is None else weights
        with pytest.raises(ValueError, match=match):
            pack(samples, weights, row_length=row_length, tokens_per_micro_batch=8, pad_id=256)

    refuse(r"sample 1: want at most row_length 8 tokens; got 4 \+ 5", sample(4, 4), sample(4, 5))
    refuse("sample 0: want a prompt and a response; got 4 and 0", sample(4, 0))
    refuse("sample 0: want a prompt and a response; got 0 and 4", sample(0, 4))
    refuse(r"sample 0: want token_weight \(4,\); got \(3,\)", sample(4, 4), weights=[torch.ones(3)])
    refuse("want one token_weight for each of 1 samples; got 0", sample(4, 4), weights=[])
    refuse("sample 0: want 4 engine_logprob; got 1", sample(4, 4, engine_logprob=[0.0]))
    refuse("want row_length and tokens_per_micro_batch >= 1; got 0", row_length=0)


def test_micro_batch_moves_as_a_whole() -> None:
    (batch,) = pack([sample(2, 3)], [torch.ones(3)], row_length=8, tokens_per_micro_batch=8, pad_id=0)
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert moved.tokens == batch.tokens == 5


# Packed sequences must not see each other


def tiny_model(attention: str, **fields: Any) -> Qwen2Model:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
        attn_implementation=attention,
        **fields,
    )
    model = Qwen2Model(config)
    with torch.no_grad():  # the biases start at 0, and rotary embeddings alone would hide a wrong position from a value
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


PACKED = [sample(p, r, i) for i, (p, r) in enumerate([(5, 9), (3, 4), (1, 1), (7, 6), (2, 8), (4, 2)])]


def packed_batch() -> MicroBatch:
    weights = [torch.ones(len(s.response)) for s in PACKED]
    (batch,) = pack(PACKED, weights, row_length=24, tokens_per_micro_batch=10_000, pad_id=256)
    assert batch.input_ids.shape[0] >= 3
    assert (batch.input_ids[-1, -2:] == 256).all()  # a padding tail
    return batch


def separate_hidden(model: Qwen2Model) -> torch.Tensor:
    """Hidden states that predict the response tokens, one sequence at a time, in the micro-batch's order (N, H)."""
    parts = []
    for index in packed_batch().sequence.unique_consecutive().tolist():
        s = PACKED[index]
        ids = torch.tensor([[*s.prompt, *s.response]])
        parts.append(model(input_ids=ids).last_hidden_state[0, len(s.prompt) - 1 : -1])
    return torch.cat(parts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("train", [False, True])
def test_packed_sequences_do_not_see_each_other(attention: str, layout: str, train: bool) -> None:
    """Also as the one long row that flash attention gets: it hides the same positions."""
    model = tiny_model(attention).train(train)
    batch = packed_batch()
    hidden = model(**batch.model_inputs(layout)).last_hidden_state.flatten(0, 1)[batch.rows]
    torch.testing.assert_close(hidden, separate_hidden(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_gradients_equal_separate_ones_under_gradient_checkpointing(attention: str) -> None:
    model = tiny_model(attention).train()
    batch = packed_batch()
    direction = torch.randn(len(batch.rows), 32)
    (separate_hidden(model) * direction).sum().backward()
    separate = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hidden = model(**batch.model_inputs(attention)).last_hidden_state.flatten(0, 1)[batch.rows]
    (hidden * direction).sum().backward()
    packed = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(packed) == len(separate) > 20
    for ours, theirs in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("change", [{"use_cache": True}, {"attention_mask": torch.ones(3, 24, dtype=torch.int64)}])
def test_a_cache_or_a_mask_would_let_sequences_see_each_other(change: dict[str, Any]) -> None:
    """Why `model_inputs` sets both; when this fails, the library has become safer."""
    model = tiny_model("sdpa").eval()
    batch = packed_batch()
    if "attention_mask" in change:
        change = {"attention_mask": torch.ones_like(batch.input_ids)}
    hidden = model(**batch.model_inputs("sdpa") | change).last_hidden_state.flatten(0, 1)[batch.rows]
    assert (hidden - separate_hidden(model)).abs().max() > 0.1


def test_flash_attention_gets_the_sequences_boundaries() -> None:
    inputs = packed_batch().model_inputs("flash_attention_2")
    assert inputs["input_ids"].shape[0] == 1  # the library looks for boundaries only then
    (boundaries, _), _ = prepare_fa_kwargs_from_position_ids(inputs["position_ids"])
    starts = [i for i, position in enumerate(inputs["position_ids"][0].tolist()) if position == 0]
    assert boundaries.tolist() == [*starts, inputs["input_ids"].shape[1]]
