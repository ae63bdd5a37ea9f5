"""Launches kernels by Triton's launcher on stub_driver.c: python launcher_child.py FOLDER ARCH PART...

FOLDER has the stub, libcuda.so.1; the parts are keys of PARTS. Prints as JSON what the stub received: for each launch
the kernel, grid, block, bytes of shared memory, stream and arguments. A pointer is replaced by the name of the kernel's
parameter; a tensor map by its tensor, type of elements, sizes, stride in bytes, and sizes of a box.
"""

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

folder, arch, parts = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
os.environ.update(TRITON_LIBCUDA_PATH=str(folder), TRITON_CACHE_DIR=str(folder / f"cache {arch}"), STUB_ARCH=arch)
os.environ.pop("TRITON_INTERPRET", None)
stub = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # must precede the search for the real one

import torch  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from rlplus.kernels import exponentials, linear_logprob, own_tokens, policy_loss, scale  # noqa: E402
from rlplus.kernels.tiling import TILES  # noqa: E402

STREAM = 4242
PARAMETER = re.compile(r"\.param\s+(?:\.align \d+ )?\.(\w+) (?:\.ptr [\w. ]*)?(\w+)(?:\[(\d+)\])?")
KINDS = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32, "b32": ctypes.c_int32, "f32": ctypes.c_float}
KINDS |= {"s32": ctypes.c_int32, "s64": ctypes.c_int64, "b64": ctypes.c_uint64}
launches: list[dict[str, Any]] = []
given: dict[int, str] = {}  # names of the current launch's tensors, by address
kinds: list[str] = []  # types of its parameters in the PTX


class StubDriver(CudaDriver):
    """Triton's driver without its calls of torch, which sees no device here."""

    def __init__(self) -> None:
        super().__init__()
        self.get_device_capability = self._get_device_capability
        self.get_current_device = self._get_current_device
        self.get_current_stream = lambda device: STREAM


@ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint), ctypes.c_uint,
    ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
def observe(name: bytes, grid: Any, block: Any, shared: int, stream: int, arguments: Any) -> None:
    values = [value_of(kind, arguments[i]) for i, kind in enumerate(kinds)]
    launches.append(
        {
            "kernel": name.decode(), "grid": grid[:3], "block": block[:3], "shared": shared, "stream": stream,
            "arguments": values,
        }
    )  # fmt: skip


def value_of(kind: str, address: int) -> Any:
    if kind == "b8":  # a tensor map
        base, *made = (ctypes.c_uint64 * 7).from_address(address)
        return [given[base], *made]
    value = KINDS[kind].from_address(address).value
    return given.get(value, value) if kind == "u64" else value


original = JITFunction.run


def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel = original(self, *args, grid=grid, warmup=True, **options)
    entry = kernel.asm["ptx"].partition(".visible .entry")[2].partition(")")[0]
    kinds[:] = [kind for kind, *_ in PARAMETER.findall(entry)]
    for name, value in zip(self.arg_names, args, strict=False):
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, torch.Tensor):
            given[tensor.data_ptr()] = name
    result = original(self, *args, grid=grid, warmup=False, **options)
    launches[-1]["declared shared"] = kernel.metadata.shared
    given.clear()
    return result


def launch_rows() -> None:
    n, V, W = 5, 9000, 9024
    target, values, logits = torch.zeros(n, dtype=torch.int64), torch.empty(n, 7), torch.empty(n, W)
    transform, e = (torch.empty(V), 0.8, 3.0, torch.ones(n)), torch.empty(n, W, dtype=torch.bfloat16)
    own = (values, torch.empty(n, 200)[:, :100], torch.empty(V, 300)[:, ::3], target)
    parts, one = torch.empty(3, 3, n), torch.empty(1, 3, n)
    linear_logprob.target_logits(*own, None, 0.8)
    linear_logprob.target_logits(*own, *transform)
    rest = (values, logits, V, target)
    exponentials.row_exponentials(parts, None, *rest, None, 0.8)
    linear_logprob.finish_rows(values, parts, V, target)
    exponentials.row_exponentials(one, e, *rest, *transform)
    exponentials.row_exponentials(one, None, *rest, None, 0.8, carry=True)
    for entropy in (False, True):
        exponentials.close_rows(*torch.empty(2, n), values, e, V, target, 0.8, entropy=entropy)
    exponentials.row_gradient(e, *rest, None, 0.8)
    numbers = policy_loss.Coefficients(*(1.0 + 0.5 * i for i in range(len(policy_loss.Coefficients._fields))))
    choices = policy_loss.Choices("clip", "mis", "k3", "truncate")
    policy_loss.token_loss(values, torch.empty(n, 8), numbers, policy_loss.Given(True, False, True), choices)
    scale.scale_(torch.empty(n, 2 * W)[:, :W], torch.ones(()))
    own_tokens.finish_hidden(torch.empty(n, 1500), *torch.empty(2, n), torch.empty(V, 1500), target)
    own_tokens.add_to_weight(torch.empty(V, 1500), torch.ones(n), torch.empty(n, 3000)[:, ::2], target)


def launch_gemm() -> None:
    n, V, H, tile = 200, 4097, 144, TILES[int(arch) // 10][1]
    hidden, weight = torch.empty(n, H, dtype=torch.bfloat16), torch.empty(V, 2 * H, dtype=torch.bfloat16)[:, :H]
    values, target = torch.empty(n, 7), torch.zeros(n, dtype=torch.int64)
    partial, e = torch.empty(33, 3, n), torch.empty(n, 4160, dtype=torch.bfloat16)
    marked = torch.empty(n, dtype=torch.int32)
    listed = torch.empty(n, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    rest = (values, hidden, weight, target, None, 0.8)
    linear_logprob.linear_exponentials(partial, e, *rest, tile=tile)
    linear_logprob.finish_rows(values, partial, V, target, marked)
    linear_logprob.linear_exponentials(partial, None, *rest, tile=tile, listed=listed)
    linear_logprob.finish_rows(values, partial, V, target, marked, again=True)


driver.set_active(StubDriver())
stub.stub_observe(observe)
JITFunction.run = run
PARTS = {"rows": launch_rows, "gemm": launch_gemm}
for part in parts:
    PARTS[part]()
print(json.dumps(launches))
