"""A sample and a micro-batch, and what the values of tokens are in either, and on their way to another rank.

A value for each token that a feature adds is a row of COLUMNS and a field of `Sample`; where the loss reads it, of
`MicroBatch`, too. Sets, experts and a teacher's tokens, of which a token has several, have functions of their own.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import isnan, nan
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlplus.common.chosen_experts import Experts
from rlplus.common.kept_sets import KeptSets

Value = TypeVar("Value", bool, float)


class Column(NamedTuple):
    """A kind of value of each token.

    - `code`: the `array` that another rank is sent
    - `dtype`: in a micro-batch, which has NaN where a sample has None; without one it has no such column
    - `whole`: a micro-batch has the column only if all samples have values
    """

    code: str
    dtype: torch.dtype | None = None
    whole: bool = False


COLUMNS = {
    "external": Column("b", torch.bool),
    "trained": Column("b"),  # in the weights
    "advantage": Column("d", torch.float32),
    "engine_logprob": Column("d", torch.float32),
    "behavior_logprob": Column("d", torch.float32),
    "token_reward": Column("d"),  # in advantages or returns
    "value": Column("f", torch.float32, whole=True),
    "returns": Column("f", torch.float32, whole=True),
}
TOKENS = ("prompt", "response", "teacher_prompt")


def per_token(value: Value | Sequence[Value], tokens: int) -> Iterable[Value]:
    """One value per token: the given ones, or the same one repeated."""
    return repeat(value, tokens) if isinstance(value, float | int) else value


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


def check_columns(where: str, sample: Sample) -> None:
    """ValueError unless the sample has as many values as tokens of its response, or one for all."""
    response = len(sample.response)
    for name in COLUMNS:
        values = getattr(sample, name)
        if not isinstance(values, float | int | None) and len(values) != response:
            raise ValueError(f"{where}: want {response} {name}; got {len(values)}")
    if sample.kept is not None and len(sample.kept) != response:
        raise ValueError(f"{where}: want {response} kept sets; got {len(sample.kept)}")
    if any(len(part) != response for part in sample.teacher_topk or ()):
        raise ValueError(f"{where}: want a teacher's tokens at {response} places; got others")


def compact(sample: Sample) -> Sample:
    """The same values as arrays, a third of the pickled size of lists and much faster to send."""
    codes = {name: column.code for name, column in COLUMNS.items()} | dict.fromkeys(TOKENS, "i")
    values: Mapping[str, Any] = {name: getattr(sample, name) for name in codes}
    arrays: dict[str, Any] = {n: array(codes[n], v) for n, v in values.items() if isinstance(v, Sequence)}
    return replace(sample, **arrays)


def joined(values: Sequence[Any], lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of all responses, one after the other (N,); None is NaN."""
    known = [nan if value is None else value for value in values]
    return torch.tensor([*chain(*map(per_token, known, lengths))], dtype=dtype)


def joined_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of a micro-batch of these samples that have a value for each token, in order of tokens."""
    lengths = [len(sample.response) for sample in samples]
    found: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        values = [getattr(sample, name) for sample in samples]
        if column.dtype is not None and not (column.whole and None in values):
            found[name] = joined(values, lengths, column.dtype)
    if topk := [sample.teacher_topk for sample in samples if sample.teacher_topk is not None]:
        found["teacher_topk"] = tuple(torch.cat(parts) for parts in zip(*topk, strict=True))
    return found | _joined_sets(samples)


def _joined_sets(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """`kept_counts` and `kept_tokens`, if any sample has them; a sample without has the whole vocabulary."""
    if all(sample.kept is None for sample in samples):
        return {}
    all_sets = KeptSets()
    for sample in samples:
        if sample.kept is None:
            all_sets.skip(len(sample.response))
        else:
            all_sets.extend(sample.kept)
    return {
        f"kept_{name}": torch.from_numpy(np.array(values, dtype=np.int32)) for name, values in vars(all_sets).items()
    }
