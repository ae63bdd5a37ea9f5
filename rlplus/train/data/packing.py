"""Samples -> packed rows without padding between sequences, grouped into micro-batches under a token budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import ceil, isnan
from typing import Any, Self

import torch
from torch import Tensor

from rlplus.common.chosen_experts import Experts, placed
from rlplus.common.kept_sets import KeptSets
from rlplus.train.data.token_columns import check_columns, joined_columns, per_token


@dataclass
class Sample:
    """One trajectory: a prompt and a response. Token ids.

    - `group`: the batch's example that it answers
    - `external`: demonstrated, not sampled: one value for the response, or one per token
    - `truncated`: the response was cut at the length limit
    - `engine_logprob`: the rollout engine's logprob of each response token; None = unknown (demonstrations)
    - `behavior_logprob`: of each response token under the demonstration's author; None = unknown
    - `reward`: the grader's, from `Recipe.credit` on as shaped by the algorithm; NaN = masked: the grader failed, and
      the sample is left out of everything that depends on a reward
    - `status`, `detail`: the grader's, see `rlplus.train.reward.Score`; "ok" for an ungraded response
    - `grade`: `reward` as the grader gave it; None = not shaped
    - `token_reward`: further rewards of the response's tokens; `reward` is given at the last one; None = 0
    - `advantage`: one value for the response, or one per token
    - `trained`: whether a token has a loss: one value, or one per token; the others, such as a tool's answer, are
      context only
    - `metrics`: further numbers of a rollout function, by name, which are logged
    - `scored`: the reward came with the response, which is not graded
    - `value`, `returns`: of the state before each response token: a learner's value, and its target; None = unknown
    - `kept`: the tokens that each response token was sampled from (rollout.top_k): its policy is the softmax over
      these, in every logprob above and in the loss; None = the whole vocabulary
    - `experts`: with rollout.routing_replay the experts (tokens, layers, k) that the engine chose for the first tokens
      of prompt and response, see `rlplus.common.chosen_experts`; None = unknown
    - `teacher_prompt`: the prompt under which a teacher sees the response, if it is another one
    - `teacher_topk`: a teacher's k likeliest tokens at each place of the response and their logprobs, int32 and float32
      (tokens, k); None = not asked
    - `segments`: with rollout.segment the sampled parts of the response, in order: the version of the weights that
      sampled it, and its number of tokens
    """

    prompt: Sequence[int]
    response: Sequence[int]
    group: int
    external: bool | Sequence[bool]
    truncated: bool
    engine_logprob: Sequence[float] | None
    reward: float = 0.0
    advantage: float | Sequence[float] = 0.0
    behavior_logprob: Sequence[float] | None = None
    trained: bool | Sequence[bool] = True
    scored: bool = False
    value: Sequence[float] | None = None
    returns: Sequence[float] | None = None
    token_reward: Sequence[float] | None = None
    status: str = "ok"
    detail: str = ""
    grade: float | None = None
    kept: KeptSets | None = None
    experts: Experts | None = None
    teacher_prompt: Sequence[int] | None = None
    teacher_topk: tuple[Tensor, Tensor] | None = None
    segments: Sequence[tuple[int, int]] = ()
    metrics: Mapping[str, float] | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and response, the prompt being the longer one of policy and teacher."""
        return max(len(self.prompt), len(self.teacher_prompt or ())) + len(self.response)

    @property
    def loss_tokens(self) -> tuple[int, int]:
        """Tokens of the response that are trained on: sampled, demonstrated."""
        tokens = len(self.response)
        if isinstance(self.external, bool) and isinstance(self.trained, bool):  # most are
            return (0, 0) if not self.trained else (0, tokens) if self.external else (tokens, 0)
        kinds = zip(per_token(self.external, tokens), per_token(self.trained, tokens), strict=True)
        external = [kind for kind, on in kinds if on]
        return len(external) - sum(external), sum(external)

    @property
    def demonstration(self) -> bool:
        """Whether the whole response was demonstrated."""
        return all(per_token(self.external, 1))

    @property
    def masked(self) -> bool:
        return isnan(self.reward)


@dataclass
class MicroBatch:
    """R packed rows of L tokens, and N response tokens. All per-token arrays are in the same order.

    input_ids, position_ids (R, L) int64: positions restart at 0 for every sequence and for the padding at a row's end
    rows (N,) int64: index, in the R * L flattened positions, of the hidden state that predicts the token
    target (N,) int64, advantage (N,) float32, external (N,) bool, token_weight (N,) float32
    engine_logprob, behavior_logprob (N,) float32, NaN where unknown
    sequence (N,) int64: index of the token's sample in the list given to `pack`
    value, returns (N,) float32: if all samples have them
    tokens: prompt and response tokens, without padding
    old_logprob, ref_logprob, entropy_weight (N,) float32: set by the trainer where the objective needs them
    kept_counts (N,), kept_tokens int32: the tokens that each was sampled from, see `Sample.kept`; None if none has any
    experts (R, L, layers, k): the experts that are replayed, see `RoutingReplay.use`; None if no sample has any
    whole_position_ids: in a shard, the position_ids of the whole micro-batch; else None
    lengths: of the sequences in each row, and of the padding at its end; empty in a shard
    forward_only: no token has a gradient; it counts in the statistics of the update alone
    teacher: the same response tokens in the same order behind the prompts of a teacher, if samples have any
    teacher_topk: a teacher's tokens (N, k) int32 and their logprobs float32, if all samples have them
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    target: Tensor
    advantage: Tensor
    external: Tensor
    token_weight: Tensor
    engine_logprob: Tensor
    behavior_logprob: Tensor
    sequence: Tensor
    tokens: int
    value: Tensor | None = None
    returns: Tensor | None = None
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    entropy_weight: Tensor | None = None
    kept_counts: Tensor | None = None
    kept_tokens: Tensor | None = None
    experts: Tensor | None = None
    whole_position_ids: Tensor | None = None
    lengths: tuple[tuple[int, ...], ...] = ()
    forward_only: bool = False
    teacher: "MicroBatch | None" = None
    teacher_topk: tuple[Tensor, Tensor] | None = None

    @property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        """Offsets and tokens, as the operations of `rlplus.loss` take them."""
        if self.kept_counts is None or self.kept_tokens is None:
            return None
        return torch.nn.functional.pad(self.kept_counts.cumsum(0), (1, 0)), self.kept_tokens

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on the device."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        if self.teacher is not None:
            moved["teacher"] = self.teacher.to(device)
        if self.teacher_topk is not None:
            moved["teacher_topk"] = tuple(each.to(device, non_blocking=True) for each in self.teacher_topk)
        return replace(self, **moved)

    def as_one_row(self) -> Self:
        """The same tokens as one row (1, R * L)."""
        one = {name: getattr(self, name).reshape(1, -1) for name in ("input_ids", "position_ids")}
        if self.experts is not None:
            one["experts"] = self.experts.flatten(0, 1)[None]
        return replace(self, **one, lengths=(tuple(chain(*self.lengths)),) if self.lengths else ())

    def shard(self, index: int, count: int) -> Self:
        """Columns `index` of `count` equal parts: their tokens, and the response tokens that they predict.

        Together the shards have each response token of the micro-batch once; a shard may have none. `tokens` includes
        padding here. ValueError if the columns cannot be divided.
        """
        rows, length = self.input_ids.shape
        width, left = divmod(length, count)
        if left:
            raise ValueError(f"want rows of a multiple of {count} tokens; got {length}")
        column = self.rows % length
        own = column // width == index
        part = slice(index * width, (index + 1) * width)
        per_token: dict[str, Any] = {
            name: value[own]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.ndim == 1 and name != "kept_tokens"
        }
        if self.kept_counts is not None and self.kept_tokens is not None:
            per_token["kept_tokens"] = self.kept_tokens[own.repeat_interleave(self.kept_counts)]
        per_token["rows"] = (self.rows // length * width + column % width)[own]
        return replace(
            self,
            input_ids=self.input_ids[:, part],
            position_ids=self.position_ids[:, part],
            experts=None if self.experts is None else self.experts[:, part],
            whole_position_ids=self.position_ids,
            lengths=(),
            tokens=rows * width,
            **per_token,
        )

    def model_inputs(self, attention: str) -> dict[str, Any]:
        """Arguments with which a Hugging Face model keeps sequences apart; `rows` index its flattened output.

        The model detects sequences by the restarts in position_ids, and only without an attention_mask and a cache.
        flash_attention_2 detects them only in a batch of one row: it gets all rows as one.
        """
        batch = self.as_one_row() if attention == "flash_attention_2" else self
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": None,
            "use_cache": False,
        }


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
