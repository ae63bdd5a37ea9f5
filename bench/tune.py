"""The search of `rlplus-bench tune`, whose arguments are in `tune_options`."""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import product
from math import inf
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplus.errors import one_line
from rlplus.kernels import exponentials, row_values
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import DEFAULT, GRADIENT, PROGRAMS, STATISTICS, First, Rows, Tiling
from rlplus.loss import cost, linear_logprob, linear_policy_loss, tuning, verdicts
from rlplus.loss.backends.ways import chunk_rows, device_machine, row_bytes, way_of
from rlplus.loss.faults import STICKY
from rlplus.loss.head import Head as OpHead
from rlplus.loss.selfcheck import Results, compare

from .case import Case
from .cases import DTYPES, Head, Inputs
from .measure import elapsed, spread
from .tune_options import described

MARGIN = 0.02  # share of the time: less may be noise, and is no reason to change bits
ROUNDS = 7
LAUNCHES = 20  # row kernels timed together: one takes about as long as its launch
SIZES = 6  # sizes of chunks, those with the least time by the cost model

Step = Callable[[], object]
Row = dict[str, Any]


class Work:
    """A head with inputs as in reinforcement learning, a gradient in every row, and its operations."""

    def __init__(self, case: Case, device: torch.device, scratch_mb: int) -> None:
        inputs = self.inputs = Inputs(Head(case, str(device)), 1.0)
        self.scratch_mb, self.hidden, self.weight, self.target = scratch_mb, inputs.hidden, inputs.weight, inputs.target
        self.head = OpHead(self.hidden.detach(), self.weight.detach(), None, self.target, 1.0)
        self.kind = tuning.kind_of(device, self.hidden.dtype, case.V, case.H)
        self.of_default: dict[str, Results] = {}

    def loss(self) -> Results:
        out = linear_policy_loss(
            self.hidden, self.weight, self.target, **self.inputs.constants,
            backend="triton", memory="fast", max_scratch_mb=self.scratch_mb,
        )  # fmt: skip
        dhidden, dweight = torch.autograd.grad(out.loss, (self.hidden, self.weight))
        results = {"loss": out.loss.detach(), "logprob": out.logprob, "entropy": out.entropy}
        return results | {"dhidden": dhidden, "dweight": dweight}

    @torch.no_grad()
    def forward(self) -> Results:
        options: dict[str, Any] = {"backend": "triton", "max_scratch_mb": self.scratch_mb}
        logprob, entropy = linear_logprob(self.hidden, self.weight, self.target, **options)
        return {"logprob": logprob, "entropy": entropy}

    @cached_property
    def exact(self) -> Results:
        """logprob and entropy in fp64."""
        logps = (z.log_softmax(1) for (z,) in self.inputs.head.exact_logits())
        entropy = torch.cat([-(logp.exp() * logp).sum(1) for logp in logps])
        return {"logprob": self.inputs.head.logprob, "entropy": entropy}

    def results(self, operation: str, tiling: Tiling) -> Results:
        with tuning.using(self.kind, tiling):
            found: Results = getattr(self, operation)()
        return found

    def fault(self, operation: str, tiling: Tiling) -> str:
        """The fault in the operation's results, empty if there is none. Gradients are compared with the default's."""
        if operation not in self.of_default:
            self.of_default[operation] = self.results(operation, DEFAULT)
        plain = self.of_default[operation]
        exact = {name: self.exact.get(name, value.float()) for name, value in plain.items()}
        got, again = (self.results(operation, tiling) for _ in range(2))
        return compare(got, again, plain, exact)

    @cached_property
    def chunk(self) -> tuple[Tensor, Tensor, int, Tensor, None, float]:
        """Arguments of the row kernels: values, logits (rows, W), V, target, bias, temperature."""
        vendors = DEFAULT._replace(loss="vendor")
        rows = chunk_rows(self.head, way_of(self.head, True, tiling=vendors), self.scratch_mb * 1e6, tiling=vendors)
        V, device = len(self.weight), self.hidden.device
        values = torch.ones(rows, row_values.WIDTH.value, device=device)
        return values, 2 * torch.randn(rows, -(-V // 64) * 64, device=device), V, self.target[:rows], None, 1.0


# ---- what is timed, and the candidates


def row_exponentials(work: Work, tiling: Tiling) -> Step:
    values, logits, V, *_ = work.chunk
    parts = max(1, min(-(-V // tiling.statistics.BLOCK_V), -(-tiling.programs // len(values))))
    partial = logits.new_empty(parts, kernels.PARTIALS.value, len(values))

    def step() -> None:
        for _ in range(LAUNCHES):
            exponentials.row_exponentials(partial, None, *work.chunk, block=tiling.statistics)

    return step


def row_gradient(work: Work, tiling: Tiling) -> Step:
    out = torch.empty_like(work.chunk[1], dtype=work.hidden.dtype)

    def step() -> None:
        for _ in range(LAUNCHES):
            exponentials.row_gradient(out, *work.chunk, block=tiling.gradient)

    return step


def forward(work: Work, tiling: Tiling) -> Step:
    return partial(work.results, "forward", tiling)


def loss(work: Work, tiling: Tiling) -> Step:
    return partial(work.results, "loss", tiling)


def sizes_of_chunks(work: Work, best: Tiling) -> Iterable[Tiling]:
    scratch, way = work.scratch_mb * 10**6, way_of(work.head, True, tiling=best)
    row, machine = row_bytes(work.head, way), device_machine(work.hidden.device)
    ranked = cost.ranked_rows(machine, work.head.shape, row, scratch, way.path)
    return (best._replace(rows=Rows(size, scratch)) for size in ranked[:SIZES])


def first_gemms(work: Work) -> list[First]:
    return ["vendor", *kernels.tiles(work.hidden)]


class Part(NamedTuple):
    """operation: the method of `Work` whose results are checked; step: makes the function that is timed."""

    name: str
    operation: str
    step: Callable[[Work, Tiling], Step]
    candidates: Callable[[Work, Tiling], Iterable[Tiling]]


PARTS = (
    Part("row exponentials", "loss", row_exponentials, lambda work, best: (
        best._replace(statistics=block, programs=programs) for block, programs in product(STATISTICS, PROGRAMS)
    )),
    Part("row gradient", "loss", row_gradient, lambda work, best: (
        best._replace(gradient=block) for block in GRADIENT
    )),
    Part("first GEMM, logprobs alone", "forward", forward, lambda work, best: (
        best._replace(forward=tile) for tile in first_gemms(work)
    )),
    Part("first GEMM, with a gradient", "loss", loss, lambda work, best: (
        best._replace(loss=tile) for tile in first_gemms(work)
    )),
    Part("rows of a chunk", "loss", loss, sizes_of_chunks),
)  # fmt: skip


# ---- the search


def search(
    work: Work,
    clock: Callable[[Step], float],
    say: Callable[[str], None],
    seconds_left: Callable[[], float] = lambda: inf,
    parts: Sequence[Part] = PARTS,
) -> tuple[Tiling, list[Row]]:
    """The fastest tiling, and a row per candidate. clock: ms of a step.

    RuntimeError if the default, or the choice of the parts before, fails.
    """
    best, rows = DEFAULT, []
    for part in parts:
        ready: list[tuple[Tiling, Row, Step]] = []
        for tiling in dict.fromkeys((best, *part.candidates(work, best))):
            row: Row = {"part": part.name, "tiling": changes(best, tiling), "status": "left out: no time left"}
            rows.append(row)
            if seconds_left() <= 0:
                continue
            step, row["status"] = prepared(part, work, tiling)
            if step is not None:
                ready.append((tiling, row, step))
            elif tiling == best:
                raise RuntimeError(f"{part.name}, {row['tiling']}: {row['status']}")
        times = rounds([step for *_, step in ready], clock)
        for (_, row, _), own in zip(ready, times, strict=True):
            row |= {"ms": spread(own), "ratio": spread(ratios(own, times[0]))}
        for row in (row for row in rows if row["part"] == part.name):
            result = f"{row['ms']['median']:.3f} ms, {row['ratio']['median']:.3f}" if "ms" in row else row["status"]
            say(f"{part.name}: {row['tiling']}: {result}")
        if ready:
            best = ready[choice(times)][0]
    return best, rows


def prepared(part: Part, work: Work, tiling: Tiling) -> tuple[Step | None, str]:
    """The step to time, compiled; None, and why, if a candidate is wrong or fails."""
    try:
        if fault := work.fault(part.operation, tiling):
            return None, f"wrong: {fault}"
        step = part.step(work, tiling)
        step()
    except Exception as error:  # raised by Triton, its compiler or the driver; out of memory
        if any(text in str(error) for text in STICKY):
            raise
        return None, f"failed: {one_line(error)}"
    return step, "ok"


def rounds(steps: Sequence[Step], clock: Callable[[Step], float]) -> list[list[float]]:
    """ms of each step in each round; each round starts with another step."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(ROUNDS):
        for i in range(len(steps)):
            at = (i + turn) % len(steps)
            times[at].append(clock(steps[at]))
    return times


def ratios(times: Sequence[float], first: Sequence[float]) -> list[float]:
    return [t / f for t, f in zip(times, first, strict=True)]


def choice(times: Sequence[Sequence[float]]) -> int:
    """The candidate with the least median ratio to the first in the same round; the first if within MARGIN."""
    medians = [median(ratios(own, times[0])) for own in times]
    fastest = medians.index(min(medians))
    return fastest if medians[fastest] <= 1 - MARGIN else 0


def changes(before: Tiling, after: Tiling) -> str:
    """The fields that a candidate changes, in a line."""
    fields = [name for name in Tiling._fields if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {_short(getattr(after, name))}" for name in fields) or "as before"


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- the command


def this_device(dtype: torch.dtype) -> torch.device:
    """The current GPU; ValueError without one, or if the self-check failed. In Triton's interpreter, the CPU."""
    if not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("tune needs CUDA, and torch sees no such device")
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    verdict = verdicts.verdict_on(device, dtype)
    if verdict.status != "passed":
        raise ValueError(f"want a GPU on which backend 'triton' passes its self-check; it says: {verdict.reason}")
    return device


def main(parser: argparse.ArgumentParser, options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Tune, and write the file; wrong arguments exit with status 2."""
    until = time.monotonic() + options.seconds
    try:
        case, scratch_mb = described(options)
        device = this_device(DTYPES[case.dtype])
        kind = tuning.kind_of(device, DTYPES[case.dtype], case.V, case.H)
        path = options.output or tuning.cached_file(kind)
        if path is None:
            raise ValueError("want --output: the environment names no folder for caches")
    except ValueError as error:
        parser.error(str(error))
    say(f"{kind}; {case.N} tokens, {scratch_mb} MB")
    clock = partial(elapsed, cuda=device.type == "cuda")
    found, rows = search(Work(case, device, scratch_mb), clock, say, lambda: until - time.monotonic())
    tuning.write(path, tuning.record_of(kind, found, rows))
    say(f"{changes(DEFAULT, found)}: written to {path}")
