"""Ranks of a process group that are threads of this process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(minutes=2)
_numbers = count()


@contextmanager
def group_of(rank: int, size: int, store: dist.Store) -> Iterator[dist.ProcessGroup]:
    """A group of CPU ranks that meet in the store."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    )
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(name := f"threads {next(_numbers)}, rank {rank}")
    c10d._register_process_group(name, group)
    try:
        yield group
    finally:
        c10d._unregister_process_group(name)


def together(size: int, work: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """work(rank, group) of every rank, at the same time; the first exception of any rank is raised."""
    store = dist.HashStore()

    def rank_of(rank: int) -> Any:
        torch.set_num_threads(1)
        with group_of(rank, size, store) as group:
            return work(rank, group)

    with ThreadPoolExecutor(size) as pool:
        return [done.result() for done in [pool.submit(rank_of, rank) for rank in range(size)]]


@pytest.fixture
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter changes modules while a kernel runs."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def locked(*args: Any, **options: Any) -> Any:
        with lock:
            return launch(*args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)
