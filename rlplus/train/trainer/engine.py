"""The rollout engine of a run: its weights' version, its agreement with the trainer, and its failures."""

import logging
from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.common.agree import set_timeouts
from rlplus.common.errors import SharedFailure
from rlplus.train.config import MAX_LOGPROB_GAPS, Config
from rlplus.train.data import MicroBatch, Sample
from rlplus.train.learner import Policy
from rlplus.train.learner.batch import even_batches, ones
from rlplus.train.learner.widened import wider
from rlplus.train.reward import GraderFailed
from rlplus.train.rollout import Completion, Request, RolloutEngine, RunFailed, Sampling, check_experts, check_kept
from rlplus.train.trainer.progress import Answer, StepGivenUp, StopSignal

PROBES = 8  # prompts
PROBE_TOKENS = 7  # behind each prompt
ROUNDINGS = 3.0  # the gap of a right engine, which rounds for itself, is about 1.4 times the trainer's own rounding
ONE_DTYPE = ("dtype", "scalar type")  # in torch's errors about a product of two dtypes

Compared = tuple[MicroBatch, Tensor]  # and the engine's logprobs (N,), NaN where it sampled nothing

logger = logging.getLogger(__name__)


class EngineFailed(SharedFailure):
    """`clear`: the engine reported the cause, and a new one would fail in the same way."""

    def __init__(self, message: str, clear: bool) -> None:
        super().__init__(message)
        self.clear = clear


class NoEngine:
    """The engine of a run that samples nothing: it loads no model, and requests to it are a caller's mistake."""

    name = "no engine"

    def generate(self, *_: Any, **__: Any) -> list[list[Completion]]:
        raise AssertionError("want an engine (Config.needs_engine) before anything is sampled")

    def push_weights(self, *_: Any) -> None:
        raise AssertionError("want an engine (Config.needs_engine) before weights are pushed")

    def sleep(self) -> None: ...

    def close(self) -> None: ...


class SyncedEngine:
    """`engine` is the latest one from `make`. prompts: token ids, for probes. Collective."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        pad_id: int,
        make: Callable[[], RolloutEngine],
        stop: StopSignal,
    ) -> None:
        self.config = config
        self.policy = policy
        self.prompts = prompts
        self.pad_id = pad_id
        self._make = make
        self._stop = stop
        self.engine = self._new()
        self.gap = 0.0  # found by the last probe
        self._agreement = LogprobGap(config, policy)
        self._version: int | None = None  # that the engine has
        self._probed: int | None = None

    def _new(self) -> RolloutEngine:
        engine = self._make()
        set_timeouts()
        return engine

    def sync(self, version: int, *, probe: bool) -> None:
        """Push the policy's weights to the engine unless it has this version of them; RunFailed if that fails.

        probe: sample a few tokens and compare their logprobs with the trainer's, for samples that the trainer does not
        compare before it uses them. An engine's first weights are always probed, to fail early.
        """
        if version != self._version:
            self._version = None
            self.engine.push_weights(self.policy.pushed(), version)
            self._version = version
        if self._probed is None or (probe and version != self._probed):
            gaps, compared = self._probe()
            self.gap = float(gaps.mean()) if len(gaps) else 0.0
            self._probed = version
            self.check(float(gaps.sum()), len(gaps), compared, f"after the push of version {version}")

    def _probe(self) -> tuple[Tensor, list[Compared]]:
        """-> the gaps between the logprobs of this rank's tokens behind the first prompts, and their micro-batches."""
        rollout = self.config.rollout
        requests = [Request(prompt, 1, min(PROBE_TOKENS, rollout.max_response_length)) for prompt in self.prompts]
        sampling = Sampling.of_training(rollout, seed=0)
        answers = self._agreed(
            lambda: check_experts(
                check_kept(self.engine.generate(requests, sampling), sampling, self.engine.name),
                requests,
                sampling,
                self.engine.name,
            )
        )
        samples = [
            Sample(prompt, c.tokens, group, False, c.truncated, c.logprob, kept=c.kept, experts=c.experts)
            for group, (prompt, (c,)) in enumerate(zip(self.prompts, answers, strict=True))
        ]
        parallel = self.config.train.sequence_parallel
        if parallel > 1:  # ranks of a group need the same samples: all of the group's
            samples = [sample for part in agree.gathered(samples, parallel) for sample in part]
        batches = even_batches(samples, ones(samples), self.config, self.pad_id, self.policy.device)
        gaps = []
        for batch in batches:
            sampled = ~batch.engine_logprob.isnan()
            gaps.append((self.policy.logprob(batch) - batch.engine_logprob)[sampled].double().abs())
        return torch.cat(gaps), [(batch, batch.engine_logprob) for batch in batches]

    def check(self, total: float, count: float, compared: Sequence[Compared], when: str) -> None:
        """EngineFailed where `LogprobGap.fault` finds one."""
        if fault := self._agreement.fault(total, count, compared, self.engine.name, when):
            raise EngineFailed(fault, clear=True)

    def ask(self, question: Callable[[RolloutEngine], Answer], *, interruptible: bool = False) -> Answer:
        """`question(engine)`, which must not need other ranks. If it fails on one, EngineFailed on all.

        Before that, all ranks recreate a broken colocated engine once and repeat the question. SharedFailure if the
        grader failed. interruptible: a signal raises StepGivenUp, on all ranks.
        """
        rollout = self.config.rollout

        def call() -> Answer:
            return question(self.engine)

        if interruptible and not (rollout.mode == "colocated" and rollout.tensor_parallel_size > 1):
            call = self._stop.interruptible(call)  # ranks that share an engine wait for each other in it
        try:
            return self._agreed(call)
        except EngineFailed as failure:
            if failure.clear or rollout.mode != "colocated":  # one outside the trainer's process renews itself
                raise
            logger.warning("%s: starting a new one and asking again", failure)
            try:
                self._renew()
                return self._agreed(call)
            except RunFailed as again:
                raise EngineFailed(f"{failure}; then a new one: {again}", clear=True) from again

    def _agreed(self, call: Callable[[], Answer]) -> Answer:
        """`call` on every rank; an exception on one is raised on all, which would deadlock in the next collective."""
        failure: BaseException | None = None
        try:
            answer = call()
        except (Exception, StepGivenUp) as error:
            failure = error
        if not agree.largest(failure is not None):
            return answer
        if agree.largest(isinstance(failure, StepGivenUp)):
            self._stop.check()
        clear = (ValueError, RunFailed)
        what = agree.failures(failure, clear=clear)
        if agree.largest(isinstance(failure, GraderFailed)):  # the question was an evaluation
            raise SharedFailure(f"responses could not be graded: {what}") from failure
        raise EngineFailed(
            f"the rollout engine failed: {what}", bool(agree.largest(isinstance(failure, clear)))
        ) from failure

    def _renew(self) -> None:
        def make_again() -> None:
            try:
                self.engine.close()
            except Exception:
                logger.warning("the failed engine does not close", exc_info=True)
            self.engine = self._new()

        version = self._version
        self._version = None
        self._probed = None
        self._agreed(make_again)
        if version is not None:
            self.sync(version, probe=True)

    def sleep(self) -> None:
        self.engine.sleep()

    def close(self) -> None:
        self.engine.close()


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
