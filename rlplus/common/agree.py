"""The collectives of this package; if a rank is gone, the error names it and what each rank was doing.

Small ones run on the CPU, without waiting for a GPU: sums, maxima, gathered objects, failures.

Ranks report long work before a collective as a `phase`, so that a timeout can say which rank waited for which.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import activity, durable

timeout = timedelta(hours=1)  # a collective's limit
_gloo: Any = None


def _group() -> Any:
    """A group of all ranks for tensors on the CPU. Collective at the first call."""
    global _gloo
    if dist.get_backend() == "gloo":
        return None  # the default one
    if _gloo is None:
        _gloo = dist.new_group(backend="gloo", timeout=timeout)
    return _gloo


def phase(name: str) -> None:
    """Report that this rank starts phase `name`, such as "generate"."""
    activity.current.begin(name)
    if dist.get_world_size() > 1:
        with suppress(RuntimeError):  # the store is gone with another rank, which the next collective reports
            _store().set(f"phase of rank {dist.get_rank()}", name)


def sums(*values: float) -> list[float]:
    """Element-wise sums over all ranks. Collective."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest(value: float) -> float:
    """The maximum of a value, not NaN, over all ranks. Collective."""
    return _reduced([value], dist.ReduceOp.MAX)[0]


def barrier() -> None:
    """Wait for all ranks. Collective."""
    largest(0)


def _reduced(values: Sequence[float], op: Any) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.get_world_size() > 1:
        _together(lambda: dist.all_reduce(tensor, op, group=_group()))
    return list(tensor.tolist())


def gathered(value: Any, neighbours: int | None = None) -> list[Any]:
    """The values of all ranks, or of this rank's block of `neighbours` ranks, sent pickled. Collective."""
    values = [value]
    if (world := dist.get_world_size()) > 1:
        values = [None] * world
        _together(lambda: dist.all_gather_object(values, value, group=_group()))
    if neighbours is None:
        return values
    first = dist.get_rank() // neighbours * neighbours
    return values[first : first + neighbours]


def exchanged(parts: Tensor, group: Any) -> Tensor:
    """(ranks, ...) -> (ranks, ...) on the device of both: part i goes to rank i of the group. Collective."""
    received = torch.empty_like(parts)
    _together(lambda: dist.all_to_all_single(received, parts, group=group))
    return received


def rows(x: Tensor) -> Tensor:
    """(n, ...) -> (ranks n, ...) on its device: all ranks', one after the other. Collective."""
    every = x.new_empty(dist.get_world_size(), *x.shape)
    _together(lambda: dist.all_gather(list(every.unbind()), x.contiguous()))
    return every.flatten(0, 1)


def failures(failure: BaseException | None, *, clear: tuple[type[BaseException], ...] = (Exception,)) -> str:
    """All ranks' failures as one text, empty if there are none. Collective; a rank without a failure passes None.

    clear: exceptions with a self-explanatory message; for others the class is added.
    """
    text = str(failure) if isinstance(failure, clear) else repr(failure)
    texts = gathered(None if failure is None else text)
    named = ((f"rank {rank}: ", text) for rank, text in enumerate(texts) if text is not None)
    return "; ".join(name + text.removeprefix(name) for name, text in named)


@contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Hold a lock for all ranks, see `durable.locked`; its errors are raised on all. Collective, if there are ranks."""
    ranks = dist.is_initialized()
    failure: Exception | None = None
    with ExitStack() as stack:
        if not ranks or dist.get_rank() == 0:
            try:
                stack.enter_context(durable.locked(file, refusal))
            except (ValueError, OSError) as error:
                failure = error
        if what := (failures(failure) if ranks else failure and str(failure)):
            raise ValueError(what) from failure
        yield


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _together(collective: Callable[[], None]) -> None:
    """ConnectionError with every rank's last phase if another rank is gone, or later than the timeout."""
    try:
        collective()
    except RuntimeError as error:  # torch has no class for either
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])  # remove gloo's source file
        raise ConnectionError(
            f"rank {dist.get_rank()}, after {activity.current.phase!r}, lost the other ranks: {reason.split('. ')[0]}. "
            f"The last phase that each began: {_phases()}. A rank that is only slow needs a larger "
            f"train.collective_timeout_s than {timeout.total_seconds():g}"
        ) from error


def _phases() -> str:
    try:
        keys = [f"phase of rank {rank}" for rank in range(dist.get_world_size())]
        begun = [_store().get(key).decode() if _store().check([key]) else "the start" for key in keys]
    except RuntimeError as error:
        return f"unknown, their store is gone ({str(error).splitlines()[0]})"
    return ", ".join(f"rank {rank} {name!r}" for rank, name in enumerate(begun))
