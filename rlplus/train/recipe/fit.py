"""The optimizer steps of a model that a recipe trains alongside the policy."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import agree
from rlplus.train.data import MicroBatch
from rlplus.train.learner import Learner

SMALLEST_VARIANCE = 1e-8  # differences below it are rounding errors

Metrics = dict[str, tuple[float, float]]  # this rank's sum and count of each


def fit(
    name: str,
    learner: Learner,
    mini_batches: Iterable[Sequence[MicroBatch]],
    accumulate: Callable[[Sequence[MicroBatch]], Sequence[Any]],
    count: Callable[[bool], None],
) -> Metrics:
    """Take a step on each mini-batch, with gradients from `accumulate`; `count` as in `Recipe.fit`. Collective.

    Returns metrics `name`/loss, lr, nonfinite (the share of steps skipped for a non-finite gradient) and grad_norm.
    """
    totals = {metric: [0.0, 0.0] for metric in ("loss", "lr", "nonfinite", "grad_norm")}

    def add(metric: str, value: float) -> None:
        totals[metric][0] += value
        totals[metric][1] += 1

    for micro_batches in mini_batches:
        if not micro_batches:  # the grader failed on all of its samples
            continue
        add("lr", learner.lr)
        outputs = accumulate(micro_batches)
        applied = learner.step()
        count(applied)
        add("loss", dist.get_world_size() * sum(float(out.loss) for out in outputs))  # a sum over ranks, not a mean
        add("nonfinite", not applied)
        if applied and learner.grad_norm is not None:
            add("grad_norm", learner.grad_norm)
    return {f"{name}/{metric}": (total, n) for metric, (total, n) in totals.items()}


def whitened(advantages: Sequence[Tensor]) -> list[Tensor]:
    """Shift and scale advantages to mean 0 and variance 1 over the tokens of all ranks. Collective."""
    tokens = torch.cat([*advantages, torch.empty(0, dtype=torch.float32)])
    count, total = agree.sums(len(tokens), float(tokens.sum()))
    mean = total / max(count, 1)
    (squares,) = agree.sums(float((tokens - mean).square().sum()))
    scale = max(squares / max(count, 1), SMALLEST_VARIANCE) ** -0.5
    return [(advantage - mean) * scale for advantage in advantages]
