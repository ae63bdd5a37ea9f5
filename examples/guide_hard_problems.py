"""Make POPE's training data: problems that the first model does not solve, each once more with the start of a solution.

    python examples/guide_hard_problems.py run.yaml --output guided.jsonl [section.key=value ...]

It ends with the command that trains on them. A row of `data.path` with a right demonstration is a hard problem if none
of `--samples` responses of `model.path` is right, which here is a reward of at least 1. Its second row has another
prompt, with the beginning of the demonstration: the shortest of `--parts` lengths, up to the share `--most`, behind
which a response is right, or the longest if none is. The other columns are copied, as JSON has them: dates are text.

Responses are sampled as by `rlplus eval`, from the run's prompts and up to its length limit, by an engine in this
process. They are kept in the folder OUTPUT.samples, from which the same command goes on after an interruption.

POPE: arXiv 2601.18779. The words around the beginning are ours; change them with `--template`.
"""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

try:
    from transformers import PreTrainedTokenizerBase

    from rlplus.common.durable import write_text
    from rlplus.common.terminal import counter
    from rlplus.train.algorithm.distillation_options import demonstration_template
    from rlplus.train.config import ROW, Config, DataConfig, EvaluationConfig, load_config
    from rlplus.train.data import find_ends, load_examples, load_tokenizer, response_text
    from rlplus.train.data.prompts import with_demonstration
    from rlplus.train.data.row_files import Row, get_column, read_rows
    from rlplus.train.evaluation.sample import evaluate_model
    from rlplus.train.reward import Scorer
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[train]"') from None

TEMPLATE = """{prompt}

A correct solution begins like this:
{demonstration}

Build on this beginning, whose steps you may repeat, check or question, and solve the problem."""
OF_DEMONSTRATIONS = {name for name in DataConfig.model_fields if "demonstration" in name}
NOT_OF_PROMPTS = OF_DEMONSTRATIONS | {"path", "limit", "benchmark", "behavior_logprob", "teacher_topk"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write hard problems, with and without the start of a solution.")
    parser.add_argument("config", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--output", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--overwrite", action="store_true", help="remove responses that were sampled in another way")
    parser.add_argument("--samples", type=int, default=16, help="responses to each prompt; default 16")
    parser.add_argument("--temperature", type=float, default=0.8, help="of these responses; default 0.8, POPE's")
    parser.add_argument("--parts", type=int, default=4, help="beginnings of a demonstration to try; default 4")
    parser.add_argument("--most", type=float, default=0.25, help="longest share of a demonstration; default 0.25")
    parser.add_argument("--template", default=TEMPLATE, help="str.format template with {prompt} and {demonstration}")
    args = parser.parse_intermixed_args(argv)
    config = load_config(args.config, args.overrides)
    if refusal := refused(args, config):
        parser.error(refusal)
    rows = [row for _, row in read_rows(config.data.paths, None, config.data.limit)]
    shown = beginnings(config, load_tokenizer(config.model), args.parts, args.most)
    if not shown:
        raise SystemExit(f"want data with right demonstrations of at least two tokens; {config.data.paths} has none")
    guided = {i: [with_prompt(rows[i], config.data.prompt, args.template, text) for text in shown[i]] for i in shown}
    longest = longest_prompt(config, args.output, [row for some in guided.values() for row in some])
    sample = partial(solved, config, args, longest)
    hard = [i for i, right in zip(guided, sample("plain", [rows[i] for i in guided]), strict=True) if right is False]
    print(f"{len(hard)} of {len(guided)} problems are hard: no response was right")
    if not hard:
        raise SystemExit(f"there is nothing to train on: {args.output} is not written")
    answers = iter(sample("guided", [row for i in hard for row in guided[i]]))
    written, helped = list[Row](), 0
    for i in hard:
        right = [next(answers) for _ in guided[i]]
        helped += any(right)
        best = next((row for row, good in zip(guided[i], right, strict=True) if good), guided[i][-1])
        written += [rows[i], best]
    write_text(args.output, lines(written))
    print(f"{helped} of them were solved behind a beginning, the others have the longest one")
    print(f"{len(written)} rows written. Train on them:\n    {command(args, config, longest)}")


def refused(args: argparse.Namespace, config: Config) -> str:
    """A reason to refuse the arguments before anything is sampled; empty if there is none."""
    if not (args.samples > 0 and args.parts > 0 and 0 < args.most < 1):
        return f"want samples and parts above 0, most in (0, 1); got {args.samples}, {args.parts}, {args.most:g}"
    try:
        demonstration_template(args.template)
    except ValueError as error:
        return f"--template: {error}"
    if config.model.path is None:
        return "want a model that samples, model.path; the run has model.scratch"
    if config.rollout.environment is not None:
        return "want problems of the data; the run has a rollout.environment"
    if ROW in (name.rpartition(".")[2] for name in config.data.columns):
        return f"want data.columns without {ROW!r}, which is used here; got {config.data.columns}"
    if not args.output.absolute().parent.is_dir():
        return f"want an existing folder for the output; there is no {args.output.parent}"
    if args.output.resolve() in (Path(path).resolve() for path in config.data.paths):
        return f"want another output than the run's data, {args.output}"
    return ""


def beginnings(config: Config, tokenizer: PreTrainedTokenizerBase, parts: int, most: float) -> dict[int, list[str]]:
    """For each row with a right demonstration: its beginnings as text, in `parts` lengths up to this share of tokens.

    The first right one of several. Equal lengths of a short one are left out, and so is half a character at the end.
    """
    data = config.data.model_copy(
        update={"behavior_logprob": None, "teacher_topk": None, "demonstration_choice": "first"}
    )
    ends, limit = find_ends(config.model, tokenizer), config.max_demonstration_length
    examples, report = load_examples(data, tokenizer, max_demonstration_length=limit, ends=ends)
    print(report.summary())
    examples = [example for example in examples if example.demonstration is not None]
    decode = partial(response_text, tokenizer, prefix=config.data.response_prefix, ends=ends)
    with Scorer(config.reward, config.data.columns) as scorer:
        texts = [decode(example.demonstration or ()) for example in examples]
        scores = scorer(
            texts,
            [example.answer for example in examples],
            [example.columns for example in examples],
            prompts=[decode(example.prompt) for example in examples],
        )
    print(f"{sum(score.value >= 1 for score in scores)} of {len(scores)} demonstrations pass the run's own reward")
    found: dict[int, list[str]] = {}
    for example, score in zip(examples, scores, strict=True):
        tokens = (example.demonstration or ())[:-1]
        if score.value >= 1 and len(tokens) > 1 and example.index not in found:
            lengths = [max(1, round(most * len(tokens) * part / parts)) for part in range(1, parts + 1)]
            texts = [tokenizer.decode(tokens[:length]).rstrip("\ufffd") for length in lengths]
            if begun := [text for text in dict.fromkeys(texts) if text.strip()]:
                found[example.index] = begun
    return found


def longest_prompt(config: Config, output: Path, rows: Sequence[Row]) -> int:
    """Tokens of the longest prompt of these rows, and at least data.max_prompt_length."""
    data = prompts_of(config, write_problems(output, "prompts", rows), 1 << 30)
    _, report = load_examples(data, load_tokenizer(config.model), max_demonstration_length=1)
    return max(config.data.max_prompt_length, *report.prompt_lengths)


def solved(config: Config, args: argparse.Namespace, longest: int, name: str, rows: Sequence[Row]) -> list[bool | None]:
    """Whether a response to each row was right; None if the grader failed on all. longest: tokens of any prompt."""
    path = write_problems(args.output, name, rows)
    data = prompts_of(config, path, longest)
    section = EvaluationConfig(data=data, samples=args.samples, k=[1], temperature=args.temperature)
    asking = config.model_copy(update={"evaluation": section})
    with counter(f"{name} problems sampled:") as progress:
        results = evaluate_model(asking, config.model.path, progress, path.parent, overwrite=args.overwrite, say=print)
    right: dict[int, bool | None] = {}
    for one in results.values():
        right |= {i: count > 0 if n else None for i, n, count in zip(one.problems, one.n, one.correct, strict=True)}
        if one.mean_reward is not None and abs(one.mean_reward * sum(one.n) - sum(one.correct)) > 1e-6 * sum(one.n):
            print("some rewards are neither 0 nor 1; a response counts as right with a reward of at least 1")
    return [right[i] for i in range(len(rows))]


def write_problems(output: Path, name: str, rows: Sequence[Row]) -> Path:
    """The file of that name with these rows, numbered so that equal ones are told apart."""
    folder = output.with_name(f"{output.name}.samples")
    folder.mkdir(exist_ok=True)
    write_text(path := folder / f"{name}.jsonl", lines([row | {ROW: i} for i, row in enumerate(rows)]))
    return path


def prompts_of(config: Config, path: Path, longest: int) -> DataConfig:
    """The run's data without demonstrations, from such a file; none of its rows may be dropped."""
    fields = config.data.model_dump(exclude=NOT_OF_PROMPTS) | {"path": str(path), "max_dropped_share": 0.0}
    return DataConfig(**fields | {"columns": [*config.data.columns, ROW], "max_prompt_length": longest})


def with_prompt(row: Row, column: str, template: str, beginning: str) -> Row:
    """The row with its prompt in the template. column: may be a dotted name."""
    return with_value(row, column, with_demonstration(get_column(row, column), template, beginning))


def with_value(row: Row, column: str, value: Any) -> Row:
    if column in row:
        return row | {column: value}
    outer, _, inner = column.partition(".")
    return row | {outer: with_value(row[outer], inner, value)}


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def command(args: argparse.Namespace, config: Config, longest: int) -> str:
    """The command that trains on the output."""
    keys = [*args.overrides, f"data.path={args.output}", "algorithm.preset=pope"]
    if longest > config.data.max_prompt_length:
        keys.append(f"data.max_prompt_length={longest}")
    if config.data.limit is not None:
        keys.append("data.limit=null")
    return shlex.join(["rlplus", "train", args.config, *keys])


if __name__ == "__main__":
    main()
