"""The problems of an evaluation, from its data or from the benchmarks that it names."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rlplus.train.config import BENCHMARKS, ROW, DataConfig, EvaluationConfig, ValidationConfig, benchmark_name
from rlplus.train.data.ends import turn_warning
from rlplus.train.data.examples import Example, read_examples
from rlplus.train.data.load_report import LoadReport
from rlplus.train.data.row_files import Row, get_column, read_rows, row_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problems:
    """The problems from one source, repeated rows included.

    source: "data" for the files, else the benchmark that comes from the hub. refusal: the reason for which an
    evaluation refuses them; None if it does not.
    """

    source: str
    examples: list[Example]
    report: LoadReport
    refusal: str | None


def load_problems(
    config: EvaluationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_expected: bool = False,
    ends: Sequence[int] | None = None,
) -> list[Example]:
    """The distinct problems of an evaluation. ValueError if they are refused, see `read_problems`.

    chat_expected: warn if prompts are plain text though the tokenizer has a chat template. ends: warn if prompts are
    chat messages and the template ends a turn in none of these.
    """
    sources = read_problems(config, tokenizer)
    assert config.data is not None
    plain = sum(source.report.plain for source in sources)
    rows = sum(source.report.rows for source in sources)
    if ends is not None and plain < rows and (warning := turn_warning(tokenizer, ends)):
        logger.warning("%s", warning)
    if chat_expected and plain and tokenizer.chat_template is not None and config.data.template == "own":
        logger.warning(
            "%d prompts are text, given to the model as it is, without its chat template: evaluation.data.chat=true "
            "makes them user messages, --template none says that it is meant",
            plain,
        )
    for source in sources:
        if source.refusal is not None:
            raise ValueError(source.refusal)
    return distinct([example for source in sources for example in source.examples])


def read_problems(config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> list[Problems]:
    """All rows of `config.data`, or of its benchmarks, which get the registry's names.

    Rows are as `data` describes them. A benchmark's may also be in its layout on the hub, in a file without
    others. Refused as in `load_examples`, and if a file has no row of a benchmark or one of its rows would be dropped:
    without it, it would be another benchmark. Rows of other benchmarks are not read. ValueError as in `read_examples`.
    """
    assert config.data is not None
    section = f"{'validation' if isinstance(config, ValidationConfig) else 'evaluation'}.data"
    if config.data.paths or not config.benchmarks:
        return [_read("data", config.data, config.benchmarks, tokenizer, section)]
    hub = {name: {"path": BENCHMARKS[name].source, "benchmark": None} for name in config.benchmarks}
    return [_read(name, config.data.model_copy(update=data), [name], tokenizer, section) for name, data in hub.items()]


def _read(
    source: str, data: DataConfig, names: Sequence[str], tokenizer: PreTrainedTokenizerBase, section: str
) -> Problems:
    """names: the benchmarks whose rows are kept; empty: all rows, as they are."""
    if not names:
        rows, report = read_examples(data, tokenizer, max_demonstration_length=1, section=section)
        return Problems(source, rows, report, report.refusal(data))
    found: dict[str, str] = {}  # benchmarks of all rows: the registry's name by the data's

    def wanted(benchmark: str) -> bool:
        found[benchmark] = (benchmark_name(benchmark) or "") if data.benchmark else names[0]
        return found[benchmark] in names

    layout = _layout(data, names[0]) if len(names) == 1 else None
    rows, report = read_examples(
        data, tokenizer, max_demonstration_length=1, layout=layout, wanted=wanted, section=section
    )
    refusal = report.refusal(data, whole=True)
    if missing := [name for name in names if name not in found.values()]:
        refusal = f"{', '.join(data.paths)}: want rows of {', '.join(missing)}; got {', '.join(found) or 'none'}"
    return Problems(source, [replace(e, benchmark=found[e.benchmark]) for e in rows], report, refusal)


def _layout(data: DataConfig, name: str) -> Callable[[Row], Row]:
    """Adds the columns of `data` to rows that have the benchmark's columns on the hub instead."""

    def layout(row: Row) -> Row:
        if not (_has(row, data.prompt) and _has(row, data.answer)):
            try:
                question, answer = BENCHMARKS[name].layout(row)
            except KeyError as error:  # if a row has one of the columns of `data`, the other is missing
                lacking = [column for column in (data.prompt, data.answer) if not _has(row, column)]
                raise KeyError(lacking[0] if len(lacking) == 1 else error.args[0]) from error
            row = row | {data.prompt: question, data.answer: answer}
        if data.benchmark is not None and not _has(row, data.benchmark):
            row = row | {data.benchmark: name}
        return row

    return layout


def _has(row: Row, column: str) -> bool:
    try:
        get_column(row, column)
    except KeyError:
        return False
    return True


def distinct(examples: Sequence[Example]) -> list[Example]:
    """The first example of each benchmark, prompt, answer and column `row`, in order; `rows` counts all of them.

    Public benchmark files repeat their problems (AIME 2024 eight times, AMC four times). Counted as separate problems,
    such rows would make an interval too narrow by the square root of that.
    """
    # Prompt and answer are not the whole problem where an environment has a row of its own.
    merged: dict[tuple[object, ...], Example] = {}
    for example in examples:
        key = (example.benchmark, example.prompt, example.answer, repr(example.columns.get(ROW)))
        first = merged.get(key)
        merged[key] = example if first is None else replace(first, rows=first.rows + example.rows)
    return list(merged.values())


def found_columns(data: DataConfig, *, several: bool) -> dict[str, str]:
    """Overrides of `data`, whose columns are verl's, for files that have `answer` instead or name no benchmark.

    several: there are benchmarks to be told apart, which takes their column.
    """
    names = next((row_names(row) for _, row in read_rows(data.paths, None, 1)), [])
    found: dict[str, str] = {}
    if names and data.answer not in names and "answer" in names:
        found["answer"] = "answer"
    if names and data.benchmark is not None and data.benchmark not in names and not several:
        found["benchmark"] = "null"
    return found
