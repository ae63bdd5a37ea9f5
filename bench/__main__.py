"""rlplus-bench, python -m bench: measures the head's backends and their peers.

rlplus-bench tune finds the fastest tiling of the triton backend on this machine's GPU; see rlplus-bench tune --help.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from rlplus.errors import nearest

from . import report
from .cases import Case
from .measure import keep_memory, resident_memory, run
from .peers import METHODS
from .suites import SUITES


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(arguments: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="rlplus-bench", description=__doc__)
    parser.add_argument("--suite", choices=tuple(SUITES), help="the cases; bench/README.md says how long they take")
    output = parser.add_argument("--output", type=Path, metavar="DIR", default=Path("runs/bench"))
    output.help = "folder for JSON and plots; default: %(default)s"
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="on the CPU; default: %(default)s")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds of every case; default: the suite's")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these methods and the bare GEMMs")
    parser.add_argument("--list", action="store_true", help="print the methods and end")
    parser.add_argument("--model", action="store_true", help="print what the triton backend should cost, and end")
    parser.add_argument("--memory-of", metavar="TASK", help=argparse.SUPPRESS)
    return parser, parser.parse_args(arguments)


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with status 2 and a message if an argument is invalid."""
    for name in ("threads", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name}: want a number >= 1; got {value}")
    if options.suite == "gpu" and not torch.cuda.is_available():
        parser.error("argument --suite: gpu needs CUDA, and torch sees no such device")
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"argument --output: want a folder; got the file {options.output}")
    for name in options.only or ():
        if name not in METHODS:
            unknown(parser, name)
    if not (options.suite or options.list or options.model or options.memory_of):
        parser.error("want --suite, --list or --model")


def unknown(parser: argparse.ArgumentParser, name: str) -> NoReturn:
    near = nearest(name, METHODS)
    parser.error(f"argument --only: no method {name!r}{f' (did you mean {near!r}?)' if near else '; see --list'}")


def measure(options: argparse.Namespace) -> None:
    cases, seconds = SUITES[options.suite]
    until = time.monotonic() + seconds
    device = "cuda" if options.suite == "gpu" else "cpu"
    torch.set_num_threads(options.threads)
    stem = options.output / (f"cpu-{options.threads}" if options.suite in ("cpu", "full") else options.suite)
    record = report.Record(stem.with_suffix(".json"), options.suite, device, options.threads)
    wanted = [chosen(case, options) for case in cases()]
    if device == "cpu":
        keep_memory(max(working_bytes(case) for case in wanted))
    for case in wanted:
        measure_case(case, device, until, record)
    record.result["complete"] = True
    record.save()
    say(report.plots(record.result, stem))
    say(f"results: {record.path}")


def working_bytes(case: Case) -> int:
    """Memory for the timed calls of a case: eight of every matrix in fp32, more than any method here has at once."""
    return 8 * 4 * (case.N * case.V + case.V * case.H + case.N * case.H)


def chosen(case: Case, options: argparse.Namespace) -> Case:
    """The case with the command's methods and repeats."""
    changes: dict[str, Any] = {"repeats": options.repeats} if options.repeats else {}
    if options.only:
        changes |= {key: tuple(m for m in getattr(case, key) if m in options.only) for key in ("methods", "sparse")}
    return Case(**(vars(case) | changes))


def measure_case(case: Case, device: str, until: float, record: report.Record) -> None:
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
    say(report.case_table(record.result["cases"][-1]))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["tune"]:
        from . import tune  # needs triton

        tune.main(arguments[1:], say)
        return
    parser, options = parse(arguments)
    checked(parser, options)
    if options.memory_of:
        say(str(resident_memory(options.memory_of)))
    elif options.list:
        for method in METHODS.values():
            say(f"{method.name:30} {method.what} ({method.package})")
    elif options.model:
        from . import model  # needs triton

        say(model.table())
        say("")
        say(model.worth())
        say("")
        say(model.paths())
    else:
        measure(options)


if __name__ == "__main__":
    main()
