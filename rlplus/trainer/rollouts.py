"""The batches of a run: which prompts, generated when, with which weights."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlplus import agree
from rlplus.config import Config
from rlplus.data import Example, MicroBatch, PromptSampler, Sample
from rlplus.learner import Policy, dummy, forward_batches
from rlplus.objective import Algorithm
from rlplus.rollout import RolloutEngine
from rlplus.trainer.batch import generate
from rlplus.trainer.engine import EngineFailed, SyncedEngine
from rlplus.trainer.metrics import Tally


@dataclass
class Batch:
    """This rank's share of one step: `indices` of the run's examples, `seconds` that the engine took."""

    indices: list[int]
    samples: list[Sample]
    seconds: float


Question = Callable[[RolloutEngine], Batch]
Position = dict[str, int]  # of the sampler


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
        engine: SyncedEngine,
    ) -> None:
        self.config, self.algorithm, self.policy = config, algorithm, policy
        self.examples, self.sampler, self.pad_id, self.engine = examples, sampler, pad_id, engine
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._ahead: Batch | None = None
        self._coming: Future[Batch] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        # What `rewind` goes back to: the sampler's position and the batch ahead. And the position behind that batch.
        self._begin: tuple[Position, Batch | None] = sampler.state_dict(), None
        self._drawn_from: Position = sampler.state_dict()

    def next(self, step: int, tally: Tally) -> tuple[list[Example], Batch]:
        """Push the weights that step `step` trains and generate its batch with them.

        With train.overlap the batch is there already, from one update before, and the weights are for the one after it,
        whose generation starts.
        """
        overlap = self.config.train.overlap
        with tally.time("generate"):
            self._settle()
        self._begin = self.sampler.state_dict(), self._ahead
        if self.algorithm.demonstrations != "only":  # else nothing is sampled
            with tally.time("sync"):
                self.engine.sync(step, probe=overlap)
        if overlap:  # else the batch's own gap is logged
            tally.mean("mismatch/probe", self.engine.gap)
        with tally.time("generate"):
            batch = self._ahead or self.engine.ask(self._question(step), interruptible=True)
            self._ahead = None
            if overlap:
                self._drawn_from = self.sampler.state_dict()
                self._coming = self._thread.submit(self._question(step + 1), self.engine.engine)
            self.engine.sleep()
        return [self.examples[i] for i in batch.indices], batch

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, probed, for an evaluation."""
        self._settle()
        self.engine.sync(version, probe=True)

    def _settle(self) -> None:
        """Wait for the batch that is being generated, if one is: the engine answers one question at a time."""
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        try:
            self._ahead = self.engine.ask(lambda _: coming.result())
        except EngineFailed:
            self._begin = self._drawn_from, None  # its prompts were not used
            self.rewind()
            raise

    def _question(self, step: int) -> Question:
        """A function that generates the batch of a step, on this rank alone; the prompts are drawn now."""
        indices, demonstration_logprobs = self._draw()
        examples = [self.examples[i] for i in indices]
        # A seed of its own for every step and rank, the same after a resume.
        seed = (self.config.train.seed * 1_000_003 + step) * self.world + self.rank

        def ask(engine: RolloutEngine) -> Batch:
            start = time.perf_counter()
            samples = generate(engine, examples, self.algorithm, self.config, seed)
            if demonstration_logprobs:
                for sample, logprob in zip((s for s in samples if s.external), demonstration_logprobs, strict=True):
                    sample.engine_logprob = logprob
            return Batch(indices, samples, time.perf_counter() - start)

        return ask

    def _draw(self) -> tuple[list[int], list[list[float]]]:
        """This rank's share of the next prompts and, with train.overlap, their demonstrations' logprobs."""
        indices = self.sampler.next()[self.rank :: self.world]
        if not self.config.train.overlap or self.algorithm.demonstrations == "none":
            return indices, []
        examples = [self.examples[i] for i in indices]
        demonstrated = [e for e in examples if e.demonstration is not None]
        samples = [Sample(e.prompt, e.demonstration or [], 0, True, False, None) for e in demonstrated]
        budget, device = self.config.train.tokens_per_micro_batch, self.policy.device
        batches = forward_batches(samples, self.config, self.pad_id, device, budget)
        missing = int(agree.largest(len(batches))) - len(batches)
        logprobs: list[list[float]] = [[] for _ in samples]
        for batch in batches:
            values = self.policy.logprob(batch)
            for sequence in batch.sequence.unique().tolist():
                logprobs[sequence] = values[batch.sequence == sequence].tolist()
        for _ in range(missing):
            self.policy.logprob(dummy(self.pad_id).to(device))  # under ZeRO-3 all ranks take part in each forward pass
        return indices, logprobs

    def rewind(self) -> None:
        """Undo the last `next`, so that a checkpoint resumes before it; a batch still being generated is dropped."""
        self._coming = None
        position, self._ahead = self._begin
        self.sampler.load_state_dict(position)

    def state(self) -> Any:
        """The batch that was generated ahead, for a checkpoint of this rank; None where there is none."""
        self._settle()
        return self._ahead

    def restore(self, state: Any) -> None:
        self._ahead = state

    def close(self) -> None:
        self.engine.close()
        self._thread.shutdown(cancel_futures=True)


def use_engine_logprob(batch: MicroBatch) -> None:
    """old_logprob of a batch from `Rollouts` with train.overlap: of the policy that sampled it, engine or not."""
    batch.old_logprob = batch.engine_logprob
    batch.engine_logprob = batch.engine_logprob.where(~batch.external, torch.nan)
