"""`rlplus train`."""

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplus.common.errors import RunFailed
from rlplus.tools.cli.common import Commands, add_configuration, naming_stage, quiet_imports, terminal

if TYPE_CHECKING:
    from rlplus.train.config import Config


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    train = commands.add_parser("train", help="train as a configuration file says", allow_abbrev=False)
    train.add_argument(
        "--resume", nargs="?", metavar="auto|step-N",
        help="go on from the newest checkpoint in output_dir, in the stage it is in; --resume=auto starts the run "
        "where there is none, --resume=step-000020 goes back to that checkpoint",
    )  # fmt: skip
    train.add_argument("--force", action="store_true", help="start although the memory planned is more than there is")
    train.set_defaults(run=run)
    add_configuration(train)


def run(args: argparse.Namespace) -> None:
    """Train all stages, from the one that a resumed run is in."""
    from rlplus.train.config import check_engine, check_trackers, check_training_files, load_stages, with_first_model

    stages = load_stages(args.config, args.overrides)
    for number, config in enumerate(stages, 1):
        with naming_stage(number, stages):
            check_training_files(config, model=number == 1)
            check_trackers(config)
            if config.needs_engine:
                check_engine(config.rollout)
    quiet_imports(ranks=True)
    from torch.cuda import is_available

    for number, config in enumerate(with_first_model(stages), 1):
        with naming_stage(number, stages):
            if config.needs_engine:
                check_engine(config.rollout, gpu=is_available())
            _check_memory(config, force=args.force)
    newest = _newest_stage(stages)
    for number, config in enumerate(stages[newest - 1 :], newest):
        with naming_stage(number, stages):
            _train_stage(config, args.resume if number == newest else args.resume and "auto")


def _newest_stage(stages: "Sequence[Config]") -> int:
    """The last stage with a checkpoint, before which all are done; without any, the first."""
    from rlplus.train.checkpoint import latest

    started = [k for k, config in enumerate(stages, 1) if latest(Path(config.output_dir) / "checkpoints")]
    return max(started, default=1)


def _train_stage(config: "Config", resume: str | None) -> None:
    """Train, and release all memory for the next stage."""
    import torch

    from rlplus.train.trainer import evaluator, phase_out_of_memory, train, validator

    try:
        train(config, resume=resume, evaluate=evaluator(config), validate=validator(config))
    except RunFailed as failure:
        if (phase := phase_out_of_memory(failure)) is None:
            raise
        raise RunFailed(_out_of_memory(config, failure, phase)) from failure
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_memory(config: "Config", *, force: bool) -> None:
    """Show the plan. ValueError, on every rank, if the run does not fit, unless forced: a plan is an estimate."""
    from rlplus.tools.plan import make_plan, this_cluster
    from rlplus.tools.plan.plan_text import show

    console = terminal()
    try:
        plan = make_plan(config, this_cluster(config))
    except RuntimeError as error:  # a model that cannot be built without memory may well train
        console.print(f"no plan of the memory: {error}")
        return
    if plan.fits:
        console.print(plan.summary())
        return
    show(plan, console)
    if not force:
        raise ValueError(f"the run would not fit ({'; '.join(plan.memory.problems)}): change it, or try with --force")


def _out_of_memory(config: "Config", failure: RunFailed, phase: str) -> str:
    """A message with the failure, what is left of the run, and the switches that need less memory."""
    from rlplus.tools.plan import this_cluster
    from rlplus.tools.plan.advice import advise
    from rlplus.train.checkpoint import latest

    newest = latest(Path(config.output_dir) / "checkpoints")
    left = f"The newest checkpoint is {newest}." if newest else "There is no checkpoint yet."
    try:
        advice = advise(config, this_cluster(config), phase)
    except RuntimeError as error:  # a model that cannot be built without memory
        advice = f"No plan of the memory: {' '.join(str(error).split())}"
    return f"{str(failure).removesuffix('.')}. {left} {advice}"
