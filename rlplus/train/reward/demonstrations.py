"""Grading of the demonstrations, once per run, with the same result on all ranks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from rlplus.common import agree
from rlplus.train.data import Example
from rlplus.train.reward.scorer import Scorer

RewardOrStatus = float | str  # the reward of one that passed, at least 1; else the status under which it is dropped


@dataclass(frozen=True)
class DemonstrationReport:
    """Counts of graded demonstrations. `dropped`: by status; "ok" means graded as wrong."""

    graded: int
    kept: int
    dropped: dict[str, int]

    @property
    def dropped_share(self) -> float:
        return 1 - self.kept / self.graded if self.graded else 0.0

    def summary(self) -> str:
        names = {"ok": "wrong"}
        reasons = ", ".join(f"{count} {names.get(status, status)}" for status, count in sorted(self.dropped.items()))
        text = f"demonstrations: {self.kept} of {self.graded} pass the run's own reward"
        return f"{text}; dropped: {reasons}" if reasons else text


def grade_demonstrations(
    examples: Sequence[Example], scorer: Scorer, decode: Callable[[Sequence[int]], str]
) -> list[RewardOrStatus]:
    """The verdicts on all demonstrations, in order; every rank grades a share of them. Collective.

    `decode` must leave out the special tokens: a demonstration ends with one. ValueError on all ranks where grading
    fails on one.
    """
    agree.phase("demonstrations")
    rank = dist.get_rank()
    world = dist.get_world_size()
    own = [example for example in examples if example.demonstration is not None][rank::world]
    verdicts: list[RewardOrStatus] = []
    failure: Exception | None = None
    try:
        texts = [decode(e.demonstration or ()) for e in own]
        prompts = [decode(e.prompt) for e in own]
        scores = scorer(texts, [e.answer for e in own], [e.columns for e in own], prompts=prompts)
        verdicts = [score.value if score.value >= 1 else score.status for score in scores]  # NaN does not pass
    except ValueError as error:
        failure = error
    if what := agree.failures(failure):
        raise ValueError(f"the demonstrations could not be graded: {what}") from failure
    shares = agree.gathered(verdicts)
    return [shares[i % world][i // world] for i in range(sum(map(len, shares)))]


def keep_passed(
    examples: Sequence[Example], verdicts: Sequence[RewardOrStatus]
) -> tuple[list[Example], DemonstrationReport]:
    """Set `demonstration_reward`, and `demonstration` to None if it did not pass: training assumes that it is right."""
    kept = []
    left = iter(verdicts)
    dropped = Counter[str]()
    for example in examples:
        if example.demonstration is not None:
            verdict = next(left)
            if isinstance(verdict, str):
                example = replace(example, demonstration=None)
                dropped[verdict] += 1
            else:
                example = replace(example, demonstration_reward=verdict)
        kept.append(example)
    return kept, DemonstrationReport(len(verdicts), len(verdicts) - dropped.total(), dict(dropped))
