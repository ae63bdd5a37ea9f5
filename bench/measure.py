"""Time, memory and accuracy of the methods of a case, in turn, on the same tensors."""

import ctypes
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rlplus.common.errors import one_line

from .case import Case
from .cases import Head, Inputs
from .machine import clocks, kernel_times, package_root
from .peers import METHODS, Method, Step, Unavailable

Row = dict[str, Any]
ERRORS = ("dhidden_error", "dweight_error")
SETTLE_S, SETTLE_CALLS = 0.1, 50  # time and number of untimed calls: the clock follows the power that a method draws
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt


def seconds_left(until: float) -> float:
    return until - time.monotonic()


def order_of(turn: int, count: int) -> list[int]:
    """The random order of a round; the same in every run."""
    return random.Random(turn).sample(range(count), count)


def clear(inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None


def call(method: Method, inputs: Inputs, step: Step) -> Tensor | None:
    with torch.set_grad_enabled(method.kind not in ("forward", "bare")):
        return step()


def milliseconds(method: Method, inputs: Inputs, step: Step) -> float:
    """Time of one call of a method."""
    clear(inputs)
    return elapsed(partial(call, method, inputs, step), inputs.hidden.is_cuda)


def settle(method: Method, inputs: Inputs, step: Step, cost: float) -> None:
    """Call a method that takes `cost` seconds until the GPU's clock is the one that its own power allows.

    A call of more than a second has most of its time at that clock anyway.
    """
    for _ in range(min(ceil(SETTLE_S / cost), SETTLE_CALLS) if cost < 1 else 0):
        clear(inputs)
        call(method, inputs, step)


def elapsed(step: Callable[[], object], cuda: bool) -> float:
    """ms of one call: on CUDA between two events, on the CPU the CPU time of all threads of the process."""
    if not cuda:
        start = time.process_time()
        step()
        return 1e3 * (time.process_time() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def page_faults() -> int:
    """Pages that the kernel has mapped for this process without reading a disk, since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def keep_memory(nbytes: int) -> None:
    """Allocate this much memory, and return none to the system from now on.

    New tensors then lie on pages that exist already, as with CUDA's caching allocator, and no method is charged for
    page faults. With glibc; elsewhere this does nothing, and a row's `page_faults` shows it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)  # else a large block is a mapping of its own, which ends when it is freed
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        torch.zeros(nbytes, dtype=torch.uint8).fill_(1)  # zeros alone may not touch the pages


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "greatest": max(values)}


class Measurement:
    """The rows of a case, filled one after the other. A row without numbers has the reason in `status`."""

    def __init__(self, case: Case, device: str, until: float) -> None:
        self.case, self.until = case, min(until, time.monotonic() + case.seconds)
        head = Head(case, device)
        self.cuda = device == "cuda"
        self.rows: list[Row] = []
        self.steps: list[tuple[Row, Method, Inputs, Step, float]] = []
        bare = METHODS["bare-1u" if case.forward else "bare-3u"]
        for share in case.shares:
            inputs = Inputs(head, share)
            first = share == case.shares[0]
            names = (bare.name, *case.methods) if first else case.sparse
            for name in names:
                self.prepare(METHODS[name], inputs)
        self.result = {**asdict(case), "rounds": 0, "rows": self.rows}
        for field in ("methods", "sparse", "shares", "seconds", "repeats", "profiled"):
            del self.result[field]

    def prepare(self, method: Method, inputs: Inputs) -> None:
        """Add a row, and call the method for the first time."""
        row: Row = {"method": method.name, "rho": inputs.active.double().mean().item(), "status": "ok"}
        self.rows.append(row)
        device = inputs.hidden.device.type
        if method.device not in (None, device) and not interpreted(method):
            row["status"] = f"needs {str(method.device).upper()}"
            return
        if seconds_left(self.until) <= 0:
            row["status"] = "left out: no time left for its first call"
            return
        with failure_in(row, "status", method):
            step = method.prepare(inputs)
            cost = 0.0
            for _ in range(1 + (method.compiles or device == "cuda")):  # the first call may compile
                start = time.monotonic()
                milliseconds(method, inputs, step)
                cost = time.monotonic() - start
            self.steps.append((row, method, inputs, step, cost))
        clear(inputs)

    def time(self) -> None:
        """Time rounds of one call per method, each in a random order, while time is left."""
        case, steps = self.case, self.steps
        # The fp64 reference takes long on a CPU.
        share = 0.9 if self.cuda else 0.5 if case.accuracy else 0.8
        until = time.monotonic() + max(0.0, seconds_left(self.until)) * share
        while len(steps) > 1 and sum(step[-1] for step in steps) > seconds_left(until):
            slowest = max(steps[1:], key=lambda step: step[-1])
            slowest[0]["status"] = f"left out: a call takes {slowest[-1]:.1f} s, too long for the time left"
            steps.remove(slowest)
        taken: list[list[float]] = [[] for _ in steps]
        faults: list[list[int]] = [[] for _ in steps]
        longest = 0.0
        for turn in range(case.repeats):
            if turn and longest > seconds_left(until):
                break
            start = time.monotonic()
            for at in order_of(turn, len(steps)):
                row, method, inputs, step, cost = steps[at]
                before = page_faults()
                with failure_in(row, "status", method):
                    if self.cuda:
                        settle(method, inputs, step, cost)
                    taken[at].append(milliseconds(method, inputs, step))
                faults[at].append(page_faults() - before)
                clear(inputs)
            longest = max(longest, time.monotonic() - start)
            self.result["rounds"] = turn + 1
        for (row, *_), times, touched in zip(steps, taken, faults, strict=True):
            if row["status"] == "ok" and (steps[0][1].kind != "bare" or len(taken[0]) < len(times)):
                row["status"] = "failed: the bare GEMMs did"
            if row["status"] == "ok":
                row["ms"] = spread(times)
                row["ratio"] = spread([t / b for t, b in zip(times, taken[0], strict=True)])
                row["page_faults"] = median(touched)
        self.steps = [step for step in steps if step[0]["status"] == "ok"]
        if self.cuda:
            self.result["clocks"] = clocks()

    def profile(self) -> None:
        """Time by kernel of one call, of the bare GEMMs and the case's `profiled` methods at the first share."""
        for row, method, inputs, step, _ in self.steps:
            if inputs.share != self.case.shares[0] or method.name not in self.case.profiled:
                continue
            with failure_in(row, "kernels_note", method):
                row["kernels"] = kernel_times(partial(call, method, inputs, step), self.cuda)
            clear(inputs)

    def remember(self) -> None:
        """Peak memory beyond inputs and gradients, MB = 10^6 bytes, of the methods at the first share."""
        for row, method, inputs, step, _ in self.first_share():
            left = seconds_left(self.until)
            if left <= 0:
                row["memory_note"] = "left out: no time left"
                continue
            with failure_in(row, "memory_note", method):
                if inputs.hidden.is_cuda:
                    row["extra_mb"] = cuda_memory(method, inputs, step)
                else:
                    limit = None if left == inf else left + 30
                    row["extra_mb"] = memory_of_a_process(self.case, method, timeout=limit)

    def compare(self) -> None:
        """Errors against fp64: the largest of a logprob; gradients' errors relative to their norms."""
        steps = self.first_share()
        for kind in sorted({method.kind for _, method, *_ in steps}):
            exact: list[tuple[Tensor, Tensor]] = []  # one pair of fp64 gradients at a time
            for row, method, inputs, step, _ in steps:
                if method.kind != kind:
                    continue
                if seconds_left(self.until) <= 0:
                    row["accuracy_note"] = "left out: no time left"
                    continue
                with failure_in(row, "accuracy_note", method):
                    row.update(errors(method, inputs, step, exact))
                clear(inputs)

    def first_share(self) -> list[tuple[Row, Method, Inputs, Step, float]]:
        share = self.case.shares[0]
        return [step for step in self.steps if step[2].share == share and step[1].kind != "bare"]


def run(case: Case, device: str, until: float, saved: Callable[[dict[str, Any]], None]) -> None:
    """Measure a case; `saved` is called with its result after each phase, finally the complete one."""
    measurement = Measurement(case, device, until)
    measurement.time()
    saved(measurement.result)
    if case.profiled:
        measurement.profile()
        saved(measurement.result)
    if case.accuracy:
        measurement.compare()
        saved(measurement.result)
    if case.memory:
        measurement.remember()
        saved(measurement.result)


def errors(method: Method, inputs: Inputs, step: Step, exact: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Errors of one call; `exact` caches the gradients of the method's kind."""
    clear(inputs)
    logprob = call(method, inputs, step)
    found = {}
    if logprob is not None:
        found["logprob_error"] = (logprob.double() - inputs.head.logprob).abs().max().item()
    if method.kind in ("forward", "other"):
        return found
    if not exact:
        exact.append(inputs.gradients(method.kind))
    for tensor, true, name in zip((inputs.hidden, inputs.weight), exact[0], ERRORS, strict=True):
        assert tensor.grad is not None
        found[name] = ((tensor.grad - true).norm() / true.norm()).item()
    return found


@contextmanager
def failure_in(row: Row, key: str, method: Method) -> Iterator[None]:
    """Record any failure of a peer in its row, and continue with the others."""
    try:
        yield
    except Exception as error:
        row[key] = reason(error, method)


def interpreted(method: Method) -> bool:
    own = method.name.startswith(("triton", "Liger linear", "Liger none"))
    return own and os.environ.get("TRITON_INTERPRET") == "1"


def reason(error: Exception, method: Method) -> str:
    """The reason for missing numbers, in one line."""
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        missing = error.name if package_version(method.package) else method.package
        return f"not installed: {missing}" + "; bench/README.md says how" * (method.package not in ("rlplus", "torch"))
    return f"failed: {one_line(error)}"


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- memory


def cuda_memory(method: Method, inputs: Inputs, step: Step) -> float:
    clear(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(method, inputs, step)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - gradient_bytes(method, inputs)) / 1e6


def gradient_bytes(method: Method, inputs: Inputs) -> int:
    made = () if method.kind == "forward" else (inputs.hidden,) if method.into else (inputs.hidden, inputs.weight)
    return sum(t.numel() * t.element_size() for t in made)


def memory_of_a_process(case: Case, method: Method, timeout: float | None = None) -> float:
    """Peak memory in MB on the CPU, measured in a fresh process."""
    task = json.dumps({"case": asdict(case), "method": method.name, "threads": torch.get_num_threads()})
    path = os.pathsep.join([str(package_root()), *filter(None, sys.path)])
    command = [sys.executable, "-m", str(__package__), "--memory-of", task]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.splitlines()[-1])


def resident_memory(task: str) -> float:
    """MB by which the resident set grows at the peak of one call, beyond the gradients; for a fresh process."""
    if not Path("/proc/self/clear_refs").exists():
        raise ValueError("want Linux: the peak of the resident set is read from /proc")
    given = json.loads(task)
    torch.set_num_threads(given["threads"])
    case, method = Case(**given["case"]), METHODS[given["method"]]
    head = Head(case, "cpu")
    head.logprob = torch.full((case.N,), -1.0, dtype=torch.float64)  # any will do, and exact ones take long
    inputs = Inputs(head, case.shares[0])
    # Libraries load and threads start before, with a small call, or the same where code is compiled for the shape.
    small = Inputs(Head(Case("warm", 16, 64, 64, case.dtype, ()), "cpu"), 1.0)
    warm = inputs if method.compiles else small
    milliseconds(method, warm, method.prepare(warm))
    torch.mm(inputs.hidden[:8].detach(), inputs.weight.detach().T)
    clear(inputs)
    step = method.prepare(inputs)
    before = new_peak()
    call(method, inputs, step)
    return status_mb("VmHWM") - before - gradient_bytes(method, inputs) / 1e6


def new_peak() -> float:
    """Let the peak of the resident set start anew. -> MB of it now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # glibc: what is free in the heap would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")
    return status_mb("VmRSS")


def status_mb(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6
