"""Small programs for tests: PTX around a few instructions, and what the executor finds in it."""

from collections.abc import Sequence
from typing import Any

from ptxcheck.checked_memory import Memory
from ptxcheck.executor import Executor, Options
from ptxcheck.program import Program

REGISTERS = "\n".join(f".reg .{kind} %{name}<100>;" for kind, name in
                      (("pred", "p"), ("b16", "h"), ("b32", "r"), ("b64", "rd")))  # fmt: skip


def module(body: str, arguments: int = 0, threads: int = 32, target: int = 80, maps: int = 0) -> str:
    """A kernel `k` with pointers as its arguments, in %rd90 and on; %r90 is the thread, %r91 the block, %r92 its number
    in the grid, %rd80 the bytes of a word for each thread before it. Parameters m0, m1... are tensor maps."""
    parameters = [f".param .u64 a{i}" for i in range(arguments)]
    parameters += [f".param .align 64 .b8 m{i}[128]" for i in range(maps)]
    head = [f"ld.param.u64 %rd{90 + i}, [a{i}];" for i in range(arguments)]
    head += ["mov.u32 %r90, %tid.x;", "mov.u32 %r91, %ctaid.x;"]
    head += [f"mad.lo.u32 %r92, %r91, {threads}, %r90;", "mul.wide.u32 %rd80, %r92, 4;"]
    return "\n".join([
        ".version 8.0", f".target sm_{target}", ".address_size 64",
        f".visible .entry k({', '.join(parameters)})", f".reqntid {threads}", "{", REGISTERS, *head, body, "ret;", "}",
    ])  # fmt: skip


def execute(
    ptx: str, tensors: Sequence[Any], grid: int = 1, shared: int = 0, maps: Sequence[Any] = (),
    options: Options | None = None,
) -> Memory:  # fmt: skip
    """Run with the tensors as arguments; -> the memory, with what was found."""
    memory = Memory()
    for i, tensor in enumerate(tensors):
        memory.add(tensor, f"a{i}")
    arguments = [*(tensor.data_ptr() for tensor in tensors), *maps]
    Executor(Program(ptx), memory, shared, options).run((grid,), arguments)
    return memory
