"""The draws of a run: their prompts, the time of their generation and the weights used for it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlplus.config import Config
from rlplus.data import Example, MicroBatch, PromptSampler, Sample
from rlplus.learner import Policy, by_sample
from rlplus.recipe import Ask, Batch, Recipe
from rlplus.rollout import Respond, RolloutEngine
from rlplus.trainer.engine import EngineFailed, SyncedEngine
from rlplus.trainer.metrics import Tally
from rlplus.trainer.samples import generate


@dataclass
class Drawn:
    """A `Batch` before scoring, with the `indices` of its examples in the run's data; the form in checkpoints."""

    indices: list[int]
    samples: list[Sample]
    seconds: float


Question = Callable[[RolloutEngine], Drawn]
Position = dict[str, int]  # of the sampler


class Rollouts:
    """`begin` a step, then `draw`, several times if needed but once with train.overlap. All ranks call both together.

    With train.overlap the batch of step k + 1 is generated in a thread while step k trains. It is sampled with the
    weights of step k, so its old_logprob are the engine's: those of the policy that sampled, to the engine's accuracy,
    which the probe checks at every push. Demonstrations get theirs from the same weights, by a forward pass of the
    policy before they change. Both are part of the batch, and the batch part of a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        policy: Policy,
        examples: Sequence[Example],
        sampler: PromptSampler,
        pad_id: int,
        engine: SyncedEngine,
        respond: Respond,
    ) -> None:
        self.config, self.recipe, self.policy = config, recipe, policy
        self.examples, self.sampler, self.pad_id, self.engine = examples, sampler, pad_id, engine
        self.respond = respond
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._ahead: Drawn | None = None
        self._coming: Future[Drawn] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        # The target of `rewind`: the sampler's position and the batch ahead. Then the position after that batch.
        self._begin: tuple[Position, Drawn | None] = sampler.state_dict(), None
        self._drawn_from: Position = sampler.state_dict()

    def begin(self, tally: Tally) -> None:
        """Start a step; `rewind` goes back to this point."""
        with tally.time("generate"):
            self._settle()
        self._begin = self.sampler.state_dict(), self._ahead

    def draw(self, step: int, tally: Tally) -> Batch:
        """Push the weights that step `step` trains and generate a batch with them, not scored yet.

        With train.overlap the batch exists already, from one update before; the weights are for the next batch, whose
        generation starts.
        """
        overlap = self.config.train.overlap
        assert self._coming is None, "want one draw per step with train.overlap"
        if self.recipe.algorithm.generates:
            with tally.time("sync"):
                self.engine.sync(step, probe=overlap)
        if overlap:  # without overlap the batch's own gap is logged
            tally.mean("mismatch/probe", self.engine.gap)
        with tally.time("generate"):
            drawn = self._ahead or self.engine.ask(self._question(), interruptible=True)
            self._ahead = None
            if overlap:
                self._drawn_from = self.sampler.state_dict()
                self._coming = self._thread.submit(self._question(), self.engine.engine)
        return Batch([self.examples[i] for i in drawn.indices], drawn.samples, drawn.seconds)

    def sync(self, version: int) -> None:
        """Push the policy's weights to the engine, with a probe, for an evaluation."""
        self._settle()
        self.engine.sync(version, probe=True)

    def _settle(self) -> None:
        """Wait for the batch that is being generated, if there is one: the engine answers one question at a time."""
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        try:
            self._ahead = self.engine.ask(lambda _: coming.result())
        except EngineFailed:
            self._begin = self._drawn_from, None  # its prompts were not used
            self.rewind()
            raise

    def _question(self) -> Question:
        """A function that generates the next batch, without other ranks; its prompts are drawn now."""
        # A seed for every draw of every rank, the same after a resume.
        draw = self.sampler.drawn // self.sampler.batch
        seed = (self.config.train.seed * 1_000_003 + draw) * self.world + self.rank
        indices = self.sampler.next()[self.rank :: self.world]
        examples = [self.examples[i] for i in indices]
        asks = self.recipe.ask(examples)
        logprobs = self._demonstration_logprobs(examples, asks) if self.config.train.overlap else []

        def question(engine: RolloutEngine) -> Drawn:
            start = time.perf_counter()
            samples = generate(engine, examples, asks, self.config, self.respond, seed)
            if logprobs:
                for sample, logprob in zip((s for s in samples if s.demonstration), logprobs, strict=True):
                    sample.engine_logprob = logprob
            return Drawn(indices, samples, time.perf_counter() - start)

        return question

    def _demonstration_logprobs(self, examples: Sequence[Example], asks: Sequence[Ask]) -> list[list[float]]:
        """Logprobs of the requested demonstrations under the current policy. Collective if the algorithm has any."""
        if not self.recipe.algorithm.demonstrates:
            return []
        demonstrated = [e for e, ask in zip(examples, asks, strict=True) if ask.demonstrated]
        samples = [Sample(e.prompt, e.demonstration or [], 0, True, False, None) for e in demonstrated]
        logprobs = by_sample(samples, self.policy.logprob, self.config, self.pad_id, self.policy.device)
        return [logprob.tolist() for logprob in logprobs]

    def rewind(self) -> None:
        """Undo the draws since `begin`, so that a checkpoint resumes there; drop a batch that is being generated."""
        self._coming = None
        position, self._ahead = self._begin
        self.sampler.load_state_dict(position)

    def state(self) -> Any:
        """The batch that was generated ahead, for a checkpoint of this rank; None without one."""
        self._settle()
        return self._ahead and vars(self._ahead)

    def restore(self, state: Any) -> None:
        self._ahead = state and Drawn(**state)

    def close(self) -> None:
        self.engine.close()
        self._thread.shutdown(cancel_futures=True)


def use_engine_logprob(batch: MicroBatch) -> None:
    """Set old_logprob of a batch from `Rollouts` with train.overlap, by the policy that sampled, to engine_logprob."""
    batch.old_logprob = batch.engine_logprob
    batch.engine_logprob = batch.engine_logprob.where(~batch.external, torch.nan)
