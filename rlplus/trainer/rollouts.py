"""The batches of a run: the rollout engine, which weights it has, what is generated ahead, what if the engine fails."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlplus.config import Config
from rlplus.data import Example, MicroBatch, PromptSampler, Sample, pack
from rlplus.objective import Algorithm
from rlplus.rollout import RolloutEngine, RunFailed
from rlplus.trainer.batch import generate, own_shards
from rlplus.trainer.metrics import Tally
from rlplus.trainer.policy import Policy
from rlplus.trainer.stop import Answer, StepGivenUp, StopSignal

PROBE_PROMPTS, PROBE_TOKENS = 8, 2  # a forward pass, and one more with what the first left in the cache

logger = logging.getLogger(__name__)


@dataclass
class Batch:
    """This rank's share of one step: `indices` of the run's examples, `seconds` that the engine took."""

    indices: list[int]
    samples: list[Sample]
    seconds: float


class Rollouts:
    """Use: `next`, once a step; all ranks call it together.

    With train.overlap the batch of step k + 1 is generated in a thread while step k trains. It is sampled with the
    weights of step k, so its old_logprob are the engine's: those of the policy that sampled, to the engine's accuracy,
    which the probe checks at every push. Demonstrations get theirs from the same weights, by a forward pass of the
    policy before they change. Both are part of the batch, and the batch part of a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        examples: Sequence[Example],
        sampler: PromptSampler,
        pad_id: int,
        make: Callable[[], RolloutEngine],
        stop: StopSignal,
    ) -> None:
        self.config, self.algorithm, self.policy = config, algorithm, policy
        self.examples, self.sampler, self.pad_id = examples, sampler, pad_id
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._make, self._stop = make, stop
        self.engine = make()
        self._version: int | None = None  # that the engine has
        self._probed: int | None = None  # the last version that was, with this gap
        self._gap = 0.0
        self._ahead: Batch | None = None
        self._coming: Future[Batch] | None = None
        self._before: tuple[dict[str, int], Batch | None] = sampler.state_dict(), None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")

    def next(self, step: int, tally: Tally) -> tuple[list[Example], Batch]:
        """Push the weights that step `step` trains and generate its batch with them.

        With train.overlap the batch is there already, from one update before, and the weights are for the one after it,
        whose generation starts.
        """
        overlap = self.config.train.overlap
        with tally.time("generate"):
            self._settle()
        self._before = self.sampler.state_dict(), self._ahead
        with tally.time("sync"):
            self.sync(step, probe=overlap)
        if overlap:  # else the batch's own gap is logged
            tally.mean("mismatch/probe", self._gap)
        with tally.time("generate"):
            batch = self._ahead or self._together(self._interruptible(self._request(step)))
            self._ahead = None
            if overlap:
                self._coming = self._thread.submit(self._request(step + 1))
            self.engine.sleep()
        return [self.examples[i] for i in batch.indices], batch

    def sync(self, version: int, *, probe: bool = True) -> None:
        """Give the engine the policy's weights, unless it has this version of them; RunFailed where it does not.

        probe: sample a few tokens and compare their logprobs. The trainer does so with every batch before it uses it,
        so this is for what is not compared later, and for an engine's first weights, to fail early.
        """
        self._settle()
        if version != self._version:
            self._version = None
            self.engine.push_weights(self.policy.weights(), version)
            self._version = version
        if self._probed is None or (probe and version != self._probed):
            self._gap = self._probe()
            self._probed = version
            if not self._gap <= (limit := max_gap(self.config)):
                raise RunFailed(
                    f"the mean gap between the logprobs of the {self.engine.name} engine and of the trainer is "
                    f"{self._gap:.2e} after the push of version {version}; want at most "
                    f"rollout.max_logprob_gap={limit:g}"
                )

    def _settle(self) -> None:
        """Wait for the batch that is being generated, if one is: the engine answers one question at a time."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self._ahead = self._together(coming.result)

    def _probe(self) -> float:
        prompt = self.examples[0].prompt[:PROBE_PROMPTS]
        prompts = [prompt[:length] for length in range(1, len(prompt) + 1)]
        rollout = self.config.rollout
        answers = self.engine.generate(
            prompts,
            [1] * len(prompts),
            temperature=rollout.temperature,
            max_tokens=min(PROBE_TOKENS, rollout.max_response_length),
            seed=0,
        )
        samples = [
            Sample(prompt, c.tokens, group, False, c.truncated, c.logprob)
            for group, (prompt, (c,)) in enumerate(zip(prompts, answers, strict=True))
        ]
        if (parallel := self.config.train.sequence_parallel) > 1:  # ranks of a group need the same: all of the group's
            everybody: list[list[Sample]] = [[] for _ in range(self.world)]
            dist.all_gather_object(everybody, samples)
            first = self.rank // parallel * parallel
            samples = [sample for part in everybody[first : first + parallel] for sample in part]
        (batch,) = self._pack(samples, len(samples) * self.config.max_sample_length)
        gaps = (self.policy.logprob(batch) - batch.engine_logprob).double().abs()
        gap = float(gaps.mean()) if gaps.numel() else 0.0  # a shard may have no response token
        return self._greatest(gap if gap >= 0 else float("inf"))  # NaN would be lost in a maximum

    def _greatest(self, value: float) -> float:
        """Of all ranks'."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self.policy.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def _pack(self, samples: list[Sample], tokens_per_micro_batch: int) -> list[MicroBatch]:
        batches = pack(
            samples,
            [torch.ones(len(s.response)) for s in samples],
            row_length=self.config.max_sample_length,
            tokens_per_micro_batch=tokens_per_micro_batch,
            pad_id=self.pad_id,
            multiple=self.config.train.sequence_parallel,
        )
        return [batch.to(self.policy.device) for batch in own_shards(batches, self.config)]

    def _draw(self) -> tuple[list[int], list[list[float]]]:
        """This rank's share of the next prompts and, with train.overlap, their demonstrations' logprobs."""
        indices = self.sampler.next()[self.rank :: self.world]
        if not self.config.train.overlap or self.algorithm.demonstrations == "none":
            return indices, []
        examples = [self.examples[i] for i in indices]
        samples = [Sample(e.prompt, e.demonstration, 0, True, False, None) for e in examples if e.demonstration]
        batches = self._pack(samples, self.config.train.tokens_per_micro_batch)
        most = int(self._greatest(len(batches)))  # under ZeRO-3 every rank takes part in every forward pass
        dummy = self._pack([Sample([self.pad_id], [self.pad_id], 0, False, False, None)], 2)
        logprobs: list[list[float]] = [[] for _ in samples]
        for batch in batches:
            values = self.policy.logprob(batch)
            for sequence in batch.sequence.unique().tolist():
                logprobs[sequence] = values[batch.sequence == sequence].tolist()
        for batch in dummy * (most - len(batches)):
            self.policy.logprob(batch)
        return indices, logprobs

    def _request(self, step: int) -> Callable[[], Batch]:
        """What generates the batch of a step, on this rank alone; the prompts are drawn now."""
        indices, demonstration_logprobs = self._draw()
        examples = [self.examples[i] for i in indices]
        # A seed of its own for every step and rank, the same after a resume.
        seed = (self.config.train.seed * 1_000_003 + step) * self.world + self.rank

        def ask() -> Batch:
            start = time.perf_counter()
            samples = generate(self.engine, examples, self.algorithm, self.config, seed)
            if demonstration_logprobs:
                for sample, logprob in zip((s for s in samples if s.external), demonstration_logprobs, strict=True):
                    sample.engine_logprob = logprob
            return Batch(indices, samples, time.perf_counter() - start)

        return ask

    def _interruptible(self, ask: Callable[[], Batch]) -> Callable[[], Batch]:
        """Ranks that share an engine wait for each other in it."""
        shared = self.config.rollout.mode == "colocated" and self.config.rollout.tensor_parallel_size > 1
        return ask if shared else self._stop.interruptible(ask)

    def rewind(self) -> None:
        """As if the last `next` had not been called, for a checkpoint. What is being generated ahead is not awaited."""
        self._coming = None
        position, self._ahead = self._before
        self.sampler.load_state_dict(position)

    def _together(self, ask: Callable[[], Answer], earlier: str = "") -> Answer:
        """`ask`, on every rank. When it fails on one, a colocated engine is made again on all, once, and asked again.

        Else all ranks raise RunFailed: one that went on alone would wait for the others in the next collective.
        earlier: the failure that led to a new engine.
        """
        failure: BaseException | None = None
        try:
            answer = ask()
        except (Exception, StepGivenUp) as error:
            failure = error
        if not self._greatest(failure is not None):
            return answer
        if self._greatest(isinstance(failure, StepGivenUp)):
            self._stop.check()
        clear = isinstance(failure, (ValueError, RunFailed))
        failures: list[Any] = [None] * self.world
        dist.all_gather_object(failures, failure and (str(failure) if clear else repr(failure), clear))
        what = "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in enumerate(failures) if failed)
        # What an engine says clearly, a new one would say again; one outside the trainer's process renews itself.
        if earlier or self.config.rollout.mode != "colocated" or any(failed and failed[1] for failed in failures):
            raise RunFailed(f"the rollout engine failed: {earlier}{what}") from failure
        logger.warning("the rollout engine failed (%s): starting a new one and generating again", what)
        earlier = f"{what}; and a new one: "
        self._together(self._renew, earlier)
        version, self._version, self._probed = self._version, None, None
        assert version is not None, "there is a push before every question"
        self.sync(version)
        return self._together(ask, earlier)

    def _renew(self) -> None:
        try:
            self.engine.close()
        except Exception:
            logger.warning("the failed engine does not close", exc_info=True)
        self.engine = self._make()

    def state(self) -> Any:
        """What was generated ahead, for a checkpoint of this rank; None where nothing is."""
        self._settle()
        return self._ahead

    def restore(self, state: Any) -> None:
        self._ahead = state

    def close(self) -> None:
        self.engine.close()
        self._thread.shutdown(cancel_futures=True)


def max_gap(config: Config) -> float:
    """The largest mean gap between the engine's and the trainer's logprobs, in nats."""
    return config.rollout.max_logprob_gap or (1e-4 if config.model.dtype == "float32" else 5e-2)


def take_samplers_logprob(batch: MicroBatch) -> None:
    """old_logprob of a batch from `Rollouts` with train.overlap: of the policy that sampled it, engine or not."""
    batch.old_logprob = batch.engine_logprob
    batch.engine_logprob = batch.engine_logprob.where(~batch.external, torch.nan)
