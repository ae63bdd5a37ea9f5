"""`rlplus problems`."""

import argparse
from pathlib import Path

from rlplus.tools.cli.common import Commands, add_configuration, at_least


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    problems = commands.add_parser("problems", help="write the problems of an environment as data, one JSON per line")
    add_configuration(problems, "YAML file with rollout.environment")
    problems.add_argument("--out", help="the file to write, data.path by default; never overwritten")
    problems.add_argument(
        "-n", type=at_least(1), metavar="N", help="how many; default: all. A server has no end of them"
    )
    problems.add_argument("--held-out", action="store_true", help="those for evaluations, if the environment has some")
    problems.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the problems."""
    import json

    from rlplus.common.terminal import Terminal
    from rlplus.train.config import load_config, write_new

    config = load_config(args.config, args.overrides)
    if config.rollout.environment is None:
        raise ValueError(f"want rollout.environment in {args.config}; it has none")
    if args.out is None and (args.held_out or len(config.data.paths) != 1):
        raise ValueError("want --out, the file to write")
    from rlplus.train.rollout.environments import load_environment

    rows = list(load_environment(config.rollout.environment).problems(held_out=args.held_out, count=args.n))
    path = Path(args.out or config.data.paths[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    Terminal().print(f"{path}: {len(rows)} problems of {config.rollout.environment.name}")
