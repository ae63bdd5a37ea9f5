"""The draws of a run: their prompts, the members of their groups, when these are generated and with which weights."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import nan
from random import Random
from typing import Any, NamedTuple

import torch.distributed as dist

from rlplus.common.chosen_experts import joined
from rlplus.common.kept_sets import KeptSets
from rlplus.train.config import Config
from rlplus.train.data import Example, PromptSampler, Sample
from rlplus.train.learner import Policy, by_sample
from rlplus.train.recipe import Ask, Batch, Recipe, demonstration
from rlplus.train.rollout import Completion, Request, Respond, RolloutEngine, Sampling, check_experts, check_kept
from rlplus.train.trainer.engine import EngineFailed, SyncedEngine
from rlplus.train.trainer.metrics import Tally, tally_segments


@dataclass
class Drawn:
    """A `Batch` before scoring, with the `indices` of its examples in the run's data; the form in checkpoints.

    version: the step of the weights that sampled it, or its last segment; None until then. unfinished: the number of
    responses behind it that had not ended then.
    """

    indices: list[int]
    samples: list[Sample]
    seconds: float
    version: int | None
    unfinished: int = 0


Question = Callable[[RolloutEngine], list[Drawn]]  # the next batch, whole, and those that wait behind it
Position = dict[str, int]  # the sampler's state


@dataclass
class Ahead:
    """A batch that is generated ahead. position: the sampler's, before the batch's prompts."""

    position: Position
    coming: Future[list[Drawn]]

    def wait(self, _: RolloutEngine) -> list[Drawn]:
        return self.coming.result()


class Rollouts:
    """`begin` a step, then `draw`, several times if needed but once with train.overlap. All ranks call both together.

    With train.overlap k every k-th step pushes its weights, and these sample the batches of the k steps behind it, one
    after the other in a thread, while the steps train; the first step samples its own batch, too. So a batch was
    sampled 1 to k steps before it is trained on. The delay is the same in every run; timing plays no part.

    Their old_logprob are the engine's: the sampling policy's, to the engine's accuracy, which the probe
    checks at every push. Demonstrations get theirs from the same weights, by a forward pass of the policy before they
    change. Both are part of the batch, and the batches ahead part of a checkpoint.

    With rollout.segment N batches are begun `RolloutConfig.waiting` draws before the one that returns them. Each draw
    asks the engine once: for the rest of the batch that it returns, and for N more tokens of every response that waits
    behind it and has not ended. Those are part of a checkpoint, too; the engine knows nothing of them.
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
        self.config = config
        self.recipe = recipe
        self.policy = policy
        self.examples = examples
        self.sampler = sampler
        self.pad_id = pad_id
        self.engine = engine
        self.respond = respond
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._ahead: list[Ahead] = []  # ordered as they are generated and trained on
        self._waiting: list[Drawn] = []  # behind the batch that was drawn last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._begin: tuple[Position, list[Ahead], list[Drawn]] = sampler.state(), [], []  # the target of `rewind`

    def begin(self, tally: Tally) -> None:
        """Start a step; `rewind` goes back to this point."""
        with tally.time("generate"):
            self._settle(1)
        self._begin = self.sampler.state(), list(self._ahead), self._waiting

    def draw(self, step: int, tally: Tally) -> Batch:
        """Push the weights that step `step` trains and generate a batch with them, not scored yet.

        With train.overlap the batch exists already. If it is the last one, the weights are pushed for the next ones,
        whose generation starts.
        """
        overlap = self.config.train.overlap
        stale = self.config.stale
        assert not overlap or self._ahead == self._begin[1], "want one draw per step with train.overlap"
        last = len(self._ahead) <= 1
        if last and self.recipe.algorithm.generates:
            with tally.time("sync"):
                self.engine.sync(step, probe=stale)
            if stale:  # the batch's own gap is logged otherwise
                tally.mean("mismatch/probe", self.engine.gap)
        with tally.time("generate"):
            if self._ahead:
                drawn, *self._waiting = self._ahead.pop(0).coming.result()
            else:
                drawn, *self._waiting = self.engine.ask(self._question(step), interruptible=True)
            for _ in range(overlap if last else 0):
                position = self.sampler.state()
                question = self._question(step)
                self._ahead.append(Ahead(position, self._thread.submit(question, self.engine.engine)))
        if self.config.rollout.segment:
            tally_segments(tally, drawn.samples, step)
            tally.mean("batch/waiting", drawn.unfinished * self.world)
        elif drawn.version is not None and overlap:
            tally.mean("batch/staleness", step - drawn.version)
        return Batch([self.examples[i] for i in drawn.indices], drawn.samples, drawn.seconds, drawn.indices)

    def again(self, batch: Batch, asks: Mapping[int, Ask], tries: int, step: int, tally: Tally) -> Batch:
        """Other members of groups of the batch that was drawn last, sampled with the same weights, not scored yet.

        asks: by group; may be empty on this rank. tries: how many times some were sampled again, this one included.
        ValueError with train.overlap: the engine is sampling the batches ahead then.
        """
        if self.config.train.overlap:
            name = type(self.recipe).__name__
            raise ValueError(f"{name} samples groups again: want train.overlap 0; got {self.config.train.overlap}")
        groups = sorted(asks)
        examples = [batch.examples[group] for group in groups]
        going = [Going(examples[s.group], s, room(s, self.config)) for s in begin(examples, [asks[g] for g in groups])]
        seed = Random(f"{self.config.train.seed} {self.sampler.drawn} {tries} {self.rank} {self.world}").getrandbits(48)
        start = time.perf_counter()
        with tally.time("generate"):
            samples = self.engine.ask(
                lambda engine: generate(engine, going, self.config, self.respond, seed, step), interruptible=True
            )
        if self.config.rollout.segment:
            tally_segments(tally, samples, step)
        samples = [replace(sample, group=groups[sample.group]) for sample in samples]
        return Batch(batch.examples, samples, time.perf_counter() - start, batch.indices)

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
                waiting = self._ahead[i - 1].coming.result()[1:] if i else self._waiting
                self._begin = ahead.position, self._ahead[:i], waiting
                self.rewind()
                raise

    def _question(self, version: int) -> Question:
        """A function that generates the next batch with these weights, and a segment of those behind it.

        Without other ranks; prompts are drawn now.
        """
        newest = self._ahead[-1].coming if self._ahead else None
        waiting = self._waiting
        count = len(self._waiting)
        if newest is not None:
            count = self.config.rollout.waiting
        # A seed for every draw of every rank, the same after a resume.
        draw = self.sampler.drawn // self.sampler.batch - count
        seed = (self.config.train.seed * 1_000_003 + draw) * self.world + self.rank
        begun = [self._begun() for _ in range(self.config.rollout.waiting + 1 - count)]

        def question(engine: RolloutEngine) -> list[Drawn]:
            before = waiting if newest is None else newest.result()[1:]
            return self._continued(engine, [*before, *begun], seed, version)

        return question

    def _begun(self) -> Drawn:
        """The next prompts, and what is there of their groups before anything is sampled. Collective."""
        indices = self.recipe.prompts(self.sampler.next())
        examples = [self.examples[i] for i in indices]
        samples = begin(examples, self.recipe.ask(examples))
        if self.config.train.overlap and self.recipe.algorithm.demonstrates:
            self._set_demonstration_logprobs(samples)
        return Drawn(indices, samples, 0.0, None)

    def _set_demonstration_logprobs(self, samples: Sequence[Sample]) -> None:
        """Set the engine's logprobs of the demonstrations to those under the current policy. Collective."""
        shown = [sample for sample in samples if sample.demonstration]
        logprobs = by_sample(shown, self.policy.logprob, self.config, self.pad_id, self.policy.device)
        for sample, logprob in zip(shown, logprobs, strict=True):
            sample.engine_logprob = logprob.tolist()

    def _continued(self, engine: RolloutEngine, batches: Sequence[Drawn], seed: int, version: int) -> list[Drawn]:
        """The first batch whole, and a segment more of each of the others. All samples that change are new ones."""
        start = time.perf_counter()
        segment = self.config.rollout.segment
        samples = [sample for batch in batches for sample in batch.samples]
        if self.recipe.algorithm.generates:  # all ranks or none: some engines are shared by several
            going = []
            for place, batch in enumerate(batches):
                for sample in batch.samples:
                    left = room(sample, self.config)
                    tokens = min(left, segment) if place and segment else left
                    going.append(Going(self.examples[batch.indices[sample.group]], sample, tokens))
            samples = generate(engine, going, self.config, self.respond, seed, version)
        rest = iter(samples)
        first, *others = [replace(batch, samples=[next(rest) for _ in batch.samples]) for batch in batches]
        unfinished = sum(room(sample, self.config) > 0 for batch in others for sample in batch.samples)
        seconds = time.perf_counter() - start
        return [replace(first, seconds=seconds, version=version, unfinished=unfinished), *others]

    def rewind(self) -> None:
        """Undo the draws since `begin`, so that a checkpoint resumes there; give up batches ahead that began since."""
        position, ahead, self._waiting = self._begin
        self._ahead = list(ahead)
        self.sampler.restore(position)

    def state(self) -> Any:
        """The batches that were generated ahead, then those that wait, for a checkpoint of this rank; None if none."""
        self._settle(len(self._ahead))
        ahead = [ahead.coming.result() for ahead in self._ahead]
        waiting = ahead[-1][1:] if ahead else self._waiting
        return [vars(batch) for batch in (*(whole for whole, *_ in ahead), *waiting)] or None

    def redistributed(self, states: Sequence[Any]) -> Any:
        """This rank's share of the batches in the states of another number of ranks."""
        every = [[Drawn(**batch) for batch in state or []] for state in states]
        return [vars(_share(parts, self.rank, self.world)) for parts in zip(*every, strict=True)] or None

    def restore(self, state: Any) -> None:
        batches = [Drawn(**batch) for batch in state or []]
        self._waiting = [batch for batch in batches if batch.version is None]
        for batch in batches:
            if batch.version is not None:
                done: Future[list[Drawn]] = Future()
                done.set_result([batch, *self._waiting])
                self._ahead.append(Ahead(self.sampler.state(), done))
        self._begin = self.sampler.state(), list(self._ahead), self._waiting

    def close(self) -> None:
        self.engine.close()
        self._thread.shutdown(cancel_futures=True)


def _share(parts: Sequence[Drawn], rank: int, world: int) -> Drawn:
    """A rank's share of a batch that other ranks have in `parts`: its prompts are dealt out in turn."""
    if len(counts := {len(part.indices) for part in parts}) > 1:
        raise ValueError(
            f"want {len(parts)} ranks, as the checkpoint's: its ranks have unequal shares of a batch that waits, "
            f"{min(counts)} to {max(counts)} prompts, which others cannot put in order; got {world}"
        )
    groups: list[tuple[int, list[Sample]]] = []
    for part in parts:
        members: list[list[Sample]] = [[] for _ in part.indices]
        for sample in part.samples:
            members[sample.group].append(sample)
        groups += zip(part.indices, members, strict=True)
    count = len(parts[0].indices)
    mine = [groups[i % len(parts) * count + i // len(parts)] for i in range(rank, len(groups), world)]
    return replace(
        parts[0],
        indices=[index for index, _ in mine],
        samples=[replace(sample, group=group) for group, (_, members) in enumerate(mine) for sample in members],
        seconds=max(part.seconds for part in parts),
        unfinished=0 if rank else sum(part.unfinished for part in parts),  # only the sum over ranks is used
    )


def begin(examples: Sequence[Example], asks: Sequence[Ask]) -> list[Sample]:
    """Every group's members, in order: its rollouts, then its demonstration or a replayed rollout if requested.

    A rollout has the tokens of its prefix, if it has one, and no others yet. Until it ends it is `truncated`.
    """
    samples = []
    for group, (example, ask) in enumerate(zip(examples, asks, strict=True)):
        prefixes = [*ask.prefixes, *[()] * (ask.rollouts - len(ask.prefixes))]
        samples += [_rollout(example, group, prefix) for prefix in prefixes]
        if ask.demonstrated:
            samples.append(demonstration(example, group))
        if ask.replayed is not None:
            samples.append(replace(ask.replayed, group=group))
    return samples


def _rollout(example: Example, group: int, prefix: Sequence[int]) -> Sample:
    """A response that begins with the prefix; the engine has no logprobs of that."""
    sample = Sample(example.prompt, [*prefix], group, False, True, [nan] * len(prefix))
    if prefix:
        sample.external = [True] * len(prefix)
        if example.behavior_logprob is not None:
            sample.behavior_logprob = example.behavior_logprob[: len(prefix)]
    return sample


def room(sample: Sample, config: Config) -> int:
    """The number of tokens that may still be sampled; 0 if the response has ended."""
    return config.rollout.max_response_length - len(sample.response) if sample.truncated else 0


class Going(NamedTuple):
    """A sample, its example, and the number of tokens to sample for it now, at most."""

    example: Example
    sample: Sample
    tokens: int


def generate(
    engine: RolloutEngine, going: Sequence[Going], config: Config, respond: Respond, seed: int, version: int
) -> list[Sample]:
    """The samples, continued by one call of the engine; those for which no token is to be sampled as they are.

    Neighbours that are continued alike, such as members of a group that begin, are one request. version: of the
    engine's weights.
    """
    alike = [[*same] for _, same in groupby(going, _alike)]
    asked = [same for same in alike if same[0].tokens]
    tasks = [_behind(example, sample.response) for (example, sample, _), *_ in asked]
    requests = [Request(t.prompt, len(same), same[0].tokens) for t, same in zip(tasks, asked, strict=True)]
    sampling = Sampling.of_training(config.rollout, seed)
    given = check_kept(respond(engine, tasks, requests, sampling), sampling, engine.name)
    answers = iter(check_experts(given, requests, sampling, engine.name))
    samples = []
    for same in alike:
        if same[0].tokens:
            by = version if config.rollout.segment else None
            samples += [_extended(each.sample, c, by) for each, c in zip(same, next(answers), strict=True)]
        else:
            samples += [each.sample for each in same]
    return samples


def _alike(going: Going) -> tuple[object, ...]:
    return going.tokens, going.sample.group, going.sample.prompt, going.sample.response


def _behind(example: Example, tokens: Sequence[int]) -> Example:
    return replace(example, prompt=(*example.prompt, *tokens)) if tokens else example


def _extended(sample: Sample, c: Completion, version: int | None) -> Sample:
    """A copy with the completion behind its tokens so far. version: of the weights, if it is to be noted."""
    before = len(sample.response)
    new = len(c.tokens)
    logprob = c.logprob
    sample = replace(sample, response=[*sample.response, *c.tokens], truncated=c.truncated)
    if c.reward is not None:
        sample.reward = c.reward
        sample.scored = True
    sample.metrics = c.metrics
    if c.trained is not None:
        sample.trained = [True] * before + c.trained
        logprob = [p if on else nan for p, on in zip(c.logprob, c.trained, strict=True)]
    sample.engine_logprob = [*(sample.engine_logprob or ()), *logprob]
    if not isinstance(sample.external, bool):
        sample.external = [*sample.external, *[False] * new]
    if sample.behavior_logprob is not None:
        sample.behavior_logprob = [*sample.behavior_logprob, *[nan] * new]
    if c.kept is not None:
        so_far = sample.kept
        sample.kept = KeptSets()
        if so_far is None:
            sample.kept.skip(before)
        else:
            sample.kept.extend(so_far)
        sample.kept.extend(c.kept)
    if c.experts is not None:
        sample.experts = joined(sample.experts, c.experts)
    if version is not None:
        sample.segments = [*sample.segments, (version, new)]
    return sample
