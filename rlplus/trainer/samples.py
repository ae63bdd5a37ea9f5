"""The samples of a step: the groups' members, and their rewards."""

from collections.abc import Callable, Sequence

from rlplus import agree
from rlplus.config import Config
from rlplus.data import Example, Sample
from rlplus.errors import SharedFailure
from rlplus.objective import Shaping
from rlplus.recipe import Ask
from rlplus.reward import Score, Scorer
from rlplus.rollout import RolloutEngine


def generate(
    engine: RolloutEngine, examples: Sequence[Example], asks: Sequence[Ask], config: Config, seed: int
) -> list[Sample]:
    """Every group's members, in order: its rollouts, then its demonstration where one is asked for."""
    rollouts: list[list] = [[] for _ in examples]
    if config.algorithm.resolve().generates:  # on all ranks or on none: some engines are shared by several
        rollouts = engine.generate(
            [e.prompt for e in examples],
            [ask.rollouts for ask in asks],
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_length,
            seed=seed,
        )
    samples = []
    for group, (example, ask, completions) in enumerate(zip(examples, asks, rollouts, strict=True)):
        for c in completions:
            samples.append(Sample(example.prompt, c.tokens, group, False, c.truncated, c.logprob))
        if ask.demonstrated:
            assert example.demonstration is not None, "want a demonstration to show"
            samples.append(Sample(example.prompt, example.demonstration, group, True, False, None))
    return samples


def score(
    samples: Sequence[Sample], examples: Sequence[Example], scorer: Scorer, decode: Callable[..., str]
) -> list[str]:
    """Set every sample's reward; returns each rollout's status, "ok" or what went wrong. Collective.

    Demonstrations are not graded again: one that the grader fails on now would get a negative advantage.
    SharedFailure where grading fails on one rank.
    """
    rollouts = [s for s in samples if not s.demonstration]
    scores: list[Score] = []
    failure: Exception | None = None
    try:
        scores = scorer([decode(s.response) for s in rollouts], [examples[s.group].answer for s in rollouts])
    except ValueError as error:
        failure = error
    if what := agree.failures(failure):
        raise SharedFailure(f"the step's responses could not be graded: {what}") from failure
    for sample, result in zip(rollouts, scores, strict=True):
        sample.reward = result.value
    for sample in samples:
        if sample.demonstration:
            sample.reward = examples[sample.group].demonstration_reward
            assert not sample.masked, "want graded demonstrations"
    return [result.status for result in scores]


def shape(samples: Sequence[Sample], shaping: Shaping, max_response_length: int) -> None:
    """Shape the rewards; a demonstration, however long, gets no penalty for its length."""
    for sample in samples:
        length = 0 if sample.demonstration else len(sample.response)
        sample.reward = shaping.reward(sample.reward, length, max_response_length)
