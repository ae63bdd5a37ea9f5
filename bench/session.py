"""A suite measured from its first case to its last, within its time."""

import argparse
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import torch

from . import output, plots
from .case import Case
from .measure import keep_memory, run
from .suites import SUITES, on_cuda, tiny

Say = Callable[[str], None]


def measure(options: argparse.Namespace, say: Say) -> None:
    """Measure the suite's cases, write JSON and plots, and say what came out."""
    cases, seconds = SUITES[options.suite]
    until = inf if options.tiny else time.monotonic() + seconds
    device = "cuda" if on_cuda(options.suite, options.tiny) else "cpu"
    torch.set_num_threads(options.threads)
    stem = options.output / (f"cpu-{options.threads}" if options.suite in ("cpu", "full") else options.suite)
    record = output.Record(stem.with_suffix(".json"), options.suite, device, options.threads)
    wanted = [chosen(case, options) for case in (tiny(cases()) if options.tiny else cases())]
    wanted = list(dict.fromkeys(wanted))  # with the sizes of a file some are the same
    if device == "cpu":
        keep_memory(max(working_bytes(case) for case in wanted))
    for case in wanted:
        measure_case(case, device, until, record, say)
    record.result["complete"] = True
    record.save()
    say(plots.plots(record.result, stem))
    say(f"results: {record.path}")


def working_bytes(case: Case) -> int:
    """Memory for the timed calls of a case: eight of every matrix in fp32, more than any method here has at once."""
    return 8 * 4 * (case.N * case.V + case.V * case.H + case.N * case.H)


def chosen(case: Case, options: argparse.Namespace) -> Case:
    """The case with the command's methods and repeats."""
    changes: dict[str, Any] = {"repeats": options.repeats} if options.repeats else {}
    if options.only:
        changes |= {key: tuple(m for m in getattr(case, key) if m in options.only) for key in ("methods", "sparse")}
    if options.rows:
        V, H = sizes_of(options.rows)
        changes |= {"rows": str(options.rows), "H": H, "V": V}
    return Case(**(vars(case) | changes))


def sizes_of(path: Path) -> tuple[int, int]:
    """V and H of a file of rows; ends the program if it holds something else."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise SystemExit("--rows needs safetensors: pip install safetensors") from error
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SystemExit(f"want safetensors in {path}; got: {error}") from error
    n, H = shapes.get("hidden", (0, 0))
    if not n or shapes.get("target") != (n,) or shapes.get("weight", ())[1:] != (H,):
        raise SystemExit(f"want hidden (n, H), weight (V, H) and target (n,) in {path}; got {shapes}")
    return shapes["weight"][0], H


def measure_case(case: Case, device: str, until: float, record: output.Record, say: Say) -> None:
    if not case.methods:
        return
    left = until - time.monotonic()
    if left <= 0:
        sizes = {"name": case.name, "N": case.N, "H": case.H, "V": case.V, "dtype": case.dtype, "rounds": 0}
        status = "left out: the suite's time is spent"
        rows = [{"method": name, "rho": case.shares[0], "status": status} for name in case.methods]
        record.put(sizes | {"rows": rows})
        say(f"{case.name}, N={case.N}, H={case.H}, V={case.V}, {case.dtype}: {status}")
        return
    run(case, device, until, record.put)
    say(output.case_table(record.result["cases"][-1]))
