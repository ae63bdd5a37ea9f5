"""`rlplus verify`."""

import argparse
from pathlib import Path

from rlplus.tools.cli.common import Commands, at_least, quiet_imports


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    verify = commands.add_parser("verify", help="recompute a step of a run in float64 and print the errors")
    verify.add_argument("folder", metavar="RUN", help="output folder of a run of one process; it is not changed")
    verify.add_argument(
        "--step", type=at_least(1), metavar="N", help="from the checkpoint of step N; default: the newest one"
    )
    verify.add_argument(
        "--sequences",
        type=at_least(1),
        default=4,
        metavar="K",
        help="sequences whose gradients are compared; default 4",
    )
    verify.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the errors of a step; 1 if one is above its bound."""
    from rlplus.train.config import check_run_folder

    folder = Path(args.folder)
    check_run_folder(folder)
    quiet_imports()
    from rlplus.common.terminal import Terminal
    from rlplus.tools.verify import verify_run
    from rlplus.tools.verify.verify_text import show

    verification = verify_run(folder, args.step, args.sequences)
    show(verification, Terminal())
    return 1 if verification.wrong else 0
