"""What ranks tell each other on the way. Numbers pass through the CPU: no GPU is waited for."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_gloo: Any = None


def _group() -> Any:
    """A group of all ranks for tensors of the CPU. All come here for the first time together."""
    global _gloo
    if dist.get_backend() == "gloo":
        return None  # the default one
    if _gloo is None:
        _gloo = dist.new_group(backend="gloo")
    return _gloo


def sums(*values: float) -> list[float]:
    """Of all ranks' values, one by one; all ranks call it."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest(value: float) -> float:
    """Of all ranks' values, NaN not among them; all ranks call it."""
    return _reduced([value], dist.ReduceOp.MAX)[0]


def _reduced(values: Sequence[float], op: Any) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op, group=_group())
    return list(tensor.tolist())


def gathered(value: Any) -> list[Any]:
    """All ranks' values, pickled on the way; all ranks call it."""
    values = [value]
    if (world := dist.get_world_size()) > 1:
        values = [None] * world
        dist.all_gather_object(values, value, group=_group())
    return values


def failures(failure: BaseException | None, *, clear: tuple[type[BaseException], ...] = (Exception,)) -> str:
    """What failed on which rank; empty where nothing did. All ranks call it, with None where all went well.

    clear: exceptions whose message says all; of others the class is told, too.
    """
    text = str(failure) if isinstance(failure, clear) else repr(failure)
    texts = gathered(None if failure is None else text)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
