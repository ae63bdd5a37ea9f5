"""`rlplus samples`."""

import argparse
from pathlib import Path

from rlplus.tools.cli.common import Commands, at_least


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    samples = commands.add_parser("samples", help="print kept samples, their unlikely tokens in colour")
    samples.add_argument("folders", nargs="+", metavar="FOLDER", help="output folders of runs or evaluations")
    samples.add_argument(
        "-n", "--problems", type=at_least(1), default=5, metavar="N", help="how many, newest first; default 5"
    )
    samples.add_argument("--step", type=int, help="of the kept step nearest to this one; default: the newest ones")
    samples.add_argument("--wrong", action="store_true", help="only problems with a wrong response, and that one")
    samples.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the samples of each folder."""
    from rlplus.train.config import SAMPLES, check_samples_folder

    folders = [Path(folder) for folder in args.folders]
    for folder in folders:
        check_samples_folder(folder, of_step=args.step is not None)
    from rlplus.common.terminal import Terminal
    from rlplus.tools.report import show_samples

    terminal = Terminal()
    for folder in folders:
        if len(folders) > 1:
            terminal.print(f"{folder}", style="bold underline")
        show_samples(folder / SAMPLES, args.problems, terminal, args.step, wrong=args.wrong)
