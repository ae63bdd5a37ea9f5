"""A simulated CUDA device: tensors claim to be on cuda:0, their memory is the host's, launches go to the executor.

    with simulated(90) as gpu:                     # simulate.py
        f(x.to("cuda")); print(gpu.table())

Which tensors are on the device is kept by storage, so views follow. A dispatch mode sees every operation, also those of
the backward pass: it counts them, refuses tensors of two devices, gives half-precision GEMMs an fp32 accumulator
(vendor.py), and says what would wait for the device. Copies to pinned memory arrive when an event or a synchronisation
says so, not before. Graphs can be captured and replayed.

Not simulated: order between streams, memory that a graph reuses, the vendor's workspace and bits, temporaries within an
operation, several devices, torch.compile, autograd's own threads, time.
"""

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import launcher, vendor

Tensor = torch.Tensor
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SYNCING = {
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2", "unique_dim", "bincount",
    "unique_consecutive", "repeat_interleave", "multinomial", "histc",
}  # fmt: skip
FREE = {"detach", "alias", "lift_fresh", "lift", "set_", "is_pinned", "_unsafe_view", "_reshape_alias", "resize_"}
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
LARGE = 10**6  # numbers of a tensor that is not filled where nothing is computed
storage_of = Tensor.untyped_storage  # kept before anything replaces methods of tensors


class SynchronisationError(RuntimeError):
    """An operation waits for the device while torch.cuda.set_sync_debug_mode("error") is on."""


class Device(TorchDispatchMode):
    """The device's state, and what was seen on it.

    compute: False counts GEMMs and launches without computing them, for large shapes.
    allocated, peak, total: bytes. ops, launches: counts by name. syncs: what made the host wait, with the stack.
    waits: awaited events and streams. findings: of the executor, by kernel. log: things to know.
    """

    def __init__(self, arch: int, compute: bool = True) -> None:
        super().__init__()
        self.arch, self.compute = arch, compute
        self.blocks: dict[int, int] = {}  # bytes of the storages on the device
        self.pinned: dict[int, bool] = {}
        self.allocated = self.peak = self.total = self.queued = 0
        self.ops, self.launches, self.waits, self.log = Counter(), Counter(), Counter(), Counter()
        self.findings: Counter[tuple[str, str]] = Counter()
        self.syncs: list[tuple[str, str]] = []
        self.queue: list[tuple[int, Callable[[], Any]]] = []  # copies that have not arrived
        self.failed: str | None = None  # a device-side assertion
        self.capture: Any = None  # the graph that is being captured: a list of steps
        self.move: torch.device | None = None  # where `Tensor.to` wants a copy
        self.sync_debug, self.seconds = 0, 0.0

    # ---- memory

    def has(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or type(x).__name__ in ("FakeTensor", "FunctionalTensor"):
            return False
        try:
            return storage_of(x)._cdata in self.blocks
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, functional, on "meta"
            return False

    def take(self, x: Tensor) -> None:
        """The storage is on the device from now on, as long as anything holds it."""
        storage = storage_of(x)
        if (key := storage._cdata) in self.blocks:
            return
        size = -(-storage.nbytes() // 512) * 512  # the allocator rounds so
        self.blocks[key] = size
        self.allocated += size
        self.total += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._free, key, self.blocks)

    def _free(self, key: int, blocks: dict[int, int]) -> None:
        self.allocated -= blocks.pop(key, 0)

    # ---- waiting

    def flush(self, mark: float = float("inf")) -> None:
        """Deliver the copies up to this mark; RuntimeError after a failed assertion."""
        while self.queue and self.queue[0][0] <= mark:
            self.queue.pop(0)[1]()
        if self.failed:
            raise RuntimeError(f"CUDA error: device-side assert triggered ({self.failed})")

    def refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def sync(self, what: str) -> None:
        ours = (str(__file__), "/torch/", "pytest", "pluggy")
        frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in ours)]
        self.syncs.append((what, "".join(traceback.format_list(frames[-3:]))))
        self.refuse_in_capture(what)
        if self.sync_debug == 2:
            raise SynchronisationError(f"called a synchronizing CUDA operation ({what})")
        self.flush()

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any("Fake" in type(x).__name__ or "Functional" in type(x).__name__ for x in inputs):
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func._schema.name in OPDEFS:  # a custom operation: what it is made of, with this mode on
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):  # below autograd
            with self:
                return func.decompose(*args, **kwargs)
        on = [self.has(x) for x in inputs]
        pin, there = kwargs.pop("pin_memory", None), self._place(name, inputs, on, kwargs)
        self._check(func, name, args, inputs, on)
        if any(on) and (name in SYNCING or _chosen_by_mask(name, args)):
            self.sync(name)
        if (name == "_to_copy" and there != any(on)) or (name == "copy_" and on[0] != on[1]):
            return self._cross(func, name, args, kwargs, there)
        if name == "_assert_async":
            return self._assert(func, name, args, any(on))
        before = [storage_of(x)._cdata for x in inputs]
        out = self._execute(func, name, args, kwargs, any(on))
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        fresh = [x for x in outs if storage_of(x)._cdata not in before]
        if there:
            self._record(func, name, args, kwargs, outs, fresh)
        elif pin:
            self.log["pinned allocations"] += 1
            for x in fresh:
                self.pinned[storage_of(x)._cdata] = True
                weakref.finalize(storage_of(x), self.pinned.pop, storage_of(x)._cdata, None)
        return out

    def _execute(self, func: Any, name: str, args: Any, kwargs: Any, on: bool) -> Any:
        if on and name in vendor.GEMMS:
            return vendor.gemm(func, name, args, kwargs, self.compute)
        if on and name == "histc" and not args[0].is_floating_point():  # which CUDA has for integers, too
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)

    def _place(self, name: str, inputs: list[Tensor], on: list[bool], kwargs: dict[str, Any]) -> bool:
        """Whether the results are on the device."""
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = CPU if torch.device(device).type == "cuda" else device
        if name == "_to_copy":
            return any(on) if self.move is None else self.move.type == "cuda"
        if name == "copy_":
            return on[0]
        if not inputs and device is not None:
            return torch.device(device).type == "cuda" or any(map(self.has, _differentiated()))
        return any(on)

    def _assert(self, func: Any, name: str, args: Any, on: bool) -> Any:
        self.ops[name] += on
        if not on and self.capture is None:
            return func(*args)
        if self.capture is None and not bool(args[0]):
            self.failed = args[1] if len(args) > 1 else name
        return None

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, outs: list[Tensor], fresh: list[Tensor]) -> None:
        """Count the operation, and what it allocated; a step of the graph that is captured."""
        empty = name.startswith(("empty", "new_empty"))
        for x in fresh:
            self.take(x)
            if empty and (self.compute or x.numel() <= LARGE):
                launcher.poison(x)
        if name in FREE or (outs and func.is_view) or empty or not any(x.numel() for x in outs):
            return
        self.ops[name + (" to fp32" if "dtype" in func._overloadname else "")] += 1

        def again() -> None:
            results = tree_leaves(self._execute(func, name, args, kwargs, True))
            if fresh:
                for to, value in zip(fresh, (r for r in results if isinstance(r, Tensor)), strict=False):
                    to.copy_(value)

        if self.capture is not None:
            self.capture.append(again)

    def _check(self, func: Any, name: str, args: Any, inputs: list[Tensor], on: list[bool]) -> None:
        """Tensors of two devices: only numbers, and indices, which are copied."""
        if not any(on) or all(on) or name in ("copy_", "_to_copy"):
            return
        for i, (x, there) in enumerate(zip(inputs, on, strict=True)):
            if there or (x.ndim == 0 and i and not x.requires_grad):
                continue
            if name in INDEXED and any(x is each for each in args[1]):  # masks too: places are found on the host
                self.sync(f"{name} with indices from the host")
                continue
            got = [f"{tuple(x.shape)} {'cuda' if o else 'cpu'}" for x, o in zip(inputs, on, strict=True)]
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} {got}")

    def _cross(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], there: bool) -> Any:
        """A copy from host to device or back."""
        source = args[1] if name == "copy_" else args[0]
        soon = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        host = source if there else args[0]
        pinned = name == "copy_" and storage_of(host)._cdata in self.pinned
        kind = ("host to device" if there else "device to host") + (" pinned" if pinned else "")
        self.ops[f"copy {kind}"] += 1
        if name == "copy_" and not there and soon and pinned:
            value, to = source.clone(), args[0]
            self.queued += 1
            self.queue.append((self.queued, lambda: to.copy_(value)))
            return to
        if not soon:
            self.sync(f"copy {kind}")
        else:
            self.log[f"non_blocking, but pageable: {kind}"] += not pinned
        out = func(*args, **kwargs)
        if there:
            self.take(out)
        return out

    # ---- what was seen

    def reset(self) -> None:
        for counter in (self.ops, self.launches, self.waits, self.log):
            counter.clear()
        self.syncs.clear()
        self.peak, self.total, self.seconds = self.allocated, 0, 0.0

    def table(self) -> str:
        lines = [f"{k:40}{n:6}" for counter in (self.launches, self.ops) for k, n in counter.most_common()]
        total = sum(self.launches.values()), sum(self.ops.values())
        lines += [f"{total[0]} launches, {total[1]} operations of the vendor; {self.total / 1e6:.3f} MB allocated"]
        lines += [f"{n} x {k}" for counter in (self.waits, self.log) for k, n in counter.items()]
        return "\n".join(lines + [f"{n} x host waits: {k}" for k, n in Counter(w for w, _ in self.syncs).items()])


def _differentiated() -> list[Tensor]:
    """The outputs that are differentiated, if autograd's C++ asks, which makes zeros for gradients on the CPU."""
    frame = sys._getframe(3)
    while frame.f_back and frame.f_code.co_filename.endswith(("torch/_compile.py", "_dynamo/eval_frame.py")):
        frame = frame.f_back
    return list(frame.f_locals["t_outputs"]) if frame.f_code.co_filename.endswith("autograd/graph.py") else []


def _chosen_by_mask(name: str, args: Any) -> bool:
    masks = args[1] if name in INDEXED else ()
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in masks)
