"""Which rank trains on which sample, and the shards of a micro-batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplus.train.data import MicroBatch, Sample, balance, pack
from rlplus.train.data.packing import plan_micro_batches

ROW, BUDGET = 20, 40


@st.composite
def owned_lengths(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    bins = draw(st.integers(1, 4))
    samples = draw(st.lists(st.tuples(st.integers(2, ROW), st.integers(0, bins - 1)), max_size=24))
    return [length for length, _ in samples], [owner for _, owner in samples], bins


def worst(lengths: list[int], place: list[int], bins: int) -> tuple[int, int]:
    """(most micro-batches, most tokens) of a bin."""
    parts = [[length for length, p in zip(lengths, place, strict=True) if p == b] for b in range(bins)]
    return max(len(plan_micro_batches(part, ROW, BUDGET)) for part in parts), max(map(sum, parts))


@given(owned_lengths())
def test_balance_is_never_worse_than_staying_at_home(case: tuple[list[int], list[int], int]) -> None:
    lengths, home, bins = case
    place = balance(lengths, home, bins, ROW, BUDGET)
    assert len(place) == len(lengths)
    assert all(0 <= p < bins for p in place)
    batches, tokens = worst(lengths, place, bins)
    batches_at_home, tokens_at_home = worst(lengths, home, bins)
    assert batches <= batches_at_home
    assert tokens <= tokens_at_home
    assert place == home or (batches, tokens) < (batches_at_home, tokens_at_home)
    assert balance(lengths, home, bins, ROW, BUDGET) == place


@given(owned_lengths())
def test_balance_evens_tokens_out(case: tuple[list[int], list[int], int]) -> None:
    """Where everything starts in one bin, bins end within the longest sample of each other: Graham's bound."""
    lengths, _, bins = case
    place = balance(lengths, [0] * len(lengths), bins, ROW, BUDGET)
    loads = [sum(length for length, p in zip(lengths, place, strict=True) if p == b) for b in range(bins)]
    if place != [0] * len(lengths):
        assert max(loads) - min(loads) <= max(lengths)
    else:  # nothing to gain
        assert bins == 1 or len(lengths) <= 1


def test_balance_by_hand() -> None:
    assert balance([9, 8, 7, 6], [0, 0, 0, 0], 2, ROW, BUDGET) == [0, 1, 1, 0]
    assert balance([9, 7, 8, 6], [0, 0, 1, 1], 2, ROW, BUDGET) == [0, 1, 1, 0]
    assert balance([9, 6, 8, 7], [1, 1, 0, 0], 2, ROW, BUDGET) == [1, 1, 0, 0]  # no better distribution: nothing moves
    assert balance([], [], 3, ROW, BUDGET) == []


def packed(lengths: list[tuple[int, int]], multiple: int, **options: Any) -> list[MicroBatch]:
    samples = [
        Sample([i] * p, list(range(r)), i, i % 2 == 0, False, None, advantage=i + 0.5)
        for i, (p, r) in enumerate(lengths)
    ]
    weights = [torch.rand(len(s.response)) for s in samples]
    return pack(samples, weights, row_length=ROW, pad_id=256, multiple=multiple, **options)


lengths_of_samples = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), min_size=1, max_size=12)


@given(lengths=lengths_of_samples, count=st.integers(1, 4), one_row=st.booleans())
def test_shards_are_the_whole(lengths: list[tuple[int, int]], count: int, one_row: bool) -> None:
    for batch in packed(lengths, count, tokens_per_micro_batch=BUDGET):
        rows, width = batch.input_ids.shape
        assert width % count == 0
        assert rows == 1 or rows * width <= BUDGET
        whole = batch.as_one_row() if one_row else batch
        shards = [whole.shard(k, count) for k in range(count)]
        assert torch.cat([s.input_ids for s in shards], 1).equal(whole.input_ids)
        assert torch.cat([s.position_ids for s in shards], 1).equal(whole.position_ids)
        # A shard's row has the hidden state of the same token: use the place in the whole as the hidden state.
        places = torch.arange(whole.input_ids.numel()).view(whole.input_ids.shape).chunk(count, 1)
        seen = []
        for shard, place in zip(shards, places, strict=True):
            assert shard.whole_position_ids is not None
            assert shard.whole_position_ids.equal(whole.position_ids)
            where = place.flatten()[shard.rows]
            seen += list(zip(where.tolist(), shard.target.tolist(), shard.token_weight.tolist(), strict=True))
            assert shard.advantage.equal(shard.sequence + 0.5)
        assert sorted(seen) == sorted(
            zip(batch.rows.tolist(), batch.target.tolist(), batch.token_weight.tolist(), strict=True)
        )


def test_shards_need_columns_that_divide() -> None:
    (batch,) = packed([(2, 3)], 1, tokens_per_micro_batch=BUDGET)
    with pytest.raises(ValueError, match="want rows of a multiple of 2 tokens; got 5"):
        batch.shard(0, 2)
