"""Loss inputs from a forward pass before an update: ratios of whole sequences, and tokens of high entropy.

The op handles single tokens, so all of this is passed to it as per-token constants: an old_logprob and an
engine_logprob that give every token its sequence's ratio, and an advantage of 0 for tokens that are left out.
"""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.train.algorithm import Algorithm
from rlplus.train.data import MicroBatch


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
