"""The average of the policy's weights: its parts on the ranks, and the collectives that bring them together."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import together
from torch import nn

from rlplus.train.learner import moving_average
from rlplus.train.learner.moving_average import MovingAverage, _part

BF16 = {"matrix": (7, 9), "one": (1,), "none": (0,), "scalar": (), "large": (50, 4), "small": (2, 2)}
FP32 = {"gate": (5,), "bias": (3, 2)}


def weights(seed: int) -> nn.ParameterDict:
    """Weights of two dtypes in turns. The average of two is exact in fp32, and mostly not in bf16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(name, shape, torch.bfloat16) for name, shape in BF16.items()]
    shapes[2:2] = [(name, shape, torch.float32) for name, shape in FP32.items()]
    drawn = {name: torch.randint(-255, 256, shape, generator=generator).to(dtype) for name, shape, dtype in shapes}
    return nn.ParameterDict(drawn).requires_grad_(False)


@pytest.mark.parametrize("limit", [1, 60, 240, moving_average.EXCHANGED])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_all_parts_reach_all_ranks_in_few_collectives(monkeypatch: pytest.MonkeyPatch, ranks: int, limit: int) -> None:
    """Uneven parts and empty ones, several tensors in one collective and one in several, two dtypes."""
    here, sent, all_gather = threading.local(), [], dist.all_gather

    def counted(every: list[torch.Tensor], own: torch.Tensor) -> None:
        sent.append(own.nbytes * len(every))
        all_gather(every, own, group=here.group)

    monkeypatch.setattr(dist, "all_gather", counted)
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(moving_average, "EXCHANGED", limit)

    def averaged(rank: int, group: dist.ProcessGroup) -> tuple[Any, Any, Any]:
        here.rank, here.group = rank, group
        copy = weights(0)
        average = MovingAverage(SimpleNamespace(reference=SimpleNamespace(lm=copy), trained=weights(1).items), 0.5)
        average.update()
        updated = {name: part.clone() for name, part in average.parts.items()}
        seen = {name: whole.clone() for name, whole in copy.items()}
        average.restore({name: part + 1 for name, part in updated.items()})
        return updated, seen, dict(copy)

    found = together(ranks, averaged)
    first, second = weights(0), weights(1)
    for name, whole in first.items():
        expected = (whole.float() + second[name].float()) / 2
        assert torch.equal(torch.cat([parts[name] for parts, _, _ in found]), expected.flatten())
        for _, seen, restored in found:
            assert torch.equal(seen[name], expected.to(whole.dtype))
            assert torch.equal(restored[name], (expected + 1).to(whole.dtype))
    if ranks == 1:
        assert not sent
        return
    assert max(sent) <= max(limit, 4 * ranks)  # a number of each rank, where the limit is less
    padded = sum(whole.itemsize * ranks * -(-whole.numel() // ranks) for whole in first.values())
    assert sum(sent) == 2 * ranks * padded
    if limit > 240:
        assert len(sent) == 2 * ranks * 2


def test_a_model_of_many_tensors_takes_few_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """340 tensors on 64 ranks, of which this is the first."""
    sent: list[int] = []
    monkeypatch.setattr(dist, "all_gather", lambda every, own: sent.append(own.nbytes * len(every)))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 64)
    monkeypatch.setattr(moving_average, "EXCHANGED", 2**20)
    copy = nn.ParameterDict({f"p{n}": torch.zeros(100 + 40 * n) for n in range(340)}).requires_grad_(False)
    MovingAverage(SimpleNamespace(reference=SimpleNamespace(lm=copy), trained=copy.items), 0.5).update()
    assert len(sent) == -(-sum(sent) // 2**20) == 9


def test_the_average_is_divided_among_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"a": torch.arange(7.0).view(7, 1), "b": torch.arange(2.0)}

    def parts(ranks: int, found: Callable[[], dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: ranks)
        made = []
        for rank in range(ranks):
            monkeypatch.setattr("torch.distributed.get_rank", lambda *_, rank=rank: rank)
            made.append(found())
        return made

    for before, after in ((1, 3), (3, 2), (5, 1), (2, 5)):
        saved = parts(before, lambda: {n: _part(w, torch.distributed.get_rank()) for n, w in whole.items()})
        new = parts(after, partial(MovingAverage.redistributed, SimpleNamespace(parts=whole), saved))
        for name, weight in whole.items():
            assert torch.equal(torch.cat([part[name] for part in new]), weight.flatten())
            assert max(len(part[name]) for part in new) == -(-len(weight) // after)
