"""The problems of an evaluation: those of its data, or of the benchmarks that it names."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from rlplus.config import BENCHMARKS, DataConfig, EvaluationConfig, benchmark_name
from rlplus.data.benchmarks import LAYOUTS
from rlplus.data.files import Row, get_column
from rlplus.data.load import Example, load_examples


def load_problems(config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """The distinct problems of `evaluation`: all of its data, or its benchmarks', under their own names.

    Rows are as `data` describes them. A benchmark's may also be as on the hub, in a file that holds no other.
    ValueError as in `load_examples`; for a benchmark of which a file has no row, and for a row that would be dropped:
    with a problem missing it would be another benchmark.
    """
    assert config.data is not None
    if not config.benchmarks:
        return distinct(load_examples(config.data, tokenizer, max_demonstration_length=1)[0])
    if config.data.paths:
        return distinct(_benchmarks(config.data, config.benchmarks, tokenizer))
    examples: list[Example] = []
    for name in config.benchmarks:
        hub = config.data.model_copy(update={"path": BENCHMARKS[name].source, "benchmark": None})
        examples += _benchmarks(hub, [name], tokenizer)
    return distinct(examples)


def _benchmarks(data: DataConfig, names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    data = data.model_copy(update={"max_dropped_share": 0.0})
    layout = _layout(data, names[0]) if len(names) == 1 else None
    rows, _ = load_examples(data, tokenizer, max_demonstration_length=1, layout=layout)
    named = [replace(e, benchmark=(benchmark_name(e.benchmark) or "") if data.benchmark else names[0]) for e in rows]
    if missing := [name for name in names if name not in {e.benchmark for e in named}]:
        have = ", ".join(dict.fromkeys(e.benchmark for e in rows))
        raise ValueError(f"{', '.join(data.paths)}: want rows of {', '.join(missing)}; got {have}")
    return [e for e in named if e.benchmark in names]


def _layout(data: DataConfig, name: str) -> Callable[[Row], Row]:
    """Rows without the columns of `data` are as the benchmark has them on the hub."""

    def layout(row: Row) -> Row:
        if not (_has(row, data.prompt) and _has(row, data.answer)):
            question, answer = LAYOUTS[BENCHMARKS[name].layout](row)
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
    """The first example of each benchmark, prompt and answer, in order, with `rows` counting all of them.

    Public benchmark files repeat their problems (AIME 2024 eight times, AMC four times). As problems of their own such
    rows would make an interval too narrow by the square root of that.
    """
    merged: dict[tuple[object, ...], Example] = {}
    for example in examples:
        key = (example.benchmark, example.prompt, example.answer)
        first = merged.get(key)
        merged[key] = example if first is None else replace(first, rows=first.rows + example.rows)
    return list(merged.values())
