"""Make POPE's training data: problems that the first model does not solve, each once more with the start of a solution.

    python examples/guide_hard_problems.py run.yaml --output guided.jsonl [section.key=value ...]
    rlplus train run.yaml data.path=guided.jsonl algorithm.preset=pope

A row of `data.path` with a demonstration is a hard problem if none of `--samples` responses of `model.path` is right.
Its second row has another prompt, with the beginning of the demonstration: the shortest of `--parts` lengths, up to the
share `--most`, behind which a response is right, or the longest if none is. The other columns are copied. Prompts,
reward, engine and length limit are the run's; `--temperature` is the one of these responses.

POPE: arXiv 2601.18779. The words around the beginning are ours; change them with `--template`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

try:
    from transformers import PreTrainedTokenizerBase

    from rlplus.common.terminal import counter
    from rlplus.config import Config, DataConfig, EvaluationConfig, load_config
    from rlplus.data import load_examples, load_tokenizer
    from rlplus.data.prompts import with_demonstration
    from rlplus.data.row_files import Row, get_column, read_rows
    from rlplus.evaluation import evaluate_model
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[train]"') from None

TEMPLATE = """{prompt}

A correct solution begins like this:
{demonstration}

Build on this beginning, whose steps you may repeat, check or question, and solve the problem."""
PART = "rlplus_part"  # a column of rows that are sampled: the number of parts that the prompt shows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write hard problems, with and without the start of a solution.")
    parser.add_argument("config", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--output", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--samples", type=int, default=16, help="responses to each prompt; default 16")
    parser.add_argument("--temperature", type=float, default=0.8, help="of these responses; default 0.8, POPE's")
    parser.add_argument("--parts", type=int, default=4, help="beginnings of a demonstration to try; default 4")
    parser.add_argument("--most", type=float, default=0.25, help="longest share of a demonstration; default 0.25")
    parser.add_argument("--template", default=TEMPLATE, help="of a prompt, with {prompt} and {demonstration}")
    args = parser.parse_args(argv)
    if not (args.samples > 0 and args.parts > 0 and 0 < args.most < 1):
        parser.error(f"want samples and parts above 0, most in (0, 1); got {args.samples}, {args.parts}, {args.most:g}")
    if not all(args.template.count(name) == 1 for name in ("{prompt}", "{demonstration}")):
        parser.error(f"want a template with {{prompt}} and {{demonstration}} once each; got {args.template!r}")
    config = load_config(args.config, args.overrides)
    if config.model.path is None:
        parser.error("want a model that samples, model.path; the run has model.scratch")
    shown = beginnings(config, load_tokenizer(config.model), args.parts, args.most)
    if not shown:
        raise SystemExit(f"want data with demonstrations of at least two tokens; {config.data.paths} has none")
    rows = [row for _, row in read_rows(config.data.paths, None, config.data.limit)]
    longer = round(args.most * config.max_demonstration_length) + len(args.template)
    sampling = {"samples": args.samples, "temperature": args.temperature}
    plain = [rows[i] | {PART: 0} for i in shown]
    hard = [i for i, right in zip(shown, solved(config, plain, 0, sampling), strict=True) if right is False]
    print(f"{len(hard)} of {len(shown)} problems are hard: no response was right")
    guided = {
        (i, part): with_prompt(rows[i], config.data.prompt, args.template, text) | {PART: part}
        for i in hard
        for part, text in enumerate(shown[i], 1)
    }
    right = dict(zip(guided, solved(config, [*guided.values()], longer, sampling), strict=True)) if hard else {}
    found = 0
    with args.output.open("w", encoding="utf-8") as file:
        for i in hard:
            parts = [part for part in range(1, len(shown[i]) + 1) if right[i, part]]
            found += bool(parts)
            best = guided[i, parts[0] if parts else len(shown[i])]
            for row in (rows[i], {name: value for name, value in best.items() if name != PART}):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{found} of them were solved behind a beginning; {2 * len(hard)} rows written to {args.output}")


def beginnings(config: Config, tokenizer: PreTrainedTokenizerBase, parts: int, most: float) -> dict[int, list[str]]:
    """For each row with a demonstration: its first tokens as text, in `parts` lengths up to this share, none twice."""
    data = config.data.model_copy(update={"behavior_logprob": None, "teacher_topk": None})
    examples, report = load_examples(data, tokenizer, max_demonstration_length=config.max_demonstration_length)
    print(report.summary())
    found: dict[int, list[str]] = {}
    for example in examples:
        text = (example.demonstration or ())[:-1]
        lengths = dict.fromkeys(max(1, round(most * len(text) * part / parts)) for part in range(1, parts + 1))
        if len(text) > 1 and example.index not in found:
            found[example.index] = [tokenizer.decode(text[:length]) for length in lengths]
    return found


def solved(config: Config, rows: Sequence[Row], longer: int, sampling: dict[str, Any]) -> list[bool | None]:
    """Whether a response to each row was right; None if the grader failed on all. longer: than prompts of the data."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        fields = config.data.model_dump() | {"path": str(path), "limit": None, "benchmark": PART}
        fields |= dict.fromkeys(("demonstration", "demonstration_pattern", "demonstration_template"))
        fields |= {"behavior_logprob": None, "teacher_topk": None, "max_dropped_share": 0.0}
        fields["max_prompt_length"] += longer
        section = EvaluationConfig(data=DataConfig(**fields), k=[1], **sampling)
        asking = config.model_copy(update={"evaluation": section})
        with counter("problems sampled:") as progress:
            results = evaluate_model(asking, config.model.path, progress)
    counts = {
        i: (n, right) for one in results.values() for i, n, right in zip(one.problems, one.n, one.correct, strict=True)
    }
    names = PART, config.data.prompt, config.data.answer  # rows that agree in these are sampled as one
    first: dict[str, int] = {}
    places = [first.setdefault(json.dumps([get_column(row, name) for name in names]), i) for i, row in enumerate(rows)]
    return [counts[place][1] > 0 if counts[place][0] else None for place in places]


def with_prompt(row: Row, column: str, template: str, beginning: str) -> Row:
    """The row with its prompt in the template. column: may be a dotted name."""
    value = with_demonstration(get_column(row, column), template, beginning)
    return with_value(row, column, value)


def with_value(row: Row, column: str, value: Any) -> Row:
    if column in row:
        return row | {column: value}
    outer, _, inner = column.partition(".")
    return row | {outer: with_value(row[outer], inner, value)}


if __name__ == "__main__":
    main()
