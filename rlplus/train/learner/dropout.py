"""Dropout of a model's configuration, which RL turns off: a logprob of now and one of then must be of one policy."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

NAMES = ("dropout", "pdrop", "layerdrop", "drop_path", "jitter_noise")
"""Parts of configurations' fields that hold a probability or, for routers' noise, a width."""

logger = logging.getLogger(__name__)


def dropout_fields(config: PretrainedConfig) -> Iterator[tuple[PretrainedConfig, str, float]]:
    """(configuration, field, value) of randomness in training only: this configuration's, then those inside it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            yield from dropout_fields(value)
        elif any(part in name for part in NAMES) and isinstance(value, int | float) and value and value is not True:
            yield config, name, value


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """A copy that asks for none."""
    without = copy.deepcopy(config)
    for owner, name, _ in list(dropout_fields(without)):
        setattr(owner, name, 0.0)
    return without


def turn_off_dropout(lm: PreTrainedModel) -> None:
    """Turn off modules whose probability is not from the configuration."""
    for module in lm.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def say_dropout(config: PretrainedConfig) -> None:
    """Say on rank 0 what is turned off, if anything is."""
    found = {name: value for _, name, value in dropout_fields(config)}
    if found and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "the model's configuration asks for %s; RL turns it off, since the ratio of a token's logprobs must not "
            "depend on what was dropped",
            ", ".join(f"{name} {value:g}" for name, value in found.items()),
        )


@contextmanager
def dropout_of(lm: PreTrainedModel, config: PretrainedConfig) -> Iterator[None]:
    """Give the model's configuration the dropout of the other one, to write it."""
    owners: dict[Any, Any] = {type(lm.config): lm.config}
    owners |= {type(part): part for part in vars(lm.config).values() if isinstance(part, PretrainedConfig)}
    fields = [(owners[type(owner)], name, value) for owner, name, value in dropout_fields(config)]
    for owner, name, value in fields:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, _ in fields:
            setattr(owner, name, 0.0)
