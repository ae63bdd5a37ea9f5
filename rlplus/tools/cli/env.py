"""`rlplus env`, which needs the loss only."""

import argparse
import json
import sys

from rlplus.tools.cli.common import Commands


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    env = commands.add_parser("env", help="this machine's versions, devices and backends as JSON, for bug reports")
    env.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the environment."""
    from rlplus.tools.cli.bug_report import environment

    sys.stdout.write(json.dumps(environment(), indent=2) + "\n")
