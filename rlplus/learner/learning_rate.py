"""The learning rate of each update."""

from math import ceil, cos, pi

from rlplus.config import TrainConfig


def learning_rate(train: TrainConfig, made: int, updates: int) -> float:
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
