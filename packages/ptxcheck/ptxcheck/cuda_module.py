"""The stand-ins in torch.cuda while a device is simulated."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .device import Device

MEMORY, MULTIPROCESSORS = 80 * 10**9, 132
SHARED = {80: 166_912, 90: 232_448}  # bytes a block may have


class Event:
    def __init__(self, gpu: Device) -> None:
        self.gpu, self.mark = gpu, 0

    def record(self, stream: Any = None) -> None:
        self.mark = self.gpu.queued

    def synchronize(self) -> None:
        self.gpu.refuse_in_capture("event")
        self.gpu.waits["waits for an event" if self.mark else "waits for an event never recorded"] += 1
        self.gpu.flush(self.mark)

    def query(self) -> bool:
        return not any(mark <= self.mark for mark, _ in self.gpu.queue)

    def wait(self, stream: Any = None) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Stream:
    cuda_stream = 0

    def __init__(self, gpu: Device) -> None:
        self.gpu = gpu

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        self.gpu.waits["waits for a stream"] += 1
        self.gpu.flush()

    def record_event(self, event: Any = None) -> Event:
        (event := event or Event(self.gpu)).record()
        return event


class Graph:
    """Captured steps. A replay is no change that autograd knows of."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def replay(self) -> None:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        below, still = torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys)
        with below, still, torch.utils._python_dispatch._disable_current_modes():
            for step in self.steps:
                step()


@contextlib.contextmanager
def capturing(gpu: Device, graph: Graph) -> Iterator[None]:
    gpu.capture = graph.steps
    try:
        yield
    finally:
        gpu.capture = None


@contextlib.contextmanager
def within(*_: Any) -> Iterator[None]:
    yield


def functions(gpu: Device) -> dict[str, Any]:
    def synchronize(*_: Any) -> None:
        gpu.refuse_in_capture("synchronize")
        gpu.waits["waits for the device"] += 1
        gpu.flush()

    def reset_peak(*_: Any) -> None:
        gpu.peak = gpu.allocated

    def debug(mode: Any) -> None:
        gpu.sync_debug = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    nothing, stream = (lambda *_, **__: None), Stream(gpu)
    major, minor = divmod(gpu.arch, 10)
    properties = SimpleNamespace(
        name="simulated", major=major, minor=minor, total_memory=MEMORY, multi_processor_count=MULTIPROCESSORS,
        shared_memory_per_block_optin=SHARED[gpu.arch], warp_size=32, L2_cache_size=50 * 2**20,
    )  # fmt: skip
    return {
        "_lazy_init": nothing, "init": nothing, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": nothing, "device": within,
        "get_device_capability": lambda *_: (major, minor), "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties, "is_bf16_supported": lambda *_, **__: True,
        "Event": lambda *_, **__: Event(gpu), "Stream": lambda *_, **__: Stream(gpu),
        "current_stream": lambda *_: stream, "default_stream": lambda *_: stream,
        "stream": within, "synchronize": synchronize, "is_current_stream_capturing": lambda: gpu.capture is not None,
        "CUDAGraph": Graph, "graph": lambda graph, *_, **__: capturing(gpu, graph), "_sleep": nothing,
        "empty_cache": nothing, "reset_peak_memory_stats": reset_peak,
        "memory_allocated": lambda *_: gpu.allocated, "max_memory_allocated": lambda *_: gpu.peak,
        "memory_reserved": lambda *_: gpu.allocated, "max_memory_reserved": lambda *_: gpu.peak,
        "mem_get_info": lambda *_: (MEMORY - gpu.allocated, MEMORY),
        "set_sync_debug_mode": debug, "get_sync_debug_mode": lambda: gpu.sync_debug,
        "manual_seed": nothing, "manual_seed_all": nothing, "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }  # fmt: skip
