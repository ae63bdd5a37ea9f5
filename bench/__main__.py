"""rlplus-bench, python -m bench: measures the head's backends and their peers.

rlplus-bench submit measures this machine's GPU for the manual. See rlplus-bench submit --help.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from rlplus.common.errors import hint

from . import submit
from .suites import SUITES, on_cuda

# Imports that need torch are in functions: --help and wrong arguments are answered without it.


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
    parser.add_argument("--rows", type=Path, metavar="FILE", help="safetensors of a model: hidden, weight and target")
    parser.add_argument("--tiny", action="store_true", help="the suite's methods on a few numbers, on the CPU")
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
    if options.rows and not options.rows.is_file():
        parser.error(f"argument --rows: want a file of safetensors; got {options.rows}")
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"argument --output: want a folder; got the file {options.output}")
    if not (options.suite or options.list or options.model or options.memory_of):
        parser.error("want --suite, --list or --model")
    import torch

    from .peers import METHODS

    if on_cuda(options.suite, options.tiny) and not torch.cuda.is_available():
        parser.error(f"argument --suite: {options.suite} needs CUDA, and torch sees no such device")
    for name in options.only or ():
        if name not in METHODS:
            unknown(parser, name, METHODS)


def unknown(parser: argparse.ArgumentParser, name: str, methods: Iterable[str]) -> NoReturn:
    parser.error(f"argument --only: no method {name!r}{hint(name, methods, otherwise='; see --list')}")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["submit"]:
        submit.main(*submit.parse(arguments[1:]), say)
        return
    parser, options = parse(arguments)
    checked(parser, options)
    if options.memory_of:
        from .measure import resident_memory

        say(str(resident_memory(options.memory_of)))
    elif options.list:
        from .peers import METHODS

        for method in METHODS.values():
            say(f"{method.name:30} {method.what} ({method.package})")
    elif options.model:
        from . import model  # needs triton

        say(model.table())
        say("")
        say(model.parts())
        say("")
        say(model.paths())
    else:
        from .session import measure

        measure(options, say)


if __name__ == "__main__":
    main()
