"""The optimizer's settings of a model beside the policy, and the learning rate of each update."""

from dataclasses import dataclass
from math import ceil, cos, pi
from typing import Literal

from rlplus.train.config import TrainConfig


@dataclass(frozen=True)
class Optimization:
    """The optimizer of a model that a recipe trains beside the policy; the policy has its settings in `train`.

    The learning rate is constant after the warm-up: the policy's schedule would not fit the model's number of updates.
    weight_decay, grad_clip: None = as in `train`.
    """

    lr: float
    warmup_steps: int
    weight_decay: float | None = None
    grad_clip: float | None = None
    warmup_ratio: None = None
    lr_schedule: Literal["constant"] = "constant"
    lr_min_ratio: float = 0.0


def learning_rate(train: TrainConfig | Optimization, made: int, updates: int) -> float:
    """The learning rate of the update that follows `made` others, in a run of `updates` updates.

    In the w updates of the warm-up: lr (made + 1) / w. Afterwards, with x = (made - w) / (updates - w), at most 1, the
    progress after the warm-up: lr times 1, m + (1 - m) (1 - x), or m + (1 - m) (1 + cos(pi x)) / 2, where m is
    lr_min_ratio. These are transformers' schedules, except that there the first update of the warm-up has an lr of 0.
    """
    # 0.07 * 100 is 7.000000000000001, which must not become 8 updates.
    warmup = train.warmup_steps if train.warmup_ratio is None else ceil(train.warmup_ratio * updates - 1e-9)
    if made < warmup:
        return train.lr * (made + 1) / warmup
    left = 1 - min(1.0, (made - warmup) / max(1, updates - warmup))
    share = {"constant": 1.0, "linear": left, "cosine": (1 - cos(pi * left)) / 2}[train.lr_schedule]
    return train.lr * (train.lr_min_ratio + (1 - train.lr_min_ratio) * share)
