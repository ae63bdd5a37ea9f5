"""Put a simulated device (device.py) in the place of CUDA: torch's and Triton's functions are replaced for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # before anything is replaced: it makes tables of torch.cuda
from torch import Tensor
from triton.runtime.jit import JITFunction

from . import launcher
from .cuda_module import SHARED, functions
from .device import CPU, CUDA, Device, storage_of
from .executor import Options

BASE = torch._C.TensorBase
OLD = {name: getattr(Tensor, name) for name in ("to", "tolist", "numpy")}
OLD_TENSOR, OLD_AS_TENSOR, OLD_GENERATOR, OLD_AUTOCAST, OLD_FUTURE = (
    torch.tensor, torch.as_tensor, torch.Generator, torch.autocast.__init__, torch.futures.Future.__init__,
)  # fmt: skip


@contextlib.contextmanager
def simulated(arch: int = 90, compute: bool = True, options: Options | None = None) -> Iterator[Device]:
    """A device of that compute capability. compute: False counts launches and GEMMs, and computes neither."""
    if arch not in SHARED:
        raise ValueError(f"want a simulated device of arch {' or '.join(map(str, SHARED))}, got {arch}")
    gpu = Device(arch, compute)
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            old, own = getattr(owner, name, None), name in vars(owner)
            stack.callback(setattr, owner, name, old) if own else stack.callback(delattr, owner, name)
            setattr(owner, name, value)

        for name, value in tensor_methods(gpu).items():
            put(Tensor, name, value)
        for name, value in torch_functions().items():
            put(torch, name, value)
        put(torch.autocast, "__init__", _autocast)
        put(torch.futures.Future, "__init__", lambda self, *, devices=None: OLD_FUTURE(self))
        for name in ("range_push", "range_pop"):
            put(torch.cuda.nvtx, name, lambda *_: 0)
        for name, value in functions(gpu).items():
            put(torch.cuda, name, value)
        put(launcher, "Poisoned", contextlib.nullcontext)  # the device fills memory itself
        runs = stack.enter_context(launcher.executed(arch, options))
        put(JITFunction, "run", _launch(gpu, runs, JITFunction.run))
        stack.enter_context(gpu)
        yield gpu


def _launch(gpu: Device, runs: list[launcher.Run], execute: Any) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            x = getattr(x, "base", x) if type(x).__name__ == "TensorDescriptor" else x
            if isinstance(x, Tensor) and not gpu.has(x):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        gpu.launches[self.__name__] += 1

        def go() -> None:
            if not gpu.compute:
                return
            with torch.utils._python_dispatch._disable_current_modes():
                execute(self, *args, grid=grid, warmup=warmup, **kwargs)
            done = runs.pop()  # holds the tensors
            gpu.seconds += done.seconds
            gpu.findings.update({(done.name, finding): n for finding, n in done.findings.items()})

        go()
        if gpu.capture is not None:
            gpu.capture.append(go)

    return run


def moved(gpu: Device, x: Tensor, device: Any, dtype: Any, soon: Any, copy: bool, form: Any) -> Tensor:
    """`Tensor.to`, also to and from the device."""
    kind = None if device is None else torch.device(device).type
    if kind not in ("cpu", "cuda") or (kind == "cuda") == gpu.has(x):
        other = {"memory_format": form} if form is not None else {}
        place = [device] if kind == "meta" else []
        return OLD["to"](x, *place, dtype or x.dtype, non_blocking=bool(soon), copy=copy, **other)
    gpu.move = CUDA if kind == "cuda" else CPU
    try:
        return torch.ops.aten._to_copy.default(x, dtype=dtype, non_blocking=bool(soon), memory_format=form)
    finally:
        gpu.move = None


def tensor_methods(gpu: Device) -> dict[str, Any]:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "Fake" in type(self).__name__:
            return OLD["to"](self, *args, **kwargs)
        copy, other = kwargs.pop("copy", False), args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            return moved(gpu, self, other.device, other.dtype, kwargs.get("non_blocking", False), copy, None)
        if len(args) > 2:  # dtype, non_blocking, copy or device, dtype, non_blocking, copy
            first = 2 if isinstance(args[0], torch.dtype) else 3
            copy, args = copy or (len(args) > first and args[first]), args[:first]
        device, dtype, soon, form = torch._C._nn._parse_to(*args, **kwargs)
        return moved(gpu, self, device, dtype, soon, copy, form)

    def tolist(self: Tensor) -> Any:
        if gpu.has(self):
            gpu.sync("tolist")
        return OLD["tolist"](self)

    def numpy(self: Tensor, **kwargs: Any) -> Any:
        if gpu.has(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return OLD["numpy"](self, **kwargs)

    return {
        "device": property(lambda x: CUDA if gpu.has(x) else BASE.device.__get__(x)),
        "is_cuda": property(lambda x: gpu.has(x) or BASE.is_cuda.__get__(x)),
        "is_cpu": property(lambda x: not gpu.has(x) and BASE.is_cpu.__get__(x)),
        "record_stream": lambda x, stream: None, "get_device": lambda x: 0 if gpu.has(x) else -1,
        "is_pinned": lambda x, *_: storage_of(x)._cdata in gpu.pinned,
        "to": to, "tolist": tolist, "numpy": numpy,
        "cpu": lambda x, **_: moved(gpu, x, CPU, None, False, False, None),
        "cuda": lambda x, device=None, non_blocking=False, **_: moved(gpu, x, CUDA, None, non_blocking, False, None),
        "new_tensor": lambda x, data, **k: _tensor(data, **({"device": x.device, "dtype": x.dtype} | k)),
        "pin_memory": lambda x, *_: torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x),
    }  # fmt: skip


def torch_functions() -> dict[str, Any]:
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor):
            return data.to(device or data.device, dtype or data.dtype)
        return OLD_AS_TENSOR(data, dtype=dtype).to(device or "cpu")

    new = {"__new__": lambda kind, device="cpu": OLD_GENERATOR.__new__(kind)}
    return {"tensor": _tensor, "as_tensor": as_tensor, "Generator": type("Generator", (OLD_GENERATOR,), new)}


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    x = OLD_TENSOR(data, **kwargs)
    return x if device is None else x.to(device)


def _autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    OLD_AUTOCAST(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)
