"""`rlplus plan`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplus.common import activity
from rlplus.common.errors import RunFailed
from rlplus.tools.cli.common import (
    GPUS_HELP,
    KNOWN_GPUS,
    YAML,
    Commands,
    add_configuration,
    naming_stage,
    quiet_imports,
    saying_phases,
)

if TYPE_CHECKING:
    from rlplus.tools.plan import Plan
    from rlplus.tools.plan.data_report import DataPlan
    from rlplus.train.config import Config


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    plan = commands.add_parser("plan", help="memory of each GPU by part, and a rough time, before a run")
    plan.add_argument("--gpus", type=int, help=GPUS_HELP)
    plan.add_argument("--gpu", help=KNOWN_GPUS)
    plan.add_argument(
        "--data",
        action="store_true",
        help="also load the data, grade the demonstrations and show three prompts as the model will see them",
    )
    plan.add_argument(
        "--logprob",
        action="store_true",
        help="with --data: also load the weights, and measure how likely the model finds the demonstrations",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes and seconds")
    plan.set_defaults(run=run)
    add_configuration(plan, f"{YAML}, or a comparison, such as configs/compare/gsm8k.yaml")


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit status 1 if the run does not fit, or would refuse its data."""
    from rlplus.train.config import (
        check_model_path,
        check_training_files,
        load_stages,
        read_yaml,
        shipped_architecture,
        with_first_model,
    )

    if args.logprob and not args.data:
        raise ValueError("--logprob measures what --data reads: want both")
    if "run" in read_yaml(Path(args.config).expanduser()):
        return _plan_comparison(args)
    stages = load_stages(args.config, args.overrides)
    path = stages[0].model.path
    if args.data:
        for number, config in enumerate(stages, 1):
            with naming_stage(number, stages):
                check_training_files(config, model=number == 1)
    elif path is not None and shipped_architecture(path) is None:
        check_model_path(path)
    quiet_imports()
    from rlplus.tools.plan import make_cluster, make_plan

    cluster = make_cluster(args.gpus, args.gpu)
    plans = []
    with saying_phases("rlplus plan"):
        for number, config in enumerate(with_first_model(stages), 1):
            with naming_stage(number, stages):
                data = _plan_data(config, args.logprob) if args.data else None
                if data is not None and data.prompts:
                    config = config.with_steps(data.prompts)  # the steps of its epochs
                activity.current.begin("memory")
                try:
                    plans.append((make_plan(config, cluster), data))
                except RuntimeError as error:
                    raise RunFailed(f"no plan of the memory: {error}") from error
    if args.json:
        found = [plan.to_json() | ({"data": data.to_json()} if data is not None else {}) for plan, data in plans]
        sys.stdout.write(json.dumps(found[0] if len(found) == 1 else {"stages": found}, indent=2) + "\n")
    else:
        _show_plans(plans)
    return 0 if all(plan.fits and (data is None or not data.refusals) for plan, data in plans) else 1


def _plan_comparison(args: argparse.Namespace) -> int:
    """Print what all runs of a comparison take; exit status 1 if one does not fit."""
    if args.data:
        raise ValueError(f"--data is for a training configuration; {args.config} is a comparison")
    quiet_imports()
    from rlplus.common.terminal import Terminal
    from rlplus.tools.compare.config import load_comparison
    from rlplus.tools.compare.launches import Runner
    from rlplus.tools.compare.planned_runs import lines, plan_comparison
    from rlplus.tools.plan import make_cluster

    path = Path(args.config).expanduser()
    comparison = load_comparison(path)
    runner = Runner(comparison, path.parent / comparison.run, path.parent, overrides=args.overrides)
    activity.current.begin("memory")
    try:
        with saying_phases("rlplus plan"):
            planned = plan_comparison(comparison, runner, make_cluster(args.gpus, args.gpu))
    except RuntimeError as error:
        raise RunFailed(f"no plan of the memory: {error}") from error
    if args.json:
        sys.stdout.write(json.dumps([each.to_json() for each in planned], indent=2) + "\n")
    else:
        Terminal().print(*lines(planned), sep="\n")
    return 0 if all(each.plan.fits for each in planned) else 1


def _plan_data(config: "Config", logprob: bool) -> "DataPlan":
    from rlplus.tools.plan.data_report import plan_data  # loads the trainer, which a plan of the memory does without

    return plan_data(config, logprob=logprob)


def _show_plans(plans: "Sequence[tuple[Plan, DataPlan | None]]") -> None:
    from rlplus.common.terminal import Terminal
    from rlplus.tools.plan.plan_text import show, show_data

    for number, (plan, data) in enumerate(plans, 1):
        if len(plans) > 1:
            Terminal().print(f"Stage {number}")
        if data is not None:  # first, since it was asked for
            show_data(data, Terminal())
        show(plan, Terminal(), data_refused=data is not None and bool(data.refusals))
