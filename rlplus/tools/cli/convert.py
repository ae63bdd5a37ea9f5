"""`rlplus convert`."""

import argparse
from pathlib import Path

from rlplus.tools.cli.common import Commands, at_least


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    convert = commands.add_parser("convert", help="make a configuration of TRL's GRPOConfig or verl's command line")
    convert.add_argument("script", help="a Python file with one GRPOConfig, or a shell script of verl; it is not run")
    convert.add_argument("--gpus", type=at_least(1), default=1, help="processes of the TRL run, 1 by default")
    convert.add_argument("--out", default="run.yaml", help="the file to write, run.yaml by default; never overwritten")
    convert.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as reward.kind=math_verify"
    )
    convert.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the configuration, and print what is lost and what is missing."""
    from rlplus.common.terminal import Terminal
    from rlplus.tools.convert import convert
    from rlplus.train.config import write_new

    converted = convert(Path(args.script), args.gpus, args.overrides)
    write_new(Path(args.out), converted.text)
    console = Terminal()
    console.print(f"{args.out}: from {args.script}")
    for title, lines in (("Fill in:", converted.missing), ("Not converted:", converted.lost)):
        if lines:
            console.print(title, *(f"  {line}" for line in lines), sep="\n")
    console.print(f"Next: rlplus plan {args.out}")
