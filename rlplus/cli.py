"""The command line: rlplus train | plan | eval | report | demo."""

import argparse
import gc
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlplus import __version__
from rlplus.errors import RunFailed, log_to_stderr, printable

if TYPE_CHECKING:
    from rlplus.config import Config
    from rlplus.plan import Plan
    from rlplus.plan.data import DataPlan


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; foreseen errors end in one message and exit status 2, not in a traceback.

    A run that a signal ended exits with 128 + its number, as the shell would have it: 130 for Ctrl-C, 143 for SIGTERM.
    """
    args = _parse(argv)
    log_to_stderr()
    try:
        return int(args.run(args) or 0)
    except (ValueError, OSError, RunFailed) as error:
        _complain(f"rlplus {args.command}: {error}")
        return 2
    except KeyboardInterrupt as stop:
        _complain(f"rlplus {args.command}: {str(stop) or 'interrupted'}")
        return 128 + int(getattr(stop, "signal", signal.SIGINT))


def _complain(message: str) -> None:
    """Write to stderr, unless its reader is gone: Ctrl-C also ends `tee`. The exit status reports it anyway."""
    try:
        print(printable(message), file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the interpreter flushes once more


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(_resume_joined(sys.argv[1:] if argv is None else argv))
    # argparse gives a list of positionals only one stretch: the overrides behind an option are left over.
    more = [text for text in rest if hasattr(args, "overrides") and not text.startswith("-")]
    if len(more) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(text for text in rest if text not in more)}")
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

    train = commands.add_parser("train", help="train as a configuration file says", allow_abbrev=False)
    train.add_argument(
        "--resume", nargs="?", metavar="auto|step-N",
        help="go on from the newest checkpoint in output_dir, in the stage it is in; --resume=auto starts the run "
        "where there is none, --resume=step-000020 goes back to that checkpoint",
    )  # fmt: skip
    train.add_argument("--force", action="store_true", help="start although the memory planned is more than there is")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="pass@1 and pass@k of a model on benchmarks or a configuration's data")
    evaluate.add_argument("--model", help="Hugging Face folder; default: output_dir/model of the run or its last stage")
    evaluate.add_argument("--benchmarks", help="names with commas, such as aime24,gpqa_diamond: evaluation.benchmarks")
    evaluate.add_argument("--data", help="file with the problems, in place of the hub: evaluation.data.path")
    evaluate.add_argument("--template", help="own, qwen, simplerl, prime or none: evaluation.data.template")
    evaluate.add_argument(
        "--output", metavar="FOLDER", help="for evaluation-BENCHMARK.json and samples/; default: output_dir"
    )
    evaluate.set_defaults(run=_eval)

    plan = commands.add_parser("plan", help="memory of each GPU by part, and a rough time, before a run")
    plan.add_argument("--gpus", type=int, help="how many; default: this machine's, or 8")
    known = "a100-40g, a100-80g, h100, h200, or a size of memory such as 24g"
    plan.add_argument("--gpu", help=f"{known}; default: this machine's, or a100-80g")
    plan.add_argument(
        "--data",
        action="store_true",
        help="also load the data, grade the demonstrations and show three prompts as the model will see them",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes and seconds")
    plan.add_argument(
        "--env",
        action="store_true",
        help="print this machine's versions, devices and backends of the head as JSON, for bug reports",
    )
    plan.set_defaults(run=_plan)

    for command in (train, plan, evaluate):
        count = "?" if command is plan else None  # --env needs none
        what = "YAML file, such as configs/gsm8k-tiny.yaml"
        also = "; or a model: a folder, or a name on the hub" if command is evaluate else ""
        command.add_argument("config", nargs=count, help=what + also)
        command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as train.lr=1e-6")

    report = commands.add_parser("report", help="curves, results and samples of runs and evaluations as one HTML file")
    report.add_argument("runs", nargs="+", metavar="FOLDER", help="output folders of runs or evaluations")
    report.add_argument("-o", "--output", default="report.html", help="default: report.html")
    report.add_argument("--show", type=int, metavar="N", help="print the N newest samples of each, write no file")
    report.add_argument("--step", type=int, help="with --show: those of the kept step nearest to this one")
    report.set_defaults(run=_report)

    demo = commands.add_parser("demo", help="train a small model with GRPO and RL-PLUS and compare them")
    demo.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0 on; default 1")
    demo.add_argument("--output", default="runs/demo", help="default: runs/demo")
    demo.set_defaults(run=_demo)
    return parser


def _quiet_imports() -> None:
    """Import the slow libraries, without their banners and warnings, about which a user can do nothing.

    Called when the arguments and the configuration are known to be right: what is wrong with them is said at once. A
    variable of the environment that is set already stays, so TORCH_CPP_LOG_LEVEL=INFO, say, brings torch's back.
    """
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DEEPSPEED_LOG_LEVEL"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's lines about NUMA are torch's C++ warnings
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed searches for others


def _train(args: argparse.Namespace) -> None:
    from rlplus.config import check_training_files, load_stages, with_first_model

    stages = load_stages(args.config, args.overrides)
    for number, config in enumerate(stages, 1):
        with _naming(number, stages):
            check_training_files(config, model=number == 1)
    _quiet_imports()
    for number, config in enumerate(with_first_model(stages), 1):
        with _naming(number, stages):
            _check_memory(config, force=args.force)
    resume = {None: False, "newest": True}.get(args.resume, args.resume)
    newest = _newest_stage(stages)
    for number, config in enumerate(stages[newest - 1 :], newest):
        with _naming(number, stages):
            _train_stage(config, resume if number == newest else resume and "auto")


@contextmanager
def _naming(number: int, stages: "Sequence[Config]") -> Iterator[None]:
    """Make errors inside name the stage, if there are several."""
    try:
        yield
    except (ValueError, RunFailed) as error:
        if len(stages) == 1:
            raise
        kind = ValueError if isinstance(error, ValueError) else RunFailed
        raise kind(f"stage {number}: {error}") from error


def _newest_stage(stages: "Sequence[Config]") -> int:
    """The last stage with a checkpoint, before which all are done; without any, the first."""
    from rlplus.checkpoint import latest

    started = [k for k, config in enumerate(stages, 1) if latest(Path(config.output_dir) / "checkpoints")]
    return max(started, default=1)


def _train_stage(config: "Config", resume: bool | str) -> None:
    """Train, and release all memory for the next stage."""
    import torch

    from rlplus.evaluation import evaluator, validator
    from rlplus.trainer import phase_out_of_memory, train

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
    from rlplus.plan import make_plan, this_cluster
    from rlplus.plan.show import show
    from rlplus.terminal import Terminal

    console = Terminal(stderr=True)
    console.quiet = int(os.environ.get("RANK", 0)) != 0
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
    from rlplus.checkpoint import latest
    from rlplus.plan import this_cluster
    from rlplus.plan.advice import advise

    newest = latest(Path(config.output_dir) / "checkpoints")
    left = f"The newest checkpoint is {newest}." if newest else "There is no checkpoint yet."
    try:
        advice = advise(config, this_cluster(config), phase)
    except RuntimeError as error:  # a model that cannot be built without memory
        advice = f"No plan of the memory: {' '.join(str(error).split())}"
    return f"{str(failure).removesuffix('.')}. {left} {advice}"


def _plan(args: argparse.Namespace) -> int:
    """Print the plan; exit status 1 if the run does not fit, or would refuse its data."""
    if args.env:
        from rlplus.ops.environment import environment

        sys.stdout.write(json.dumps(environment(), indent=2) + "\n")
        return 0
    if args.config is None:
        raise ValueError("want a configuration, such as configs/gsm8k-tiny.yaml, or --env")
    from rlplus.config import (
        check_model_path,
        check_training_files,
        load_stages,
        shipped_architecture,
        with_first_model,
    )

    stages = load_stages(args.config, args.overrides)
    path = stages[0].model.path
    if args.data:
        for number, config in enumerate(stages, 1):
            with _naming(number, stages):
                check_training_files(config, model=number == 1)
    elif path is not None and shipped_architecture(path) is None:
        check_model_path(path)
    _quiet_imports()
    from rlplus.plan import make_cluster, make_plan

    cluster = make_cluster(args.gpus, args.gpu)
    plans = []
    for number, config in enumerate(with_first_model(stages), 1):
        with _naming(number, stages):
            data = _plan_data(config) if args.data else None
            if data is not None and data.prompts:
                config = config.with_steps(data.prompts)  # those of its epochs
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


def _plan_data(config: "Config") -> "DataPlan":
    from rlplus.plan.data import plan_data  # with the trainer, which a plan of the memory does without

    return plan_data(config)


def _show_plans(plans: "Sequence[tuple[Plan, DataPlan | None]]") -> None:
    from rlplus.plan.show import show, show_data
    from rlplus.terminal import Terminal

    for number, (plan, data) in enumerate(plans, 1):
        if len(plans) > 1:
            Terminal().print(f"Stage {number}")
        show(plan, Terminal())
        if data is not None:
            show_data(data, Terminal())


def _eval(args: argparse.Namespace) -> None:
    from rlplus.config import check_evaluation_files, check_output_folder, load_config

    config, model = load_config(*_evaluated(args)), args.model or _model(args)
    output = Path(args.output or config.output_dir)
    if output.suffix == ".json":
        raise ValueError(f"want --output a folder, which gets a file for each benchmark; got {output}")
    check_output_folder(output, "--output" if args.output else "output_dir")
    check_evaluation_files(config, model)
    _quiet_imports()
    from rlplus.data import SAMPLES
    from rlplus.evaluation import RESULTS, evaluate_model, result_table, save_results
    from rlplus.terminal import Terminal, counter

    rank = int(os.environ.get("RANK", 0))
    with counter("problems evaluated:", quiet=rank != 0) as progress:
        results = evaluate_model(config, model, progress, output / SAMPLES / RESULTS)
    if rank == 0:
        terminal = Terminal()
        terminal.print(result_table(results))  # first: it took long, and the files may not be written
        terminal.print(f"written to {', '.join(map(str, save_results(output, results)))}")


def _model(args: argparse.Namespace) -> str | None:
    """The first argument if it is a model: a configuration's name ends in .yaml or .yml."""
    return None if args.config.endswith((".yaml", ".yml")) else args.config


def _evaluated(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The configuration's file, and the overrides, including those given as options."""
    options = {"evaluation.data.path": args.data, "evaluation.data.template": args.template}
    if args.benchmarks is not None:
        options["evaluation.benchmarks"] = f"[{args.benchmarks}]"
    overrides = [f"{key}={value}" for key, value in options.items() if value is not None]
    if (model := _model(args)) is None:
        return Path(args.config), [*overrides, *args.overrides]
    path = Path(model).resolve()
    name = f"{path.parent.name}-model" if path.name == "model" else path.name  # every run's is called model
    own = [f"model.path={model}", f"output_dir=runs/eval/{name}"]
    own += ["evaluation.benchmarks=[]"] if args.data else []  # all that is in the file
    return Path(__file__).parent / "configs/eval.yaml", [*own, *overrides, *args.overrides]


def _labels(runs: Sequence[str]) -> dict[str, Path]:
    """The folders by their names, or by their paths where names are the same."""
    folders = [Path(run) for run in runs]
    names = [folder.resolve().name for folder in folders]
    same = len(set(names)) < len(names)
    return dict(zip(map(str, folders) if same else names, folders, strict=True))


def _report(args: argparse.Namespace) -> None:
    from rlplus.config import check_output_folder

    if args.show is not None and args.show < 1:
        raise ValueError(f"want --show at least 1; got {args.show}")
    if args.step is not None and args.show is None:
        raise ValueError("want --show with --step, such as --show 8 --step 40")
    check_output_folder(Path(args.output).parent, "--output")
    _quiet_imports()
    from rlplus.data import SAMPLES
    from rlplus.evaluation import Evaluation, load_results
    from rlplus.report import is_run, load_run, show_samples, write_report
    from rlplus.terminal import Terminal

    labels = _labels(args.runs)
    if args.show is not None:  # also what `rlplus eval` alone wrote, which is no run
        for folder in labels.values():
            show_samples(folder / SAMPLES, args.show, Terminal(), args.step)
        return
    results: dict[str, dict[str, Evaluation]] = {}
    runs, samples = {}, {}
    for label, folder in labels.items():
        found = load_results(folder)
        for name, result in found.items():
            results.setdefault(name, {})[label] = result
        if found and not is_run(folder):
            samples[label] = folder / SAMPLES
        else:
            runs[label] = load_run(folder)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    write_report(Path(args.output), runs, results, title=", ".join(labels), samples=samples)
    Terminal().print(f"written to {args.output}")


def _demo(args: argparse.Namespace) -> None:
    _quiet_imports()
    from rlplus.demo import run_demo

    run_demo(args.output, seeds=args.seeds)
