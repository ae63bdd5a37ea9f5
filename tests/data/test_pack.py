"""The order of prompts, packing, and that packed sequences do not see each other."""

import json
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2Model
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from rlplus.train.data import (
    MicroBatch,
    PromptSampler,
    Sample,
    pack,
)

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
    state = json.loads(json.dumps(sampler.state()))
    resumed = PromptSampler(n, batch, seed)
    resumed.next()
    resumed.restore(state)
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
            sampler.restore(state)
    with pytest.raises(ValueError, match="want drawn >= 0"):
        sampler.restore({"n": 8, "seed": 0, "drawn": -1})


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
            advantage=[float(i + j) for j in range(r)] if i % 4 == 1 else float(i),
            external=[j % 2 == 0 for j in range(r)] if i % 4 == 2 else i % 3 == 0,
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
        assert batch.advantage[own].eq(torch.tensor(s.advantage)).all()
        assert batch.external[own].eq(torch.tensor(s.external)).all()
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
    for name in ("engine_logprob", "advantage", "external"):
        refuse(f"sample 0: want 4 {name}; got 1", sample(4, 4, **{name: [0.0]}))
    refuse("want row_length and tokens_per_micro_batch >= 1; got 0", row_length=0)


def test_micro_batch_moves_as_a_whole() -> None:
    (batch,) = pack([sample(2, 3)], [torch.ones(3)], row_length=8, tokens_per_micro_batch=8, pad_id=0)
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 10
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert moved.tokens == batch.tokens == 5


def test_a_sample_of_an_older_checkpoint_has_every_field() -> None:
    """Pickled before a field was added, it has the class's value of it."""
    old = Sample([1], [2], 0, False, False, None)
    for each in fields(Sample):
        if each.name not in ("prompt", "response", "group", "external", "truncated", "engine_logprob"):
            del vars(old)[each.name]
    assert old == Sample([1], [2], 0, False, False, None)


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
