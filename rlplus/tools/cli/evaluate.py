"""`rlplus eval`."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplus.common import rank_variables
from rlplus.tools.cli.common import YAML, Commands, add_configuration, quiet_imports, terminal

if TYPE_CHECKING:
    from rlplus.train.config import Config
    from rlplus.train.evaluation.results import Evaluation

SHIPPED = Path(__file__).parents[2] / "configs"
UNREAD = ("data", "algorithm", "checkpoint", "log", "validation")  # sections about a training
READ = "data.response_prefix"  # the exception: it is part of the response that is graded
ASKING = (
    "prompt",
    "answer",
    "answer_pattern",
    "system_prompt",
    "template",
    "response_prefix",
    "columns",
    "tools",
    "chat",
)  # keys of prompts and answers


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    evaluate = commands.add_parser("eval", help="pass@1 and pass@k of a model on benchmarks or a configuration's data")
    evaluate.add_argument("--model", help="Hugging Face folder; default: output_dir/model of the run or its last stage")
    evaluate.add_argument("--benchmarks", help="names with commas, such as aime24,gpqa_diamond: evaluation.benchmarks")
    evaluate.add_argument(
        "--data",
        help="file with the problems, in place of the hub: evaluation.data.path; asked as the run's own if it has none",
    )
    evaluate.add_argument("--template", help="own, qwen, simplerl, prime or none: evaluation.data.template")
    evaluate.add_argument(
        "--output", metavar="FOLDER", help="for evaluation-BENCHMARK.json and samples/; default: output_dir"
    )
    evaluate.add_argument(
        "--overwrite",
        action="store_true",
        help="remove results and samples of another model, data or settings from that folder, which are else refused",
    )
    evaluate.set_defaults(run=run)
    add_configuration(evaluate, f"{YAML}; or a model: a folder, or a name on the hub", name="model-or-configuration")


def run(args: argparse.Namespace) -> None:
    """Evaluate, print the table and write the results."""
    from rlplus.train.config import check_data_files, check_evaluation_files, check_output_folder

    path, overrides = evaluated(args)
    model = args.model or _model(args)
    config = _load(args, path, overrides)
    output = Path(args.output or config.output_dir)
    if output.suffix == ".json":
        raise ValueError(f"want --output a folder, which gets a file for each benchmark; got {output}")
    check_output_folder(output, "--output" if args.output else "output_dir")
    if args.data:
        check_data_files([args.data], "--data")
    check_evaluation_files(config, model, "--model" if args.model else "as the first argument")
    quiet_imports(ranks=True)
    from rlplus.train.data import found_columns

    own = _model(args) is not None
    if own and config.evaluation.data is not None and config.evaluation.data.paths:
        found = found_columns(config.evaluation.data, several=len(config.evaluation.benchmarks) > 1)
        overrides = [*(f"evaluation.data.{key}={value}" for key, value in found.items()), *overrides]
        config = _load(args, path, overrides)
    if own and (lengths := _lengths_that_fit(config, overrides)):
        terminal().print(f"{' and '.join(lengths)}, so that prompt and response fit the positions of the model")
        config = _load(args, path, [*lengths, *overrides])
    _evaluate(config, model, output, args.overwrite, own)


def _evaluate(config: "Config", model: str | None, output: Path, overwrite: bool, own: bool) -> None:
    """Evaluate until a signal comes, print the table and write the results. own: the model has no configuration."""
    from rlplus.common.agree import initialize_distributed
    from rlplus.common.terminal import Terminal, counter
    from rlplus.train.config import SAMPLES, check_evaluation_files
    from rlplus.train.evaluation.results import save_results
    from rlplus.train.evaluation.sample import evaluate_model
    from rlplus.train.evaluation.table import result_table
    from rlplus.train.trainer.progress import ended_by_signals

    main = rank_variables.rank() == 0
    say = Terminal(stderr=True).print
    done = 0  # counts of this process
    problems = 0
    results: dict[str, Evaluation] = {}
    files: list[Path] = []

    def advance(number: int, total: int) -> None:
        nonlocal done, problems
        done = number
        problems = total
        progress(done, problems)

    def left() -> str:
        kept = f"{done} of {problems} problems are kept in {output / SAMPLES}, the same command goes on with them"
        return kept if done else "no problem was finished yet, start it again"

    def save(found: "dict[str, Evaluation]") -> None:
        results.update(found)
        if main:
            files.extend(save_results(output, {k: one for k, one in found.items() if not one.without_references}))

    try:
        with counter("problems evaluated:", quiet=not main) as progress, ended_by_signals(say, left):
            if os.environ.get("WORLD_SIZE", "1") != "1":
                check_evaluation_files(config, model)  # must precede waiting for other ranks
                initialize_distributed(config.train.collective_timeout_s)
            evaluate_model(config, model, advance, output, overwrite=overwrite, say=say, chat_expected=own, done=save)
    finally:
        if main and results:  # it took long, and the files may not be written
            Terminal().print(result_table(results))
    if main and files:
        Terminal().print(f"written to {', '.join(map(str, files))}")
    if main and (unread := [f"{k} ({one.grader})" for k, one in results.items() if one.without_references]):
        raise ValueError(
            f"want reference answers that the grader reads; got none in {', '.join(unread)}: see "
            "evaluation.data.answer, evaluation.data.answer_pattern and reward.kind"
        )


def _lengths_that_fit(config: "Config", overrides: list[str]) -> list[str]:
    """Overrides of the default lengths for a model with fewer positions; none of lengths that were given."""
    from rlplus.train.learner.pretrained import positions, read_model_config, with_overrides

    model = config.model
    data = config.evaluation.data
    if model.path is None or data is None:
        return []
    places = positions(with_overrides(read_model_config(model.path, model.trust_remote_code), model.overrides))
    if places is None or config.max_evaluation_length <= places:
        return []
    response = "rollout.max_response_length"
    prompt = "evaluation.data.max_prompt_length"
    given = {override.partition("=")[0].strip() for override in overrides}
    before = {response: config.rollout.max_response_length, prompt: data.max_prompt_length}
    lengths = dict(before)
    if prompt not in given:
        lengths[prompt] = min(before[prompt], places - before[response] if response in given else places // 2)
    if response not in given:
        lengths[response] = places - lengths[prompt]
    if min(lengths.values()) < 1 or sum(lengths.values()) > places:
        return []  # refused with the reason, before the model is loaded
    return [f"{name}={length}" for name, length in lengths.items() if length != before[name]]


def _load(args: argparse.Namespace, path: Path, overrides: list[str]) -> "Config":
    """The configuration. ValueError does not name the file of defaults, which the user did not give."""
    from rlplus.train.config import load_config

    try:
        return load_config(path, overrides)
    except ValueError as error:
        if _model(args) is None:
            raise
        raise ValueError(str(error).replace(f"{path} does not describe a run:", "want other settings:")) from error


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
        return Path(args.config), [*_asked_as_trained(args), *overrides, *args.overrides]
    _check_read(args.overrides)
    path = Path(model).resolve()
    name = f"{path.parent.name}-model" if path.name == "model" else path.name  # every run's is called model
    own = [f"model.path={model}", f"output_dir=runs/eval/{name}"]
    own += ["evaluation.benchmarks=[]"] if args.data else []  # all that is in the file
    if any(override.startswith("reward.function=") for override in args.overrides):
        own.append("reward.kind=null")  # the default, which the function replaces
    return SHIPPED / "eval.yaml", [*own, *overrides, *args.overrides]


def _asked_as_trained(args: argparse.Namespace) -> list[str]:
    """Overrides by which problems of --data are read and asked as the run's own; none if it has its own."""
    from rlplus.common.yaml_text import yaml_value
    from rlplus.train.config import load_config, read_yaml

    path = Path(args.config).expanduser()
    given = {key.strip(): value for key, _, value in (each.partition("=") for each in args.overrides)}
    benchmarks = args.benchmarks or given.get("evaluation.benchmarks")
    if args.data is None or benchmarks or _has_evaluation_data(read_yaml(path)):
        return []
    data = load_config(path, [f"evaluation.data.path={args.data}", *args.overrides]).data
    template = args.template or given.get("evaluation.data.template", "own")
    whole = () if template == "own" else ("template", "chat", "system_prompt", "tools")  # it is the whole prompt
    keys = [key for key in ASKING if key in data.model_fields_set and key not in whole]
    return [f"evaluation.data.{key}={yaml_value(getattr(data, key))}" for key in keys]


def _has_evaluation_data(sections: dict[str, Any]) -> bool:
    stages = sections.get("stages")
    parts = [sections, *(stages if isinstance(stages, list) else [])]
    evaluations = [part.get("evaluation") for part in parts if isinstance(part, dict)]
    return any(isinstance(each, dict) and (each.get("data") or each.get("benchmarks")) for each in evaluations)


def _check_read(overrides: list[str]) -> None:
    """ValueError for a key of a training. Behind a run's configuration it may stand: the run's training had it, too."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        section = key.partition(".")[0]
        if section in UNREAD and key != READ:
            instead = f"; want evaluation.{key}" if section == "data" else ""
            raise ValueError(f"{key}: an evaluation does not read the section {section}, it trains nothing{instead}")
