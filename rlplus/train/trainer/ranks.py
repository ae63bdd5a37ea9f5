"""The process group of a run: a launcher's ranks, or this process alone."""

import atexit
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future

from rlplus.common import agree, rank_variables


def initialize_distributed(timeout_s: float = 3600.0) -> None:
    """Join the process group, once: under torchrun, the DeepSpeed launcher, or as the only process.

    timeout_s: seconds that a collective of any group waits for a rank. ValueError for a launcher's variables that are
    no rank's.
    """
    agree.timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        return
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
        store, rank, world = next(rendezvous("env://", timeout=agree.timeout))
        store = c10d.PrefixStore(f"attempt {attempt}", store)
        device = torch.device("cuda", torch.cuda.current_device()) if cuda and world > 1 else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=agree.timeout, device_id=device
        )
    # DeepSpeed uses a group that exists already.
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=agree.timeout)
    atexit.register(_leave_distributed)  # not earlier: DeepSpeed keeps references to the group


def _leave_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def set_timeouts() -> None:
    """Set the run's timeout for every group of this process, DeepSpeed's and an engine's too."""
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) != "alone":
            dist.distributed_c10d._set_pg_timeout(agree.timeout, group)


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
