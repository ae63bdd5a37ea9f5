"""Write a run's data with a model's own right responses as demonstrations.

    rlplus eval run.yaml --model MODEL --data train.jsonl --output runs/own
        evaluation.samples=16 evaluation.temperature=1
    python examples/own_demonstrations.py run.yaml --samples runs/own --output own.jsonl
        data.demonstration=own_response data.demonstration_pattern=null data.demonstration_template=null
    rlplus train run.yaml data.path=own.jsonl
        data.demonstration=own_response data.demonstration_pattern=null data.demonstration_template=null

The first command samples responses to the training problems and grades them; it must ask as the run does, which it
does unless the run has `evaluation.data` or `evaluation.benchmarks`. The second one puts the right and complete
responses of each problem, each text once and in the order in which they were sampled, into the column
`data.demonstration`; null where there is none, so that the run trains on rollouts alone there. Of several,
`data.demonstration_choice` picks one. Other columns stay as they are: one with logprobs of the former demonstrations no
longer fits. Refused are a pattern or a template of these, which would change the responses, and a column that has
something else, as in data whose worked solutions have the answers in them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

try:
    import pyarrow  # noqa: F401  # read_kept needs it

    from rlplus.common.durable import replacing
    from rlplus.train.config import SAMPLES, load_config
    from rlplus.train.data import Example, load_examples, load_tokenizer, read_kept
    from rlplus.train.data.row_files import read_rows
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[train]"') from None

OF_DEMONSTRATIONS = ("demonstration", "behavior_logprob", "teacher_topk")  # columns that are not read
FOR_OTHERS = ("demonstration_pattern", "demonstration_template")  # made for the former demonstrations


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make demonstrations of a model's own right responses.")
    parser.add_argument("config", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--samples", type=Path, required=True, help="output folder of an evaluation of data.path")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_intermixed_args(argv)
    config = load_config(args.config, args.overrides)
    column = config.data.demonstration
    if column is None or "." in column:
        raise ValueError(f"want data.demonstration with the name of a column, not within another; got {column!r}")
    for name in ("prompt", "answer", "benchmark", "tools"):
        if column == (getattr(config.data, name) or "").partition(".")[0]:
            raise ValueError(
                f"want data.demonstration another column, which this writes; got {column!r}, which data.{name} reads: "
                "data.demonstration=own_response, here and in the run"
            )
    for name in FOR_OTHERS:
        if getattr(config.data, name) is not None:
            raise ValueError(f"want data.{name}=null, here and in the run: it would change the responses")
    rows = [row for _, row in read_rows(config.data.paths, None, config.data.limit)]
    prompts = config.data.model_copy(update=dict.fromkeys(OF_DEMONSTRATIONS))
    examples, _ = load_examples(prompts, load_tokenizer(config.model), max_demonstration_length=1)
    found = right_responses(examples, args.samples)
    with replacing(args.output) as file:
        for index, row in enumerate(rows):
            file.write(json.dumps(row | {column: found.get(index)}, ensure_ascii=False).encode() + b"\n")
    responses = sum(map(len, found.values()))
    print(f"{len(found)} of {len(rows)} rows have a right response, {responses} in all; written to {args.output}")


def right_responses(examples: Sequence[Example], folder: Path) -> dict[int, list[str]]:
    """The right responses by row, counted from 0; rows with one prompt and answer have the same ones.

    ValueError for a folder without samples, and for those of other data.
    """
    files = sorted((folder / SAMPLES).glob("evaluation-*.parquet"))
    if not files:
        raise ValueError(f"want a folder with the samples of an evaluation; there are none in {folder / SAMPLES}")
    known = {example.index: example for example in examples}
    right: dict[tuple[object, ...], dict[str, None]] = {}  # texts are keys, so that each is there once
    for sample in (sample for path in files for sample in read_kept(path)):
        example = known.get(sample.problem)
        if example is None or example.answer != sample.answer:
            there = "no problem" if example is None else f"the answer {example.answer!r}"
            raise ValueError(
                f"want an evaluation of the run's data.path; {folder} has {sample.answer!r} as the answer of "
                f"{sample.row}, and there is {there}"
            )
        if sample.right and not sample.truncated:
            right.setdefault(problem_of(example), {})[sample.response] = None
    return {example.index: list(right[key]) for example in examples if (key := problem_of(example)) in right}


def problem_of(example: Example) -> tuple[object, ...]:
    """Prompt and answer: an evaluation asks such a problem once, however often it is in the data."""
    return tuple(example.prompt), example.answer


if __name__ == "__main__":
    main()
