"""Samples to micro-batches: the weight of each token, and which rank trains on which sample.

And loss inputs from a forward pass before an update: ratios of whole sequences, and tokens of high entropy. The op
handles single tokens, so all of this is passed to it as per-token constants: an old_logprob and an engine_logprob that
give every token its sequence's ratio, and an advantage of 0 for tokens that are left out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
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
from rlplus.train.data.sample_types import compact


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
    for batch in even_batches(samples, ones(samples), config, pad_id, device):
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
    batches = _packed(samples, token_weight, config, pad_id, config.train.tokens_per_micro_batch * parallel)
    most = int(agree.largest(len(batches)))
    # A rank with fewer micro-batches runs dummies, backward pass included: a rank that skips one deadlocks ZeRO.
    batches += [dummy(pad_id, parallel) for _ in range(most - len(batches))]
    return [batch.to(device) for batch in own_shards(batches, config)]


def forward_batches(
    samples: Sequence[Sample], config: Config, pad_id: int, device: torch.device, tokens_per_micro_batch: int
) -> list[MicroBatch]:
    """Micro-batches for the logprobs of this rank's samples, in order of `MicroBatch.sequence`; no weights."""
    batches = _packed(samples, ones(samples), config, pad_id, tokens_per_micro_batch)
    return [batch.to(device) for batch in own_shards(batches, config)]


def ones(samples: Sequence[Sample]) -> list[Tensor]:
    """The weight 1 for each response token of each sample, fp32."""
    return [torch.ones(len(sample.response), dtype=torch.float32) for sample in samples]


def _packed(
    samples: Sequence[Sample], token_weight: Sequence[Tensor], config: Config, pad_id: int, tokens: int
) -> list[MicroBatch]:
    """This rank's samples in micro-batches of at most so many tokens."""
    return pack(
        samples,
        token_weight,
        row_length=config.max_sample_length,
        tokens_per_micro_batch=tokens,
        pad_id=pad_id,
        multiple=config.train.sequence_parallel,
    )


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


def dummy(pad_id: int, multiple: int) -> MicroBatch:
    """A micro-batch of one token of weight 0."""
    sample = Sample([pad_id], [pad_id], 0, False, False, None, value=[0.0], returns=[0.0])
    weight = [torch.zeros(1, dtype=torch.float32)]
    return pack([sample], weight, row_length=2, tokens_per_micro_batch=2, pad_id=pad_id, multiple=multiple)[0]


def needs_statistics(algorithm: Algorithm, on_policy: bool) -> bool:
    """Whether an update needs the current policy's logprobs and entropies first. on_policy: it has sampled the batch.

    On policy, the ratios of sequences and of tokens are all 1, with the same gradient.
    """
    engine = algorithm.objective.mismatch_cap is not None and algorithm.mismatch_level != "token"
    sequences = algorithm.ratio_level == "sequence" or engine
    return algorithm.selects_tokens or (engine if on_policy else sequences)


def counted(batch: MicroBatch, *, external: bool) -> Tensor:
    """(N,) bool: the demonstrated or the sampled tokens that have a loss."""
    return (batch.token_weight != 0) & (batch.external == external)


def set_statistics(
    batches: Sequence[MicroBatch], statistics: Sequence[tuple[Tensor, Tensor]], algorithm: Algorithm, parallel: int
) -> None:
    """Change the constants of an update's micro-batches. Collective.

    statistics: logprob (N,) and entropy (N,) of each under the current policy. parallel: the number of
    neighbouring ranks that share the sequences of a micro-batch.
    """
    for batch, (logprob, _) in zip(batches, statistics, strict=True):
        _set_sequence_ratios(batch, logprob, algorithm, parallel)
    entropies = [entropy for _, entropy in statistics]
    if algorithm.top_entropy < 1:
        for batch, low in zip(batches, _low(batches, entropies, algorithm.top_entropy, external=False), strict=True):
            batch.advantage = batch.advantage.masked_fill(low, 0.0)
            weight = batch.token_weight if batch.entropy_weight is None else batch.entropy_weight
            batch.entropy_weight = weight.masked_fill(low, 0.0)
    if (share := algorithm.external_top_entropy) < 1:
        for batch, low in zip(batches, _low(batches, entropies, share, external=True), strict=True):
            batch.advantage = batch.advantage.masked_fill(low, 0.0)


def _set_sequence_ratios(batch: MicroBatch, logprob: Tensor, algorithm: Algorithm, parallel: int) -> None:
    """Make exp(logprob - old_logprob) the sequence's ratio, with the slope of GSPO's s sg(1/p) p.

    exp(old_logprob - engine_logprob) becomes the sequence's weight, or stays the token's.
    """
    sampled = counted(batch, external=False)
    old = logprob if batch.old_logprob is None else batch.old_logprob
    gap = old - batch.engine_logprob
    if algorithm.mismatch_level != "token":
        gap = over_sequences(gap, batch, sampled, mean=algorithm.mismatch_level == "geometric", parallel=parallel)
        gap = gap.masked_fill(batch.external, torch.nan)
    if algorithm.ratio_level == "sequence" and batch.old_logprob is not None:
        old = logprob - over_sequences(logprob - old, batch, sampled, mean=True, parallel=parallel)
    if algorithm.ratio_level == "sequence" or algorithm.mismatch_level != "token":
        batch.old_logprob = old if batch.old_logprob is None else old.where(~batch.external, batch.old_logprob)
        batch.engine_logprob = old - gap


def over_sequences(values: Tensor, batch: MicroBatch, on: Tensor, *, mean: bool, parallel: int) -> Tensor:
    """(N,) -> (N,): for each token the sum or mean over the tokens of its sequence that are `on`, on all ranks."""
    own = values.new_zeros(2, int(batch.sequence.max()) + 1 if len(values) else 0, dtype=torch.float64)
    own[0].index_add_(0, batch.sequence[on], values[on].double())
    own[1].index_add_(0, batch.sequence, on.double())
    parts = [own] if parallel == 1 else [part.to(own.device) for part in agree.gathered(own.cpu(), parallel)]
    sums = own.new_zeros(2, max(part.shape[1] for part in parts))
    for part in parts:
        sums[:, : part.shape[1]] += part
    result = sums[0] / sums[1] if mean else sums[0]
    return result[batch.sequence].to(values.dtype)


def _low(batches: Sequence[MicroBatch], entropies: Sequence[Tensor], share: float, *, external: bool) -> list[Tensor]:
    """(N,) bool for each batch: tokens of the kind below the lowest entropy in the kind's top share. Collective.

    The share is of all ranks' tokens.
    """
    kinds = [counted(batch, external=external) for batch in batches]
    own = torch.cat([entropy[on] for entropy, on in zip(entropies, kinds, strict=True)]).cpu()
    ordered = torch.cat(agree.gathered(own)).sort().values
    threshold = float(ordered[ceil((len(ordered) - 1) * (1 - share))]) if len(ordered) else 0.0
    return [
        (batch.external == external) & (entropy < threshold) for batch, entropy in zip(batches, entropies, strict=True)
    ]
