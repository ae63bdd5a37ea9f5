"""The samples of a step: the groups' members, and their rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from math import nan

from rlplus.algorithm import Shaping
from rlplus.common import agree
from rlplus.common.kept_sets import KeptSets
from rlplus.config import Config
from rlplus.data import Example, Sample
from rlplus.errors import SharedFailure
from rlplus.recipe import Ask, demonstration
from rlplus.reward import Score, Scorer
from rlplus.rollout import Completion, Request, Respond, RolloutEngine, Sampling, check_kept


def generate(
    engine: RolloutEngine,
    examples: Sequence[Example],
    asks: Sequence[Ask],
    config: Config,
    respond: Respond,
    seed: int,
) -> list[Sample]:
    """Every group's members, in order: its rollouts, then its demonstration or a replayed rollout if requested."""
    groups: list[list[Sample]] = [[] for _ in examples]
    if config.algorithm.resolve().generates:  # all ranks or none: some engines are shared by several
        asked = [(group, *alike) for group, ask in enumerate(asks) for alike in _alike(ask)]
        tasks = [_behind(examples[group], prefix) for group, prefix, _ in asked]
        requests = [
            Request(task.prompt, count, config.rollout.max_response_length - len(prefix))
            for task, (_, prefix, count) in zip(tasks, asked, strict=True)
        ]
        sampling = Sampling.of_training(config.rollout, seed)
        answers = check_kept(respond(engine, tasks, requests, sampling), sampling, engine.name)
        for (group, prefix, _), completions in zip(asked, answers, strict=True):
            groups[group] += [_rollout(examples[group], group, prefix, c) for c in completions]
    for group, (example, ask) in enumerate(zip(examples, asks, strict=True)):
        if ask.demonstrated:
            groups[group].append(demonstration(example, group))
        if ask.replayed is not None:
            groups[group].append(replace(ask.replayed, group=group))
    return [*chain(*groups)]


def _alike(ask: Ask) -> list[tuple[Sequence[int], int]]:
    """The prefixes of a group's rollouts, in order, each with the number of consecutive rollouts that have it."""
    prefixes = [*map(tuple, ask.prefixes), *[()] * (ask.rollouts - len(ask.prefixes))]
    return [(prefix, len(list(same))) for prefix, same in groupby(prefixes)]


def _behind(example: Example, prefix: Sequence[int]) -> Example:
    return replace(example, prompt=(*example.prompt, *prefix)) if prefix else example


def _rollout(example: Example, group: int, prefix: Sequence[int], c: Completion) -> Sample:
    """Prefix and completion as one response; the engine has no logprobs of the prefix."""
    sample = Sample(example.prompt, c.tokens, group, False, c.truncated, c.logprob, kept=c.kept)
    if c.reward is not None:
        sample.reward, sample.scored = c.reward, True
    if c.trained is not None:
        sample.trained = [True] * len(prefix) + c.trained
        sample.engine_logprob = [p if on else nan for p, on in zip(c.logprob, c.trained, strict=True)]
    if prefix:
        sample.response = [*prefix, *c.tokens]
        sample.external = [True] * len(prefix) + [False] * len(c.tokens)
        sample.engine_logprob = [*[nan] * len(prefix), *(sample.engine_logprob or ())]
        if c.kept is not None:
            sample.kept = KeptSets()
            sample.kept.skip(len(prefix))
            sample.kept.extend(c.kept)
        if example.behavior_logprob is not None:
            sample.behavior_logprob = [*example.behavior_logprob[: len(prefix)], *[nan] * len(c.tokens)]
    return sample


def score(samples: Sequence[Sample], examples: Sequence[Example], scorer: Scorer, decode: Callable[..., str]) -> None:
    """Set every sample's reward and status. Collective.

    Demonstrations and replayed rollouts are not graded again: one that the grader fails on now would get a negative
    advantage. SharedFailure if grading fails on one rank.
    """
    ungraded = [s for s in samples if not s.demonstration and not s.scored]
    scores: list[Score] = []
    failure: Exception | None = None
    try:
        rows = [examples[s.group] for s in ungraded]
        scores = scorer([decode(s.response) for s in ungraded], [e.answer for e in rows], [e.columns for e in rows])
    except ValueError as error:
        failure = error
    if what := agree.failures(failure):
        raise SharedFailure(f"the step's responses could not be graded: {what}") from failure
    for sample, result in zip(ungraded, scores, strict=True):
        sample.reward, sample.status, sample.detail = result.value, result.status, result.detail
    for sample in samples:
        if sample.demonstration and not sample.scored:
            sample.reward = examples[sample.group].demonstration_reward
            assert not sample.masked, "want graded demonstrations"


def shape(samples: Sequence[Sample], shaping: Shaping, max_response_length: int) -> None:
    """Shape the rewards; a demonstration of any length gets no penalty for it."""
    for sample in samples:
        length = 0 if sample.demonstration else len(sample.response)
        sample.grade = sample.reward
        sample.reward = shaping.reward(sample.reward, length, max_response_length)
