"""The samples of a step: the groups' members, and their rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from math import nan
from typing import NamedTuple

from rlplus.common import agree
from rlplus.common.chosen_experts import joined
from rlplus.common.errors import SharedFailure
from rlplus.common.kept_sets import KeptSets
from rlplus.train.algorithm import Shaping
from rlplus.train.config import Config
from rlplus.train.data import Example, Sample
from rlplus.train.recipe import Ask, demonstration
from rlplus.train.reward import Score, Scorer
from rlplus.train.rollout import Completion, Request, Respond, RolloutEngine, Sampling, check_experts, check_kept

LARGEST = 1e18  # magnitude of a reward: its square is a float32


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
            samples += [_continued(each.sample, c, by) for each, c in zip(same, next(answers), strict=True)]
        else:
            samples += [each.sample for each in same]
    return samples


def _alike(going: Going) -> tuple[object, ...]:
    return going.tokens, going.sample.group, going.sample.prompt, going.sample.response


def _behind(example: Example, tokens: Sequence[int]) -> Example:
    return replace(example, prompt=(*example.prompt, *tokens)) if tokens else example


def _continued(sample: Sample, c: Completion, version: int | None) -> Sample:
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
        prompts = {s.group: decode(examples[s.group].prompt) for s in ungraded}
        scores = scorer(
            [decode(s.response) for s in ungraded],
            [e.answer for e in rows],
            [e.columns for e in rows],
            prompts=[prompts[s.group] for s in ungraded],
            cut=[s.truncated for s in ungraded],
        )
        _check_size([*(s.reward for s in samples if s.scored), *(one.value for one in scores)])
    except ValueError as error:
        failure = error
    if what := agree.failures(failure):
        raise SharedFailure(f"the step's responses could not be graded: {what}") from failure
    for sample, result in zip(ungraded, scores, strict=True):
        sample.reward = result.value
        sample.status = result.status
        sample.detail = result.detail
    for sample in samples:
        if sample.demonstration and not sample.scored:
            sample.reward = examples[sample.group].demonstration_reward
            assert not sample.masked, "want graded demonstrations"


def _check_size(rewards: Sequence[float]) -> None:
    """ValueError for a reward whose mean or advantage would overflow; NaN is one that was left out."""
    if too_large := [reward for reward in rewards if abs(reward) > LARGEST]:
        raise ValueError(f"want rewards from {-LARGEST:.0e} to {LARGEST:.0e}; got {too_large[0]:g}")


def shape(samples: Sequence[Sample], shaping: Shaping, max_response_length: int) -> None:
    """Shape the rewards; a demonstration of any length gets no penalty for it."""
    for sample in samples:
        length = 0 if sample.demonstration else len(sample.response)
        sample.grade = sample.reward
        sample.reward = shaping.reward(sample.reward, length, max_response_length)
