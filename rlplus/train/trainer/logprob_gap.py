"""Whether an engine gives the trainer's logprobs, up to rounding."""

import logging
from collections.abc import Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.train.config import MAX_LOGPROB_GAPS, Config
from rlplus.train.data import MicroBatch
from rlplus.train.learner import Policy
from rlplus.train.learner.widened import wider

ROUNDINGS = 3.0  # the gap of a right engine, which rounds for itself, is about 1.4 times the trainer's own rounding
ONE_DTYPE = ("dtype", "scalar type")  # in torch's errors about a product of two dtypes

Compared = tuple[MicroBatch, Tensor]  # and the engine's logprobs (N,), NaN where it sampled nothing

logger = logging.getLogger(__name__)


class LogprobGap:
    """The mean gap between the logprobs of an engine and of the trainer, and what of it is rounding. Collective."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self._explained = 0.0  # the largest mean gap that rounding was found to explain

    def fault(self, total: float, count: float, compared: Sequence[Compared], engine: str, when: str) -> str:
        """A sentence if the gap is larger than it may be; empty if not.

        total, count: this rank's sum of gaps and its number of tokens. The means are those of ranks, or of groups of
        ranks that share micro-batches, and each counts. Where `rollout.max_logprob_gap` is not given, more than the
        default is right as far as the model's own rounding explains it. Two forward passes measure that, where needed.
        """
        given = self.config.rollout.max_logprob_gap
        dtype = self.config.model.dtype
        limit = given or MAX_LOGPROB_GAPS[dtype]
        gaps = self._means(total, count)
        if max(gaps) <= (given or max(limit, self._explained)):
            return ""
        measured = self._rounding(compared) if isfinite(max(gaps)) else "not finite"
        roundings = [0.0] * len(gaps) if isinstance(measured, str) else measured
        gap, rounding = max(zip(gaps, roundings, strict=True), key=lambda pair: pair[0] - ROUNDINGS * pair[1])
        explained = all(g <= max(limit, ROUNDINGS * r) for g, r in zip(gaps, roundings, strict=True))
        found = (
            f"{when}: the mean gap between the logprobs of the {engine} engine and of the trainer is {gap:.2e}; "
            f"want at most {f'rollout.max_logprob_gap={given:g}' if given else f'{limit:g}'}"
        )
        wide = str(wider(getattr(torch, dtype))).removeprefix("torch.")
        own = f"the trainer's own logprobs change by {rounding:.2e} when its layers compute in {wide}, not {dtype}"
        if explained and not given:
            self._explained = max(max(gaps), ROUNDINGS * min(filter(None, roundings)))
            logger.warning("%s, or as much as rounding explains: %s", found, own)
            return ""
        if not isfinite(gap):
            why = "Not all of these logprobs are numbers"
        elif isinstance(measured, str):
            why = f"Its rounding could not be measured ({measured}): set rollout.max_logprob_gap to allow more"
        elif explained:
            why = f"Rounding explains it: {own}"
        else:
            why = f"Rounding does not explain it, the engine runs another model: {own}"
        return f"{found}. {why}. The policy was not changed"

    def _means(self, total: float, count: float) -> list[float]:
        """The mean of each rank, or group of ranks that share micro-batches; infinite for one that is not a number."""
        size = self.config.train.sequence_parallel
        each = agree.gathered((total, count))
        sums = [[sum(part) for part in zip(*each[i : i + size], strict=True)] for i in range(0, len(each), size)]
        means = [total / max(count, 1.0) for total, count in sums]
        return [mean if mean >= 0 else inf for mean in means]

    def _rounding(self, compared: Sequence[Compared]) -> list[float] | str:
        """The same means of the logprobs' change when the layers compute in a wider dtype; or why they are unknown."""
        total = 0.0
        count = 0
        try:
            for batch, engine_logprob in compared:
                change = self.policy.rounding(batch)[~engine_logprob.isnan()].double()
                change = change[change.isfinite()]
                total = total + float(change.sum())
                count = count + change.numel()
        except RuntimeError as error:
            if not any(word in str(error) for word in ONE_DTYPE):  # out of memory, or a rank that is gone
                raise
            return str(error)  # the same on all ranks: a layer whose products want one dtype
        return self._means(total, count)
