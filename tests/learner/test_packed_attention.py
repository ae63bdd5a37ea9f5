"""Attention to each packed sequence on its own: gradients as for each alone, no mask, and only where it is worth it."""

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lms import make
from torch import Tensor
from trainer_runs import run_config
from transformers import AttentionInterface, PreTrainedModel

from rlplus.train.data import MicroBatch, Sample, pack
from rlplus.train.learner import packed_model
from rlplus.train.learner.packed_model import LONG_ROW, PackedModel, takes_spans
from rlplus.train.trainer import train

LENGTHS = (9, 4, 13, 6, 3)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    return [
        Sample([1 + i, 2], [(5 * i + 3 * j) % 30 for j in range(length - 2)], 1.0, False, False, None)
        for i, length in enumerate(lengths)
    ]


def packed(given: list[Sample], row_length: int) -> MicroBatch:
    weights = [torch.ones(len(sample.response)) for sample in given]
    (batch,) = pack(given, weights, row_length=row_length, tokens_per_micro_batch=10**6, pad_id=0)
    return batch


def negative_logprob(batch: MicroBatch) -> Any:
    def op(hidden: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.T, batch.target, reduction="sum")

    return op


def gradients(model: PreTrainedModel, batches: list[MicroBatch], masks: bool | None) -> Tensor:
    model.zero_grad()
    for batch in batches:
        PackedModel(model, None, masks=masks)(batch, negative_logprob(batch)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("Qwen2", SHARED), ("Mistral", SHARED | {"sliding_window": 5}), ("Qwen2", WINDOWS)],
)
def test_gradients_are_those_of_each_sequence_alone(family: str, changes: dict[str, Any], checkpointing: bool) -> None:
    model = make(family, changes).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert takes_spans(model)
    alone = gradients(model, [packed([sample], 13) for sample in samples()], None)
    batch = packed(samples(), 20)
    assert batch.lengths == ((13, 6), (9, 4, 3, 3)), "the last one is padding"
    for masks in (True, False):
        torch.testing.assert_close(gradients(model, [batch], masks), alone, rtol=1e-9, atol=1e-12)


def test_long_rows_have_no_mask_and_no_products_between_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, bool]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, *args: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append((len(query), query.shape[2], attn_mask is None))
        return plain(query, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = make("Qwen2", {"num_hidden_layers": 1, "max_position_embeddings": 512})
    with torch.no_grad():
        long, short = packed(samples((500, 280, 244)), LONG_ROW), packed(samples((40, 20)), 64)
        for batch in (long, short):
            PackedModel(model, None)(batch, negative_logprob(batch))
    assert seen == [(1, 500, True), (2, 280, True), (1, 60, False)]


def test_groups_hold_every_token_once_and_little_padding() -> None:
    generator = random.Random(0)
    for most in [900] * 50 + [20] * 20:
        rows = tuple(tuple(generator.randint(1, most) for _ in range(generator.randint(1, 9))) for _ in range(3))
        tokens, shapes, back = packed_model.Spans(rows).places(torch.device("cpu"))
        lengths, count = [length for row in rows for length in row], sum(map(sum, rows))
        assert torch.equal(tokens[back], torch.arange(count))
        assert len(tokens) == sum(n * longest for n, longest in shapes) <= 1.25 * count
        assert sum(n * longest**2 for n, longest in shapes) <= 1.25 * sum(length**2 for length in lengths)
        groups = tokens.split([n * longest for n, longest in shapes])
        found = [s for group, shape in zip(groups, shapes, strict=True) for s in group.view(shape)]
        assert [int(s[-1] - s[0]) + 1 for s in found] == sorted(lengths, reverse=True)
        assert {int(s[0]) for s in found} == set(accumulate(lengths[:-1], initial=0))
    same = packed_model.Spans(((40, 40), (80,), (40, 40))).places(torch.device("cpu"))
    assert same.shapes == ((1, 80), (4, 40))


@pytest.mark.parametrize("causal", [True, False])
def test_a_module_that_is_not_causal_sees_no_padding(causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64).unbind()
    module = torch.nn.Identity()
    module.is_causal = causal
    core = AttentionInterface()["sdpa"]
    out = packed_model.attend_apart(getattr(core, "__wrapped__", core), spans_of(5, 4), module, query, key, value)
    for part in (slice(0, 5), slice(5, 9)):
        scores = query[:, :, part] @ key[:, :, part].mT / 8**0.5
        if causal:
            scores += torch.full(scores.shape[-2:], -torch.inf, dtype=torch.float64).triu(1)
        torch.testing.assert_close(out[:, part], (scores.softmax(-1) @ value[:, :, part]).transpose(1, 2))


def spans_of(*lengths: int) -> packed_model.Spans:
    return packed_model.Spans((lengths,))


def test_lengths_of_other_rows_are_refused() -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 8).unbind()
    with pytest.raises(ValueError, match="want lengths of 9 tokens, the rows'; got 8"):
        packed_model.attend_apart(None, spans_of(5, 3), None, query, key, value)


def test_lengths_cover_every_row_and_are_those_of_the_positions() -> None:
    batch = packed(samples(), 20)
    for row, lengths in zip(batch.position_ids.tolist(), batch.lengths, strict=True):
        assert row == [place for length in lengths for place in range(length)]
    assert batch.as_one_row().lengths == ((13, 6, 9, 4, 3, 3),)
    assert batch.shard(0, 1).lengths == ()


def test_a_model_that_drops_the_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Qwen2", {})
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, spans, **options: forward(*args, **options))
    batch = packed(samples(), 20)
    with pytest.raises(ValueError, match=r"model\.attention eager; Qwen2ForCausalLM does not"):
        PackedModel(model, None, masks=False)(batch, negative_logprob(batch))


def test_a_run_begins_with_a_look_at_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_all(core: Any, spans: Any, module: Any, *qkv: Tensor, **options: Any) -> Any:
        return core(module, *qkv[:3], None, **options)[0]

    monkeypatch.setattr(packed_model, "attend_apart", over_all)
    with pytest.raises(ValueError, match="packed sequences see each other"):
        train(run_config(tmp_path))


def test_other_attentions_keep_their_masks() -> None:
    model = make("Qwen2", {})
    model.set_attn_implementation("eager")
    assert not takes_spans(model)
    assert not takes_spans(make("Bloom", {}))


def test_masks_of_the_whole_are_cut_for_each_sequence() -> None:
    """Each row has its own, also where one mask is for all rows and where it is additive."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 7, 8, generator=generator, dtype=torch.float64).unbind()
    spans = packed_model.Spans(((3, 4), (5, 2)))
    for rows in (1, 2):
        mask = torch.randn(rows, 1, 7, 7, generator=generator, dtype=torch.float64)
        core = lambda module, q, k, v, m: (torch.softmax(q @ k.mT + m, -1).matmul(v).transpose(1, 2), None)  # noqa: E731
        out = packed_model.attend_apart(core, spans, None, query, key, value, mask)
        kept = torch.full((2, 1, 7, 7), -torch.inf, dtype=torch.float64)
        for row, lengths in enumerate(spans.rows):
            begin = 0
            for length in lengths:
                part = slice(begin, begin + length)
                kept[row, :, part, part] = mask[min(row, rows - 1), :, part, part]
                begin += length
        torch.testing.assert_close(out, core(None, query, key, value, kept)[0])
