"""An evaluation for tests: correct answers of each problem, out of n samples."""

from collections.abc import Sequence
from dataclasses import replace

from rlplus.train.evaluation.results import Evaluation


def evaluation(correct: Sequence[int], n: int = 8, **changes: object) -> Evaluation:
    base = Evaluation(
        name="m",
        problems=tuple(range(len(correct))),
        n=(n,) * len(correct),
        correct=tuple(correct),
        k=(1, 4),
        temperature=1.0,
        seed=0,
        mean_response_length=3.5,
        truncated_share=0.25,
        statuses={"ok": n * len(correct)},
        mean_reward=sum(correct) / (n * len(correct)),
    )
    return replace(base, **changes)  # type: ignore[arg-type]
