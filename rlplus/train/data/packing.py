"""Samples -> packed rows without padding between sequences, grouped into micro-batches under a token budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import ceil

import torch
from torch import Tensor

from rlplus.common.chosen_experts import placed
from rlplus.train.data.sample_types import MicroBatch, Sample, check_columns, joined_columns


def pack(
    samples: Sequence[Sample],
    token_weight: Sequence[Tensor],
    *,
    row_length: int,
    tokens_per_micro_batch: int,
    pad_id: int,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Pack samples, first-fit decreasing, into rows of at most `row_length` tokens, and rows into micro-batches.

    token_weight: for each sample, the weights of its response tokens. A micro-batch has R rows of length L (the
    longest row, rounded up to a `multiple`), R * L <= tokens_per_micro_batch, but at least one row. ValueError for a
    sample longer than a row, an empty prompt or response, or a wrong number of per-token values.
    """
    if row_length < 1 or tokens_per_micro_batch < 1:
        raise ValueError(f"want row_length and tokens_per_micro_batch >= 1; got {row_length}, {tokens_per_micro_batch}")
    if len(token_weight) != len(samples):
        raise ValueError(f"want one token_weight for each of {len(samples)} samples; got {len(token_weight)}")
    for index, (sample, weight) in enumerate(zip(samples, token_weight, strict=True)):
        _check(index, sample, weight, row_length)
    lengths = [sample.length for sample in samples]
    return [
        _micro_batch(rows, samples, token_weight, pad_id, multiple)
        for rows in plan_micro_batches(lengths, row_length, tokens_per_micro_batch, multiple)
    ]


def plan_micro_batches(
    lengths: Sequence[int], row_length: int, tokens_per_micro_batch: int, multiple: int = 1
) -> list[list[list[int]]]:
    """The micro-batches of `pack`: lists of rows, which are lists of indices into `lengths`."""
    rows: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, taken in enumerate(used) if taken + lengths[index] <= row_length), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(index)
        used[row] += lengths[index]
    batches: list[list[list[int]]] = []
    width = 0
    for row in sorted(range(len(rows)), key=lambda r: -used[r]):  # rows of similar length together: little padding
        if not batches or (len(batches[-1]) + 1) * width > tokens_per_micro_batch:
            batches.append([])
            width = ceil(used[row] / multiple) * multiple
        batches[-1].append(rows[row])
    return batches


def balance(
    lengths: Sequence[int], home: Sequence[int], bins: int, row_length: int, tokens_per_micro_batch: int
) -> list[int]:
    """The bin (rank) that trains on each sample, given its length and its current bin; the same on every rank.

    Longest first, each to the bin with the fewest tokens so far. Samples stay where they are unless this lowers the
    largest number of micro-batches or of tokens over the bins and raises neither: moving them costs time.
    """
    loads = [0] * bins
    spread = list(home)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        spread[index] = min(range(bins), key=lambda b: (loads[b], b != home[index]))
        loads[spread[index]] += lengths[index]

    def worst(places: Sequence[int]) -> tuple[int, int]:
        parts = [[length for length, place in zip(lengths, places, strict=True) if place == b] for b in range(bins)]
        counts = [len(plan_micro_batches(part, row_length, tokens_per_micro_batch)) for part in parts]
        return max(counts), max(sum(part) for part in parts)

    before, after = worst(home), worst(spread)
    return spread if after != before and all(a <= b for a, b in zip(after, before, strict=True)) else list(home)


def _check(index: int, sample: Sample, weight: Tensor, row_length: int) -> None:
    prompt, response = sample.length - len(sample.response), len(sample.response)
    if not sample.prompt or not response:
        raise ValueError(f"sample {index}: want a prompt and a response; got {prompt} and {response} tokens")
    if prompt + response > row_length:
        raise ValueError(f"sample {index}: want at most row_length {row_length} tokens; got {prompt} + {response}")
    if weight.shape != (response,):
        raise ValueError(f"sample {index}: want token_weight ({response},); got {tuple(weight.shape)}")
    check_columns(f"sample {index}", sample)
    if sample.experts is not None and len(sample.experts) > len(sample.prompt) + response:
        tokens = len(sample.prompt) + response
        raise ValueError(f"sample {index}: want the experts of {tokens} tokens at most; got {len(sample.experts)}")


def _micro_batch(
    rows: list[list[int]],
    samples: Sequence[Sample] | Mapping[int, Sample],
    token_weight: Sequence[Tensor],
    pad_id: int,
    multiple: int,
) -> MicroBatch:
    lengths = {index: len(samples[index].prompt) + len(samples[index].response) for row in rows for index in row}
    used = [sum(lengths[index] for index in row) for row in rows]
    width = ceil(max(used) / multiple) * multiple
    order = [index for row in rows for index in row]
    chosen = [samples[index] for index in order]
    starts = [r * width + start for r, row in enumerate(rows) for start in _starts([lengths[i] for i in row])]
    start, length = torch.tensor(starts), torch.tensor([lengths[index] for index in order])
    count = torch.tensor([len(sample.response) for sample in chosen])
    places = _ranges(start, length)  # every token's, in the flattened rows
    input_ids = torch.full((len(rows) * width,), pad_id, dtype=torch.int64)
    input_ids[places] = torch.tensor([*chain(*((*sample.prompt, *sample.response) for sample in chosen))])
    # First as if rows were padding after their last token; then every sequence from 0 on.
    position_ids = (torch.arange(width) - torch.tensor(used)[:, None]).flatten()
    position_ids[places] = places - start.repeat_interleave(length)
    ends = [(width - taken,) if taken < width else () for taken in used]
    predictors = _ranges(start + length - count - 1, count)  # the prompt's last token predicts the first response token

    learned = joined_columns(chosen)
    if known := [(place, s.experts) for place, s in zip(starts, chosen, strict=True) if s.experts is not None]:
        learned["experts"] = torch.from_numpy(placed(known, len(rows) * width)).unflatten(0, (len(rows), width))
    if all(sample.teacher_prompt is not None for sample in chosen):
        asked = {
            index: replace(sample, prompt=sample.teacher_prompt or (), teacher_prompt=None, experts=None)
            for index, sample in zip(order, chosen, strict=True)
        }
        learned["teacher"] = _micro_batch(rows, asked, token_weight, pad_id, multiple)
    return MicroBatch(
        input_ids=input_ids.view(len(rows), width),
        position_ids=position_ids.view(len(rows), width),
        lengths=tuple((*(lengths[index] for index in row), *end) for row, end in zip(rows, ends, strict=True)),
        rows=predictors,
        target=input_ids[predictors + 1],
        token_weight=torch.cat([token_weight[index] for index in order]).detach().to("cpu", torch.float32),
        sequence=torch.tensor(order).repeat_interleave(count),
        tokens=sum(used),
        **learned,
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _ranges(start: Tensor, length: Tensor) -> Tensor:
    """start[0], start[0] + 1, ..., length[0] numbers; then the same from start[1], and so on."""
    before = length.cumsum(0) - length
    return torch.arange(int(length.sum())) + (start - before).repeat_interleave(length)
