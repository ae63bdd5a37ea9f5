"""Samples to micro-batches: the weight of each token, and which rank trains on which sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import agree
from rlplus.loss import Objective, token_weights
from rlplus.loss.objective.objective import Reduction
from rlplus.train.algorithm import Algorithm
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample, balance, pack, per_token
from rlplus.train.data.token_columns import compact


def make_micro_batches(
    samples: Sequence[Sample], algorithm: Algorithm, config: Config, pad_id: int, device: torch.device
) -> list[MicroBatch]:
    """Weigh, rebalance and pack the samples of one update; all ranks get the same number of micro-batches.

    The denominators span the whole batch. Samples are distributed over the ranks by length, whichever rank
    generated them. Samples without a gradient (with KL and entropy off: zero advantage, or external without
    a loss) come first, in micro-batches that are `forward_only`: that saves their backward passes and changes no
    number. With sequence parallelism a rank gets its shard of each micro-batch of its group.
    """
    totals = _totals(samples)
    o = algorithm.objective
    everyone = bool(o.kl_coef or o.entropy_coef)
    trained, still = list[Sample](), list[Sample]()
    for sample in samples:
        if any(sample.loss_tokens):
            (trained if everyone or _has_gradient(sample, o) else still).append(sample)
    batches = []
    for part in (still, trained):
        kept = rebalance(part, config)
        unknown = sum(s.loss_tokens[1] for s in kept if s.behavior_logprob is None)
        assert not config.knows_behavior or not unknown, f"want the author's logprob of {unknown} more tokens"
        packed = even_batches(kept, _token_weights(kept, totals, algorithm, config), config, pad_id, device)
        batches += [replace(batch, forward_only=part is still) for batch in packed]
    if o.entropy_coef and algorithm.reduction == "official":
        # The official scripts' bonus is a mean over response tokens, while their loss is normalised by length alone.
        for batch in batches:
            batch.entropy_weight = (batch.token_weight != 0).float() / sum(totals.tokens)
    return batches


def has_gradient(batches: Sequence[MicroBatch]) -> bool:
    """Whether an update's micro-batches change the policy; the same on all ranks."""
    return not all(batch.forward_only for batch in batches)


def mean_batches(
    samples: Sequence[Sample],
    config: Config,
    pad_id: int,
    device: torch.device,
    of: Literal["tokens", "sequences"] = "tokens",
) -> list[MicroBatch]:
    """Rebalance and pack all samples of one update, weighted for a mean over all ranks' tokens or sequences."""
    totals = _totals(samples)
    kept = rebalance(samples, config)
    lengths = [len(sample.response) for sample in kept]
    shares = [sum(totals.tokens) if of == "tokens" else n * totals.responses for n in lengths]
    weights = [torch.full((n,), 1 / share, dtype=torch.float32) for n, share in zip(lengths, shares, strict=True)]
    return even_batches(kept, weights, config, pad_id, device)


def by_sample(
    samples: Sequence[Sample],
    compute: Callable[[MicroBatch], Tensor],
    config: Config,
    pad_id: int,
    device: torch.device,
) -> list[Tensor]:
    """The results of `compute`, (N, ...) per micro-batch, for each of this rank's samples: (T, ...), on the CPU.

    Collective. With train.sequence_parallel > 1 the ranks of a group pass the same samples, and each computes a part.
    """
    results = [torch.empty(0, dtype=torch.float32)] * len(samples)
    for batch in even_batches(
        samples, [torch.ones(len(s.response), dtype=torch.float32) for s in samples], config, pad_id, device
    ):
        values, sequence = compute(batch).cpu(), batch.sequence.cpu()
        for index in sequence[batch.token_weight.cpu() != 0].unique().tolist():  # none in a dummy
            results[index] = values[sequence == index]
    if (parallel := config.train.sequence_parallel) > 1:
        shards = zip(*agree.gathered(results, parallel), strict=True)
        results = [torch.cat([part for part in parts if len(part)]) for parts in shards]
    return results


def even_batches(
    samples: Sequence[Sample], token_weight: Sequence[Tensor], config: Config, pad_id: int, device: torch.device
) -> list[MicroBatch]:
    """Pack this rank's samples; all ranks get the same number of micro-batches, some of them a `dummy`. Collective."""
    parallel = config.train.sequence_parallel
    batches = pack(
        samples,
        token_weight,
        row_length=config.max_sample_length,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch * parallel,
        pad_id=pad_id,
        multiple=parallel,
    )
    most = int(agree.largest(len(batches)))
    # A rank with fewer micro-batches runs dummies, backward pass included: a rank that skips one deadlocks ZeRO.
    batches += [dummy(pad_id, parallel) for _ in range(most - len(batches))]
    return [batch.to(device) for batch in own_shards(batches, config)]


def forward_batches(
    samples: Sequence[Sample], config: Config, pad_id: int, device: torch.device, tokens_per_micro_batch: int
) -> list[MicroBatch]:
    """Micro-batches for the logprobs of this rank's samples, in order of `MicroBatch.sequence`; no weights."""
    parallel = config.train.sequence_parallel
    batches = pack(
        samples,
        [torch.ones(len(s.response), dtype=torch.float32) for s in samples],
        row_length=config.max_sample_length,
        tokens_per_micro_batch=tokens_per_micro_batch,
        pad_id=pad_id,
        multiple=parallel,
    )
    return [batch.to(device) for batch in own_shards(batches, config)]


def own_shards(batches: list[MicroBatch], config: Config) -> list[MicroBatch]:
    """This rank's shard of each micro-batch of its sequence-parallel group; without one, the micro-batches."""
    parallel = config.train.sequence_parallel
    if parallel == 1:
        return batches
    if config.model.attention == "flash_attention_2":
        batches = [batch.as_one_row() for batch in batches]
    return [batch.shard(dist.get_rank() % parallel, parallel) for batch in batches]


def rebalance(samples: Sequence[Sample], config: Config) -> list[Sample]:
    """Redistribute all ranks' samples by `balance`; returns this rank's, in the ranks' order. Collective.

    The ranks of a sequence-parallel group (`train.sequence_parallel` neighbours) get the same samples.
    """
    world, rank, parallel = dist.get_world_size(), dist.get_rank(), config.train.sequence_parallel
    if world == 1:
        return list(samples)
    lengths = agree.gathered([s.length for s in samples])
    owner = [r for r, own in enumerate(lengths) for _ in own]
    place = balance(
        [length for own in lengths for length in own],
        [r // parallel for r in owner],
        world // parallel,
        config.max_sample_length,
        config.train.tokens_per_micro_batch * parallel,
    )
    first = owner.index(rank) if rank in owner else 0
    here = {first + i: s for i, s in enumerate(samples)}
    if parallel > 1 or any(p != r for p, r in zip(place, owner, strict=True)):
        leaving = {i: compact(s) for i, s in here.items() if parallel > 1 or place[i] != rank}
        here |= {i: s for moved in agree.gathered(leaving) for i, s in moved.items()}
    return [here[i] for i, p in enumerate(place) if p == rank // parallel]


def _has_gradient(sample: Sample, objective: Objective) -> bool:
    values = sample.external, sample.advantage, sample.trained
    tokens = len(sample.response) if any(isinstance(value, Sequence) for value in values) else 1  # one represents all
    each = zip(*(per_token(value, tokens) for value in values), strict=True)
    return any(on and (objective.external_gradient(A) if external else A != 0) for external, A, on in each)


@dataclass(frozen=True)
class _Totals:
    """Tokens with a loss in an update over all ranks, (sampled, demonstrated), and the sequences that have them.

    responses: sequences with tokens of either kind; one that begins with a demonstrated prefix has both.
    """

    tokens: tuple[int, int]
    sequences: tuple[int, int]
    responses: int


def _totals(samples: Sequence[Sample]) -> _Totals:
    sampled, external = zip(*(s.loss_tokens for s in samples), strict=True) if samples else ((), ())
    tokens, sequences = map(sum, (sampled, external)), (sum(map(bool, kind)) for kind in (sampled, external))
    responses = sum(a + b > 0 for a, b in zip(sampled, external, strict=True))
    counts = [int(total) for total in agree.sums(*tokens, *sequences, responses)]
    return _Totals((counts[0], counts[1]), (counts[2], counts[3]), counts[4])


def _token_weights(samples: Sequence[Sample], totals: _Totals, algorithm: Algorithm, config: Config) -> list[Tensor]:
    lengths = torch.tensor([len(s.response) for s in samples], dtype=torch.int64)
    sequences = torch.arange(len(samples)).repeat_interleave(lengths)

    def flat(values: Iterable[Iterable[bool]]) -> Tensor:
        return torch.tensor([*chain(*values)], dtype=torch.bool)

    def weights(mask: Tensor, reduction: Reduction, total_tokens: int, total_sequences: int) -> Tensor:
        return token_weights(
            mask,
            reduction,
            max_length=config.rollout.max_response_length,
            total_tokens=total_tokens,
            total_sequences=total_sequences,
            sequence_ids=sequences,
        )

    trained = flat(per_token(s.trained, len(s.response)) for s in samples)
    if algorithm.separate_denominators:
        external = flat(per_token(s.external, len(s.response)) for s in samples)
        sampled, demonstrated = zip(totals.tokens, totals.sequences, strict=True)
        weight = weights(trained & ~external, algorithm.reduction, *sampled)
        weight += weights(trained & external, algorithm.external_reduction or algorithm.reduction, *demonstrated)
    else:
        weight = weights(trained, algorithm.reduction, sum(totals.tokens), totals.responses)
    return list(weight.split(lengths.tolist()))


def dummy(pad_id: int, multiple: int = 1) -> MicroBatch:
    """A micro-batch of one token of weight 0."""
    sample = Sample([pad_id], [pad_id], 0, False, False, None, value=[0.0], returns=[0.0])
    weight = [torch.zeros(1, dtype=torch.float32)]
    return pack([sample], weight, row_length=2, tokens_per_micro_batch=2, pad_id=pad_id, multiple=multiple)[0]
