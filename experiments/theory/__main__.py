"""python -m experiments.theory [--figure FILE]: the paper's statements and variants of its coefficient, summed."""

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from rlplus.bench.output import lines

from .coefficients import advantage_rows, coefficient_rows, estimate_rows
from .statements import STATEMENTS


def statement_rows() -> Iterator[tuple[str, ...]]:
    yield ("where", "statement", "result of the sums", "verdict")
    for statement in STATEMENTS:
        found = statement()
        yield (found.place, found.statement, found.computed, found.verdict)


def table(rows: Callable[[], Iterator[tuple[str, ...]]]) -> str:
    """A Markdown table of the rows, of which the first is the header."""
    header, *rest = ([cell.replace("|", "\\|") for cell in row] for row in rows())
    return lines(header, rest)


TABLES = {
    "statements": statement_rows,
    "coefficients": coefficient_rows,
    "estimates": estimate_rows,
    "advantages": advantage_rows,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.theory", description=__doc__)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the coefficients, for example to a .svg")
    options = parser.parse_args(arguments)
    if options.figure and find_spec("matplotlib") is None:
        parser.error("argument --figure: want matplotlib (the extra bench); it is not installed")
    sys.stdout.write("\n\n".join(table(rows) for rows in TABLES.values()) + "\n")
    if options.figure:
        from .figure import draw

        draw(options.figure)


if __name__ == "__main__":
    main()
