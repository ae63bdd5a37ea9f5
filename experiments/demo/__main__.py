"""python -m experiments.demo [--seeds N] [--output FOLDER]"""

import argparse
import sys
from collections.abc import Sequence

from rlplus.tools.cli import guarded
from rlplus.tools.cli.common import quiet_imports


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; -> the exit status."""
    description = "Train a small model with GRPO and RL-PLUS and compare them."
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=description)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0 on; default 1")
    parser.add_argument("--output", default="runs/demo", help="default: runs/demo")
    args = parser.parse_args(argv)

    def demo() -> None:
        quiet_imports()
        from experiments.demo.demo_run import run_demo

        run_demo(args.output, seeds=args.seeds)

    return guarded(parser.prog, demo)


if __name__ == "__main__":
    sys.exit(main())
