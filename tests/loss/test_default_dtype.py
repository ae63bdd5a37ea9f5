"""torch's default dtype, which users set to bf16 to load models, changes no number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from update_cases import batch_of_samples

from rlplus import batch_advantages, group_advantages, policy_loss, token_weights
from rlplus.loss.objective.objective import AdvantageEstimator
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.algorithm.formulas import generalized_advantages, process_advantages
from rlplus.train.recipe import set_advantages

GROUPS = torch.tensor([0] * 3 + [1] * 7 + [2] * 11)
REWARDS = torch.rand(21, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = torch.rand(21, 9, generator=torch.Generator().manual_seed(2)) < 0.7
SCORES = torch.rand(2, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def advantages(estimator: Any) -> Callable[[], Tensor]:
    return lambda: batch_advantages(REWARDS, GROUPS, estimator, tokens=MASK.sum(1), k=2)


def assigned(preset: str) -> Callable[[], list[float]]:
    def compute() -> list[float]:
        samples = batch_of_samples()
        set_advantages(samples, ALGORITHMS[preset])
        return [sample.advantage for sample in samples]

    return compute


def loss(preset: str) -> Callable[[], Any]:
    objective = ALGORITHMS[preset].objective
    generator = torch.Generator().manual_seed(3)
    logprob, old, behavior = -torch.rand(3, 40, generator=generator, dtype=torch.float32)
    entropy = torch.rand(40, generator=generator, dtype=torch.float32)

    def compute() -> Any:
        live = logprob.clone().requires_grad_()
        total, stats = policy_loss(
            live, old_logprob=old, behavior_logprob=behavior, ref_logprob=old, engine_logprob=old, entropy=entropy,
            advantage=torch.linspace(-1, 1, 40, dtype=torch.float32), objective=objective,
            token_weight=torch.full((40,), 1 / 3, dtype=torch.float32), external=torch.arange(40) % 3 == 0,
        )  # fmt: skip
        total.backward()
        return total.detach(), live.grad, *stats.values()

    return compute


NUMBERS: dict[str, Callable[[], Any]] = {
    **{f"advantages {name}": advantages(name) for name in get_args(AdvantageEstimator)},
    **{f"loss {name}": loss(name) for name in ALGORITHMS},
    "a batch's advantages": assigned("rlplus"),
    "group advantages": lambda: group_advantages(REWARDS, GROUPS),
    "token weights": lambda: token_weights(MASK),
    "sequence weights": lambda: token_weights(MASK, "sequence"),
    "process advantages": lambda: process_advantages([0.1, 0.3], [SCORES[0], SCORES[1]]),
    "generalized advantages": lambda: generalized_advantages([0.1, 0.3], list(SCORES), gamma=0.9, gae_lambda=0.95),
}


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [torch.as_tensor(value, dtype=getattr(value, "dtype", torch.float64)) for value in found]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_depends_on_the_default_dtype(name: str) -> None:
    want = tensors(NUMBERS[name]())
    with default_dtype(torch.bfloat16):
        got = tensors(NUMBERS[name]())
    assert [value.dtype for value in got] == [value.dtype for value in want]
    assert all(map(torch.equal, got, want))
