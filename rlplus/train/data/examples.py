"""Prompts, answers and demonstrations as token ids; rows that are too long or unreadable are dropped and counted."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import nan
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlplus.common import activity
from rlplus.train.config import DataConfig
from rlplus.train.data.demonstration_columns import Topk, fitting, holds_several, logprobs, of_each, topk_pair
from rlplus.train.data.ends import demonstration_end
from rlplus.train.data.load_report import LoadReport
from rlplus.train.data.prompts import (
    RESPONSE_MARK,
    Prompt,
    Tools,
    encode_prompts,
    make_prompt,
    make_tools,
    with_demonstration,
)
from rlplus.train.data.row_files import MissingColumn, Row, get_column, read_rows, required_column, row_names
from rlplus.train.data.tokenizer import encode

CHUNK = 1000  # rows tokenised together, on all cores


@dataclass(frozen=True)
class Example:
    """A row: its number over all files, prompt token ids, the answer, and demonstration token ids with an end token.

    benchmark: the value of the column `data.benchmark`; empty without one. rows: the number of equal rows that this one
    represents. demonstration_reward: the demonstration's grade by the run's reward; NaN before. behavior_logprob: of
    each of the demonstration's tokens under its author; None if unknown. columns: the values of `data.columns`, by the
    last part of their names. teacher_prompt: token ids of a teacher's prompt, with the demonstration or RESPONSE_ID.
    teacher_topk: a teacher's k likeliest tokens at each of the demonstration's places, and their logprobs, (T, k) int32
    and float32.
    """

    index: int
    prompt: tuple[int, ...]
    answer: str
    demonstration: tuple[int, ...] | None
    benchmark: str = ""
    rows: int = 1
    demonstration_reward: float = nan
    behavior_logprob: Sequence[float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    teacher_prompt: tuple[int, ...] | None = None
    teacher_topk: Topk | None = None


@dataclass
class _Parsed:
    index: int
    where: str
    prompt: Prompt
    tools: Tools | None
    answer: str | None
    demonstration: str | None
    noted: str | None  # why there is no demonstration, or a note about it: the counter in LoadReport
    benchmark: str
    behavior_logprob: Any
    teacher_topk: Topk | None
    columns: Mapping[str, Any]
    teacher_prompt: Prompt | None


def load_examples(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> tuple[list[Example], LoadReport]:
    """`read_examples`, and ValueError where the report refuses them."""
    examples, report = read_examples(config, tokenizer, **settings)
    if refusal := report.refusal(config):
        raise ValueError(refusal)
    return examples, report


def read_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_demonstration_length: int,
    teacher_template: str = "",
    shows_responses: bool = False,
    topk: int = 0,
    layout: Callable[[Row], Row] | None = None,
    wanted: Callable[[str], bool] = lambda benchmark: True,
    section: str = "data",
    ends: Sequence[int] = (),
) -> tuple[list[Example], LoadReport]:
    """Read and tokenise the data; a row with several demonstrations gives an example for each, see `variants`.

    teacher_template: for `Example.teacher_prompt`; empty without. shows_responses: it shows a response.
    topk: the numbers that each place of `teacher_topk` must have; 0 = any.
    layout: converts a row of a file, with all of its columns, into one that `config` describes. wanted: whether to read
    the rows of a benchmark; the others count for nothing. section: name of `config` in messages. ends: the run's
    `find_ends`; empty: those of the tokenizer and its chat template.
    A prompt string is tokenised with the tokenizer's default special tokens, chat messages through its template with
    the generation prompt; a demonstration without special tokens, and then `demonstration_end`. `response_prefix` moves
    from the start of demonstrations to the end of prompts, as tokens of its own; a demonstration without it is kept
    whole and counted. A row whose prompt is too long or whose answer cannot be found is dropped; a demonstration that
    is too long (with its end) or does not match its pattern leaves the row without one. Nothing else is cut.
    ValueError, with the place, if a row is malformed.
    """
    report = LoadReport(config.max_prompt_length, max_demonstration_length)
    examples: list[Example] = []
    shared: dict[int, int] = {}  # an int for each id: copies in long demonstrations would fill gigabytes
    parsed = _parse_rows(config, layout, wanted, teacher_template, shows_responses)
    rows = _naming_key(parsed, config, section)
    last = -1
    activity.rows.begin(0)
    while chunk := list(islice(rows, CHUNK)):
        for row, prompt, demonstration, teacher_prompt in _encoded(chunk, tokenizer, config, shows_responses, ends):
            counted = row.index == last
            last = row.index
            if not counted:
                report.count_row(row.where, row.prompt, len(prompt))
            dropped = "answers_missing" if row.answer is None else "prompts_too_long"
            if row.answer is None or len(prompt) > config.max_prompt_length:
                if not counted:
                    report.count(dropped, row.where)
                continue
            noted = row.noted
            if demonstration is not None:
                report.demonstration_lengths.append(len(demonstration))
                if len(demonstration) > max_demonstration_length:
                    demonstration = None
                    noted = "demonstrations_too_long"
            if noted is not None:
                report.count(noted, row.where)
            report.kept += not counted
            report.demonstrations += demonstration is not None
            examples.append(
                Example(
                    row.index,
                    tuple(map(shared.setdefault, prompt, prompt)),
                    row.answer,
                    None if demonstration is None else tuple(map(shared.setdefault, demonstration, demonstration)),
                    row.benchmark,
                    behavior_logprob=logprobs(config, row.where, row.behavior_logprob, demonstration),
                    teacher_topk=fitting(
                        config.teacher_topk, row.where, row.teacher_topk, demonstration, len(tokenizer), topk
                    ),
                    columns=row.columns,
                    teacher_prompt=None if demonstration is None and not shows_responses else teacher_prompt,
                )
            )
        activity.rows.add(report.rows - activity.rows.done)
    return examples, report


def _encoded(
    chunk: Sequence[_Parsed],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    shows_responses: bool,
    ends: Sequence[int],
) -> Iterator[tuple[_Parsed, list[int], list[int] | None, tuple[int, ...] | None]]:
    """Each row, with the token ids of its prompt, of its demonstration and of its teacher's prompt."""
    prompts = encode_prompts([(r.where, r.prompt, r.tools) for r in chunk], tokenizer, config.response_prefix)
    shown = [(r.where, r.teacher_prompt, r.tools) for r in chunk if r.teacher_prompt is not None]
    teachers = iter(encode_prompts(shown, tokenizer, config.response_prefix, shows_responses))
    demonstrations = _encode_demonstrations(chunk, tokenizer, ends)
    for row, prompt, demonstration in zip(chunk, prompts, demonstrations, strict=True):
        if not prompt:
            raise ValueError(f"{row.where}: want a prompt of at least one token; got {row.prompt!r}")
        yield row, prompt, demonstration, None if row.teacher_prompt is None else tuple(next(teachers))


def _naming_key(rows: Iterator[_Parsed], config: DataConfig, section: str) -> Iterator[_Parsed]:
    """The rows; the error for a missing column names the key that asks for it."""
    try:
        yield from rows
    except MissingColumn as error:
        keys = [f"{section}.{key}" for key, value in config if value == error.column]
        raise ValueError(f"{error}{f' ({keys[0]} names it)' if keys else ''}") from error


def _parse_rows(
    config: DataConfig,
    layout: Callable[[Row], Row] | None,
    wanted: Callable[[str], bool],
    teacher_template: str,
    shows_responses: bool,
) -> Iterator[_Parsed]:
    c = config
    names = (c.prompt, c.answer, c.demonstration, c.behavior_logprob, c.teacher_topk, c.benchmark, c.tools, *c.columns)
    columns = [name for name in names if name is not None]
    row: Row = {}
    demonstration_seen = config.demonstration is None
    for index, (where, row) in enumerate(read_rows(config.paths, None if layout else columns, config.limit)):
        if layout is not None:
            row = _laid_out(layout, where, row)
        benchmark = "" if config.benchmark is None else str(required_column(where, row, config.benchmark))
        if not wanted(benchmark):
            continue
        question = required_column(where, row, config.prompt)
        prompt = make_prompt(config, where, question)
        tools = None if config.tools is None else make_tools(where, required_column(where, row, config.tools), prompt)
        answer = _match(config.answer_pattern, _answer(where, required_column(where, row, config.answer)))
        answer = answer and answer.strip()
        value = None
        if config.demonstration is not None:
            try:
                value = get_column(row, config.demonstration)
                demonstration_seen = True
            except KeyError:  # JSONL rows may leave it out, but not all of them
                pass
        further = {name.rpartition(".")[2]: _json_value(where, name, row) for name in config.columns}
        texts = _demonstrations(where, value)
        aligned = [
            of_each(name, where, row, value, len(texts)) for name in (config.behavior_logprob, config.teacher_topk)
        ]
        for text, behavior, told_of in zip(texts, *aligned, strict=True):
            topk = topk_pair(config.teacher_topk, where, told_of)  # tensors are a tenth of the lists
            demonstration, noted = _shaped(config, text, answer)
            shown = None
            told = RESPONSE_MARK if shows_responses else demonstration
            if teacher_template and told is not None:
                shown = make_prompt(config, where, with_demonstration(question, teacher_template, told))
            yield _Parsed(
                index, where, prompt, tools, answer, demonstration, noted, benchmark, behavior, topk, further, shown
            )
    if not demonstration_seen and row:
        assert config.demonstration is not None
        raise MissingColumn(", ".join(config.paths), config.demonstration, row_names(row))


def _laid_out(layout: Callable[[Row], Row], where: str, row: Row) -> Row:
    try:
        return layout(row)
    except KeyError as error:
        raise MissingColumn(where, str(error.args[0]), row_names(row)) from None


def _json_value(where: str, column: str, row: Row) -> Any:
    """The value as reward functions get it, after a round trip through JSON: dates, for example, are text."""
    value = required_column(where, row, column)
    try:
        return json.loads(json.dumps(value, default=str))
    except ValueError as error:
        raise ValueError(f"{where}: want {column!r} as JSON can hold it; got {str(value)[:80]} ({error})") from error


def _match(pattern: str | None, text: str | None) -> str | None:
    """The pattern's group, or the whole text; None if it is only white space."""
    if pattern is not None and text is not None:
        found = re.search(pattern, text)
        text = found.group(1) if found else None
    return text if text and text.strip() else None


def _after_prefix(text: str, prefix: str) -> tuple[str | None, str | None]:
    """A demonstration without the prefix, which may follow white space, and the counter to increase."""
    for start in (0, len(text) - len(text.lstrip())):
        if text.startswith(prefix, start):
            rest = text[start + len(prefix) :]
            return (rest, None) if rest.strip() else (None, "demonstrations_missing")
    return text, "demonstrations_unprefixed"


def _answer(where: str, value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1:  # verl's ground_truth may be a list of one
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{where}: want the answer as a string or a number; got {value!r}")


def _demonstrations(where: str, value: Any) -> list[str | None]:
    """The column's texts, at least one; None for a null or for white space."""
    if not holds_several(value):
        return [_demonstration(where, value)]
    return [_demonstration(where, part) for part in value] or [None]


def _demonstration(where: str, value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):  # one chat message
        value = value[0].get("content")
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    raise ValueError(
        f"{where}: want the demonstration as a string or one chat message, or a list of these; got {value!r}"
    )


def _shaped(config: DataConfig, text: str | None, answer: str | None) -> tuple[str | None, str | None]:
    """A demonstration in the form that the run trains on, and the counter to increase."""
    demonstration = _match(config.demonstration_pattern, text)
    if demonstration is None:
        missing = None if config.demonstration is None else "demonstrations_missing"
        return None, missing if text is None else "demonstrations_unmatched"
    if config.demonstration_template is not None:
        found = re.search(config.demonstration_pattern or "", text or "")
        answer = (found and found.groupdict().get("answer")) or answer
        demonstration = config.demonstration_template.format(demonstration=demonstration, answer=answer)
    if config.response_prefix is None:
        return demonstration, None
    return _after_prefix(demonstration, config.response_prefix)


def _encode_demonstrations(
    chunk: Sequence[_Parsed], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> list[list[int] | None]:
    """Token ids with `demonstration_end`, unless the text has one of the ends already."""
    finals = {chat: demonstration_end(tokenizer, ends, chat=chat) for chat in (False, True)}
    known = {*ends, *finals.values()}
    texts = [row.demonstration for row in chunk if row.demonstration is not None]
    encoded = iter(encode(tokenizer, texts))
    demonstrations: list[list[int] | None] = []
    for row in chunk:
        ids = None if row.demonstration is None else next(encoded)
        if ids is not None and known.isdisjoint(ids[-1:]):
            ids = [*ids, finals[not isinstance(row.prompt, str)]]
        demonstrations.append(ids)
    return demonstrations
