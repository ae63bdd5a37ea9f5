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
from rlplus.trainer.groups import generate
from rlplus.trainer.metrics import Tally


@dataclass
class Drawn:
    """A `Batch` before scoring, with the `indices` of its examples in the run's data; the form in checkpoints.

    version: of the weights that sampled it, the number of steps that made them.
    """

    indices: list[int]
    samples: list[Sample]
    seconds: float
    version: int


Question = Callable[[RolloutEngine], Drawn]
Position = dict[str, int]  # the sampler's state


@dataclass
class Ahead:
    """A batch that is generated ahead. position: the sampler's, before the batch's prompts."""

    position: Position
    coming: Future[Drawn]

    def wait(self, _: RolloutEngine) -> Drawn:
        return self.coming.result()


class Rollouts:
    """`begin` a step, then `draw`, several times if needed but once with train.overlap. All ranks call both together.

    With train.overlap k every k-th step pushes its weights, and these sample the batches of the k steps behind it, one
    after the other in a thread, while the steps train; the first step samples its own batch, too. So a batch was
    sampled 1 to k steps before it is trained on. The delay is the same in every run; timing plays no part.

    Their old_logprob are the engine's: the sampling policy's, to the engine's accuracy, which the probe
    checks at every push. Demonstrations get theirs from the same weights, by a forward pass of the policy before they
    change. Both are part of the batch, and the batches ahead part of a checkpoint.
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
        self._ahead: list[Ahead] = []  # ordered as they are generated and trained on
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._begin: tuple[Position, list[Ahead]] = sampler.state(), []  # the target of `rewind`

    def begin(self, tally: Tally) -> None:
        """Start a step; `rewind` goes back to this point."""
        with tally.time("generate"):
            self._settle(1)
        self._begin = self.sampler.state(), list(self._ahead)

    def draw(self, step: int, tally: Tally) -> Batch:
        """Push the weights that step `step` trains and generate a batch with them, not scored yet.

        With train.overlap the batch exists already. If it is the last one, the weights are pushed for the next ones,
        whose generation starts.
        """
        overlap = self.config.train.overlap
        assert not overlap or self._ahead == self._begin[1], "want one draw per step with train.overlap"
        last = len(self._ahead) <= 1
        if last and self.recipe.algorithm.generates:
            with tally.time("sync"):
                self.engine.sync(step, probe=overlap > 0)
            if overlap:  # the batch's own gap is logged otherwise
                tally.mean("mismatch/probe", self.engine.gap)
        with tally.time("generate"):
            if self._ahead:
                drawn = self._ahead.pop(0).coming.result()
            else:
                drawn = self.engine.ask(self._question(step), interruptible=True)
            for _ in range(overlap if last else 0):
                position, question = self.sampler.state(), self._question(step)
                self._ahead.append(Ahead(position, self._thread.submit(question, self.engine.engine)))
        if overlap:
            tally.mean("batch/staleness", step - drawn.version)
        return Batch([self.examples[i] for i in drawn.indices], drawn.samples, drawn.seconds)

    def sync(self, version: int) -> None:
        """Push the policy's weights to the engine, with a probe, for an evaluation."""
        self._settle(len(self._ahead))
        self.engine.sync(version, probe=True)

    def _settle(self, count: int) -> None:
        """Wait for the first `count` batches ahead: the engine answers one question at a time.

        EngineFailed if one failed: its prompts, and the later batches', were not used.
        """
        for i, ahead in enumerate(self._ahead[:count]):
            try:
                self.engine.ask(ahead.wait)
            except EngineFailed:
                self._begin = ahead.position, self._ahead[:i]
                self.rewind()
                raise

    def _question(self, version: int) -> Question:
        """A function that generates the next batch with these weights, without other ranks; prompts are drawn now."""
        # A seed for every draw of every rank, the same after a resume.
        draw = self.sampler.drawn // self.sampler.batch
        seed = (self.config.train.seed * 1_000_003 + draw) * self.world + self.rank
        indices = self.recipe.prompts(self.sampler.next())
        examples = [self.examples[i] for i in indices]
        asks = self.recipe.ask(examples)
        logprobs = self._demonstration_logprobs(examples, asks) if self.config.train.overlap else []

        def question(engine: RolloutEngine) -> Drawn:
            start = time.perf_counter()
            samples = generate(engine, examples, asks, self.config, self.respond, seed)
            if logprobs:
                for sample, logprob in zip((s for s in samples if s.demonstration), logprobs, strict=True):
                    sample.engine_logprob = logprob
            return Drawn(indices, samples, time.perf_counter() - start, version)

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
        """Undo the draws since `begin`, so that a checkpoint resumes there; give up batches ahead that began since."""
        position, ahead = self._begin
        self._ahead = list(ahead)
        self.sampler.restore(position)

    def state(self) -> Any:
        """The batches that were generated ahead, for a checkpoint of this rank; None if there are none."""
        self._settle(len(self._ahead))
        return [vars(ahead.coming.result()) for ahead in self._ahead] or None

    def restore(self, state: Any) -> None:
        for batch in state or []:
            done: Future[Drawn] = Future()
            done.set_result(Drawn(**batch))
            self._ahead.append(Ahead(self.sampler.state(), done))
        self._begin = self.sampler.state(), list(self._ahead)

    def close(self) -> None:
        self.engine.close()
        self._thread.shutdown(cancel_futures=True)


def use_engine_logprob(batch: MicroBatch) -> None:
    """Set old_logprob of a batch from `Rollouts` with train.overlap, by the policy that sampled, to engine_logprob."""
    batch.old_logprob = batch.engine_logprob
    batch.engine_logprob = batch.engine_logprob.where(~batch.external, torch.nan)
