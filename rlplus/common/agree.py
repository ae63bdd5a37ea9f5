"""The process group of a run and its collectives; if a rank is gone, the error names it and what each rank was doing.

Small ones run on the CPU, without waiting for a GPU: sums, maxima, gathered objects, failures.

Ranks report long work before a collective as a `phase`, so that a timeout can say which rank waited for which.
"""

import atexit
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future

from rlplus.common import activity, durable, rank_variables

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


def initialize_distributed(timeout_s: float = 3600.0) -> None:
    """Join the process group, once: under torchrun, the DeepSpeed launcher, or as the only process.

    timeout_s: seconds that a collective of any group waits for a rank. ValueError for a launcher's variables that are
    no rank's.
    """
    global timeout
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        return
    import deepspeed

    cuda = torch.cuda.is_available()
    rank_variables.check_launcher()
    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
        if "alone" not in dist.Backend.backend_list:
            dist.Backend.register_backend("alone", _alone, devices=["cpu", "cuda"])
        dist.init_process_group("alone", store=c10d.HashStore(), rank=0, world_size=1)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        # DeepSpeed would else compile a shared-memory transport for a minute, which gloo makes unnecessary.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if cuda else "gloo"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it restarts the ranks: they would connect to the dead ones.
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store = c10d.PrefixStore(f"attempt {attempt}", store)
        device = torch.device("cuda", torch.cuda.current_device()) if cuda and world > 1 else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device)
    # DeepSpeed uses a group that exists already.
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
    atexit.register(_leave_distributed)  # not earlier: DeepSpeed keeps references to the group


def _leave_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def set_timeouts() -> None:
    """Set the run's timeout for every group of this process, DeepSpeed's and an engine's too."""
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) != "alone":
            dist.distributed_c10d._set_pg_timeout(timeout, group)


_Base: Any = dist.ProcessGroup  # its methods' names and signatures differ between versions of torch


class _Alone(_Base):
    """The group of a single process: each collective is a copy. Gloo and NCCL would open ports."""

    def getBackendName(self) -> str:  # torch's name
        return "alone"

    def _done(self, devices: Iterable[torch.device]) -> Any:
        done: Future[Any] = Future(devices=[d for d in devices if d.type == "cuda"])
        done.set_result(None)  # a stream that waits for the work waits for the work queued on its devices' streams
        return c10d._create_work_from_future(done)  # type: ignore[attr-defined]

    def _unchanged(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._done({tensor.device for tensor in tensors})

    def _copied(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for output, value in zip(outputs, inputs, strict=True):
            output.copy_(value.view_as(output))
        return self._unchanged(outputs)

    def _copied_single(self, output: Tensor, value: Tensor, *options: Any) -> Any:
        return self._copied([output], [value])

    def barrier(self, opts: Any = None) -> Any:
        return self._done([])

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._done([device])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._copied([output for (output,) in outputs], inputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        return self._copied(outputs, [value for (value,) in inputs])

    allreduce = allreduce_coalesced = broadcast = reduce = _unchanged
    gather = allgather
    scatter = reduce_scatter
    alltoall = _copied
    all_gather_single = reduce_scatter_single = all_to_all_single = _copied_single
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _copied
    # The same before torch 2.13.
    _allgather_base = _reduce_scatter_base = alltoall_base = _copied_single
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _copied


def _alone(store: Any, rank: int, size: int, timeout: timedelta) -> _Alone:
    return _Alone(rank, size)
