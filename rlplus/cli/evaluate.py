"""`rlplus eval`."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlplus.cli.common import YAML, add_configuration, quiet_imports

if TYPE_CHECKING:
    from rlplus.cli.common import Commands

SHIPPED = Path(__file__).parents[1] / "configs"


def add(commands: "Commands") -> None:
    """Add the command's arguments."""
    evaluate = commands.add_parser("eval", help="pass@1 and pass@k of a model on benchmarks or a configuration's data")
    evaluate.add_argument("--model", help="Hugging Face folder; default: output_dir/model of the run or its last stage")
    evaluate.add_argument("--benchmarks", help="names with commas, such as aime24,gpqa_diamond: evaluation.benchmarks")
    evaluate.add_argument("--data", help="file with the problems, in place of the hub: evaluation.data.path")
    evaluate.add_argument("--template", help="own, qwen, simplerl, prime or none: evaluation.data.template")
    evaluate.add_argument(
        "--output", metavar="FOLDER", help="for evaluation-BENCHMARK.json and samples/; default: output_dir"
    )
    evaluate.set_defaults(run=run)
    add_configuration(evaluate, f"{YAML}; or a model: a folder, or a name on the hub")


def run(args: argparse.Namespace) -> None:
    """Evaluate, print the table and write the results."""
    from rlplus.config import check_evaluation_files, check_output_folder, load_config

    config, model = load_config(*evaluated(args)), args.model or _model(args)
    output = Path(args.output or config.output_dir)
    if output.suffix == ".json":
        raise ValueError(f"want --output a folder, which gets a file for each benchmark; got {output}")
    check_output_folder(output, "--output" if args.output else "output_dir")
    check_evaluation_files(config, model)
    quiet_imports()
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


def evaluated(args: argparse.Namespace) -> tuple[Path, list[str]]:
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
    return SHIPPED / "eval.yaml", [*own, *overrides, *args.overrides]
