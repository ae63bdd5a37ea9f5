"""The executor in the place of a GPU: `kernel[grid](...)` on CPU tensors compiles to PTX and executes that.

    with executed(arch=80) as runs:
        kernel[grid](out, x, n, BLOCK=128)
    assert not runs[0].memory.findings

Triton must have been imported without TRITON_INTERPRET, or its own functions are interpreted ones (plugin.py).
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .checked_memory import POISON, Memory
from .executor import Executor, Options
from .program import Program

new_tensor = torch.tensor  # DeepSpeed and simulate.py replace torch.tensor
SWIZZLES = (16, 32, 64, 128)  # bytes, by the number that tensor maps have


class Run(NamedTuple):
    """A launch that was executed: its memory with the findings, the lanes of each statement, CPU time."""

    name: str
    memory: Memory
    program: Program
    lanes: Any
    grid: tuple[int, ...]
    seconds: float

    @property
    def findings(self) -> dict[str, int]:
        return dict(self.memory.findings)

    def unwritten(self, *allowed: str) -> dict[tuple[str, str], int]:
        """Reads of what was never written, but for tensors of these names."""
        return {place: n for place, n in self.memory.unwritten.items() if place[0] not in allowed}


def findings_of(runs: Iterable[Run]) -> dict[tuple[str, str], int]:
    """The findings of all launches, by kernel and text."""
    return {(run.name, finding): n for run in runs for finding, n in run.findings.items()}


class NoDevice:
    """A driver that only names a target."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Poisoned(TorchFunctionMode):
    """Memory from torch.empty and the like holds POISON, which the executor takes as never written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("empty", "empty_like", "new_empty", "empty_strided"):
            poison(out)
        return out


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill the storage with POISON."""
    if x.untyped_storage().nbytes() and x.is_contiguous():
        storage = new_tensor([], dtype=torch.uint8).set_(x.untyped_storage())
        storage[: len(storage) // 2 * 2].view(torch.int16).fill_(POISON - 65536)
    return x


@functools.cache
def program_of(ptx: str) -> Program:
    return Program(ptx)


@contextlib.contextmanager
def executed(
    arch: int = 80, options: Options | None = None, edit: Callable[[str, str], str] = lambda name, ptx: ptx
) -> Iterator[list[Run]]:
    """Execute launches, and append them to the list. `edit` may change the PTX of a kernel of that name."""
    runs: list[Run] = []
    compile_and_launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            bound = {param.name: param.default for param in self.params if param.has_default}
            bound |= dict(zip(self.arg_names, args, strict=False))
            bound |= {name: value for name, value in kwargs.items() if name in self.arg_names}
            shape = tuple(grid(bound)) if callable(grid) else tuple(grid)
            runs.append(execute(self.__name__, kernel, bound, shape, options, edit))
        return kernel

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", run),
            (CUDABackend, "make_cubin", lambda *_: b""),  # ptxas takes most of the time
            (CUDABackend, "hash", lambda self: f"{self.target.arch} without a cubin"),  # in Triton's cache
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.callback(setattr, driver, "_active", getattr(driver, "_active", None))
        driver.set_active(NoDevice(arch))
        stack.enter_context(Poisoned())
        yield runs


def execute(
    name: str, kernel: Any, bound: dict[str, Any], grid: tuple[int, ...], options: Options | None,
    edit: Callable[[str, str], str],
) -> Run:  # fmt: skip
    """One launch of a compiled kernel with arguments by name."""
    memory, values = Memory(), []
    maps = iter(getattr(kernel.metadata, "tensordesc_meta", None) or [])
    for argument, kind in kernel.src.signature.items():
        for kind_of_one, value, label in flatten(kind, bound.get(argument), argument):
            try:
                values += arguments(memory, kind_of_one, value, label, maps)
            except NotImplementedError as error:
                raise NotImplementedError(f"{name}: {error}") from error
    program = program_of(edit(name, kernel.asm["ptx"]))
    scratch = len(program.parameters) - len(values)  # pointers to memory for globals and profiles
    if kernel.metadata.global_scratch_size or not 0 <= scratch <= 2:
        size = kernel.metadata.global_scratch_size
        raise NotImplementedError(f"{name}: want a kernel without scratch memory, got {size} bytes of it")
    start = time.process_time()
    executor = Executor(program, memory, kernel.metadata.shared, options)
    executor.run(grid, values + [0] * scratch)
    return Run(name, memory, program, executor.executed, grid, time.process_time() - start)


def flatten(kind: Any, value: Any, name: str) -> Iterator[tuple[str, Any, str]]:
    """Type, value and name of each argument; tuples have several, constants none."""
    if isinstance(kind, tuple | list):
        for i, (k, v) in enumerate(zip(kind, value, strict=True)):
            yield from flatten(k, v, f"{name}.{i}")
    elif kind != "constexpr":
        yield kind, value, name


def arguments(memory: Memory, kind: str, value: Any, name: str, maps: Iterator[dict[str, Any]]) -> list[Any]:
    """The parameters of the program for an argument; its tensor may be accessed from now on."""
    if kind.startswith("*"):
        memory.add(value, name)
        return [value.data_ptr()]
    if not kind.startswith("tensordesc"):
        return [value]
    tensor = value.base
    memory.add(tensor, name)
    one = next(maps, None)
    shape = [*value.shape, *value.strides]
    if one is None:  # without TMA: pointers
        return [tensor.data_ptr(), *shape, value.padding == "nan", value.round_f32_to_tf32, *shape]
    if value.padding != "zero" or len(value.shape) != 2 or one["fp4_padded"]:
        raise NotImplementedError(
            f"argument {name}: want a descriptor of 2 dimensions, padded with zeros, of numbers of 8 bits or more; got "
            f"{len(value.shape)} dimensions, padding {value.padding!r}{', fp4' * bool(one['fp4_padded'])}"
        )
    size = tensor.element_size()
    tensor_map = {
        "base": tensor.data_ptr(), "shape": list(value.shape), "stride": value.strides[0] * size,
        "box": list(one["block_size"]), "size": size, "span": SWIZZLES[one["swizzle"]],
    }  # fmt: skip
    return [tensor_map, *shape]
