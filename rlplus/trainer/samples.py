"""The samples of a step: the groups' members, and their rewards."""

from collections.abc import Callable, Sequence
from math import nan

from rlplus import agree
from rlplus.config import Config
from rlplus.data import Example, Sample
from rlplus.errors import SharedFailure
from rlplus.recipe import Ask, demonstration
from rlplus.reward import Score, Scorer
from rlplus.rollout import Completion, Respond, RolloutEngine


def generate(
    engine: RolloutEngine,
    examples: Sequence[Example],
    asks: Sequence[Ask],
    config: Config,
    respond: Respond,
    seed: int,
) -> list[Sample]:
    """Every group's members, in order: its rollouts, then its demonstration where one is asked for."""
    rollouts: list[list[Completion]] = [[] for _ in examples]
    if config.algorithm.resolve().generates:  # on all ranks or on none: some engines are shared by several
        rollouts = respond(
            engine,
            examples,
            [ask.rollouts for ask in asks],
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_length,
            seed=seed,
        )
    samples = []
    for group, (example, ask, completions) in enumerate(zip(examples, asks, rollouts, strict=True)):
        for c in completions:
            sample = Sample(example.prompt, c.tokens, group, False, c.truncated, c.logprob)
            if c.trained is not None:
                sample.trained = c.trained
                sample.engine_logprob = [p if on else nan for p, on in zip(c.logprob, c.trained, strict=True)]
            if c.reward is not None:
                sample.reward, sample.scored = c.reward, True
            samples.append(sample)
        if ask.demonstrated:
            samples.append(demonstration(example, group))
    return samples


def score(
    samples: Sequence[Sample], examples: Sequence[Example], scorer: Scorer, decode: Callable[..., str]
) -> list[str]:
    """Set every sample's reward; returns each rollout's status, "ok" or what went wrong. Collective.

    Demonstrations are not graded again: one that the grader fails on now would get a negative advantage.
    SharedFailure where grading fails on one rank.
    """
    rollouts = [s for s in samples if not s.demonstration]
    ungraded = [s for s in rollouts if not s.scored]
    scores: list[Score] = []
    failure: Exception | None = None
    try:
        scores = scorer([decode(s.response) for s in ungraded], [examples[s.group].answer for s in ungraded])
    except ValueError as error:
        failure = error
    if what := agree.failures(failure):
        raise SharedFailure(f"the step's responses could not be graded: {what}") from failure
    for sample, result in zip(ungraded, scores, strict=True):
        sample.reward = result.value
    for sample in samples:
        if sample.demonstration:
            sample.reward = examples[sample.group].demonstration_reward
            assert not sample.masked, "want graded demonstrations"
    statuses = iter([result.status for result in scores])
    return ["ok" if s.scored else next(statuses) for s in rollouts]
