"""The command line: `rlplus COMMAND`, a module per command."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from rlplus import __version__
from rlplus.common.errors import RunFailed, install_command, log_to_stderr, printable, without_passwords
from rlplus.tools.cli import (
    compare,
    completion,
    convert,
    env,
    evaluate,
    init,
    plan,
    report,
    samples,
    train,
    upload,
    verify,
    watch,
    write_problems,
)

TRAIN = (  # modules of the extra `train`
    "accelerate", "deepspeed", "jinja2", "math_verify", "numpy", "pyarrow", "pydantic", "rich", "shtab",
    "tensorboard", "transformers", "yaml",
)  # fmt: skip
MOVED = {("report", "--show"): "rlplus samples --help", ("plan", "--env"): "rlplus env"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; -> the exit status."""
    args = parse(argv)
    return guarded(f"rlplus {args.command}", lambda: _run(args))


def _run(args: argparse.Namespace) -> int | None:
    if args.command != "env":  # a bug report on the loss alone
        _check_trainer()
    status: int | None = args.run(args)
    return status


def guarded(name: str, command: Callable[[], int | None]) -> int:
    """Run a command; -> the exit status. Foreseen errors end in one message and status 2, not in a traceback.

    A run that a signal ended exits with 128 + its number, as the shell would have it: 130 for Ctrl-C, 143 for SIGTERM.
    """
    log_to_stderr()
    try:
        return int(command() or 0)
    except (ValueError, OSError, RunFailed) as error:
        _complain(f"{name}: {error}")
        return 2
    except KeyboardInterrupt as stop:
        _complain(f"{name}: {str(stop) or 'interrupted'}")
        return 128 + int(getattr(stop, "signal", signal.SIGINT))


def _check_trainer() -> None:
    """RunFailed where only the loss is installed, or Python is too old for the rest."""
    if sys.version_info < (3, 11):
        raise RunFailed(f"want Python 3.11 or later for all but the loss; got {sys.version.split()[0]}")
    if missing := [name for name in TRAIN if find_spec(name) is None]:
        raise RunFailed(f"needs packages that are not installed ({', '.join(missing)}): {install_command('train')}")


def _complain(message: str) -> None:
    """Write to stderr, unless its reader is gone: Ctrl-C also ends `tee`. The exit status reports it anyway."""
    try:
        print(printable(without_passwords(message)), file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the interpreter flushes once more


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    argv = sys.argv[1:] if argv is None else argv
    for (command, option), other in MOVED.items():
        if command in argv[:1] and option in [text.partition("=")[0] for text in argv]:
            parser.error(f"{command} has no {option}: see {other}")
    args, rest = parser.parse_known_args(_resume_joined(argv))
    # argparse gives a list of positionals only one stretch: the overrides behind an option are left over.
    more = [text for text in rest if hasattr(args, "overrides") and not text.startswith("-")]
    if unknown := [text for text in rest if text not in more]:
        keys = [text.lstrip("-") for text in unknown if re.match(r"--?[a-z_]+(\.\w+)+=", text)]
        hint = f"; keys of the configuration have no dashes: {' '.join(keys)}" if keys else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if more:
        args.overrides = [*args.overrides, *more]
    return args


def _resume_joined(argv: Sequence[str]) -> list[str]:
    """Join --resume and its value into one argument, so that a bare one does not swallow the configuration."""
    joined: list[str] = []
    for text in argv:
        if joined[-1:] == ["--resume=newest"] and re.fullmatch(r"auto|step-\d+", text):
            joined[-1] = f"--resume={text}"
        else:
            joined.append("--resume=newest" if text == "--resume" else text)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlplus", description="RL-PLUS for language models, with fused losses.")
    parser.add_argument("--version", action="version", version=f"rlplus {__version__}")
    # The `deepspeed` launcher puts it in front of the command, and sets LOCAL_RANK, which is what counts, too.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    first = (init, convert, write_problems, train)
    further = (upload, env)
    for command in (*first, watch, evaluate, plan, verify, report, samples, compare, *further):
        command.add(commands)
    completion.add(commands, parser)
    return parser
