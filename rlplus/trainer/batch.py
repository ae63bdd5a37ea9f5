"""Groups: who is in one, and what each member is worth."""

from collections.abc import Callable, Sequence

import torch

from rlplus import agree
from rlplus.config import Config
from rlplus.data import Example, Sample
from rlplus.errors import SharedFailure
from rlplus.objective import Algorithm, group_advantages
from rlplus.reward import Score, Scorer
from rlplus.rollout import RolloutEngine


def generate(
    engine: RolloutEngine, examples: Sequence[Example], algorithm: Algorithm, config: Config, seed: int
) -> list[Sample]:
    """Every group's members, in order: its rollouts, then its demonstration where the algorithm uses one.

    A demonstration takes the place of a rollout, which is not generated. A prompt without one gets a full group.
    """
    takes_place = [algorithm.demonstrations in ("group", "apart") and e.demonstration is not None for e in examples]
    rollouts: list[list] = [[] for _ in examples]
    if algorithm.demonstrations != "only":
        rollouts = engine.generate(
            [e.prompt for e in examples],
            [config.rollout.group_size - taken for taken in takes_place],
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_length,
            seed=seed,
        )
    samples = []
    for group, (example, completions) in enumerate(zip(examples, rollouts, strict=True)):
        for c in completions:
            samples.append(Sample(example.prompt, c.tokens, group, False, c.truncated, c.logprob))
        if example.demonstration is not None and algorithm.demonstrations != "none":
            samples.append(Sample(example.prompt, example.demonstration, group, True, False, None))
    return samples


def score(
    samples: Sequence[Sample], examples: Sequence[Example], scorer: Scorer, decode: Callable[..., str]
) -> list[str]:
    """Set every sample's reward; returns each rollout's status, "ok" or what went wrong. Collective.

    Demonstrations are not graded again: one that the grader fails on now would get a negative advantage.
    SharedFailure where grading fails on one rank.
    """
    rollouts = [s for s in samples if not s.external]
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
        if sample.external:
            sample.reward = examples[sample.group].demonstration_reward
            assert not sample.masked, "want graded demonstrations"
    return [result.status for result in scores]


def set_advantages(samples: Sequence[Sample], algorithm: Algorithm) -> None:
    """Group-relative advantages; demonstrations that stand apart do not enter the statistics."""
    external = torch.tensor([s.external for s in samples], dtype=torch.bool)
    advantages = group_advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        torch.tensor([s.group for s in samples], dtype=torch.int64),
        normalize_std=algorithm.normalize_std,
        include=~external if algorithm.demonstrations == "apart" else None,
    )
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage
