"""The columns of a file of prompts, found by their names, and the lengths of its prompts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from rlplus.train.config import Config, DataConfig, ModelConfig, config_from, model_problem
from rlplus.train.data import Example, LoadReport, byte_tokenizer, load_examples, load_tokenizer, read_examples
from rlplus.train.data.bare_answers import bare_answers
from rlplus.train.data.choices import hidden_choices
from rlplus.train.data.row_files import get_column, read_rows, row_names
from rlplus.train.reward import BOX

T = TypeVar("T", ModelConfig, DataConfig)
NAMES = {  # they are looked for in this order
    "prompt": ("prompt", "question", "problem", "query", "instruction", "input"),
    "answer": ("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "target", "label", "solution"),
    "demonstration": ("demonstration", "solution", "target_solution", "target", "response", "completion"),
}
GSM8K = r"#### (.+)"  # the answer behind a worked solution
WORKED_GSM8K = (
    r"(?s)^(.+?)\s*(?:####[^\S\n]*(?P<answer>[^\n]*\S)?|\Z)"  # its last line is the answer of the solution itself
)
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
BOXED_ANSWER = "{demonstration}\nThe answer is \\boxed{{{answer}}}."
LETTER = re.compile(r"[A-J]")
LOOKED_AT = 200  # rows
STEP = 128  # lengths are multiples of this
SHARE = 0.99  # share of the prompts that are short enough
MOST = 0.5  # a form that more answers have than this share is the column's
ALMOST_ALL = 0.9  # share of letters among answers that are choices, and of boxes among demonstrations that have them
FAR = 2**20  # longer than any text here


@dataclass(frozen=True)
class Columns:
    """values: keys of the section data. reward: the grader for its answers. tokens: whether lengths are the model's.

    prompts: how many can be used. examples: the rows as training reads them. report: what it drops of them.
    bare: the problems of columns that are only the answer, of which no demonstrations are made unless they are given.
    """

    values: dict[str, Any]
    reward: str
    tokens: bool
    prompts: int
    demonstration: bool
    examples: Sequence[Example]
    report: LoadReport
    bare: tuple[str, ...]

    def summary(self, config: Config) -> str:
        data = config.data
        columns = [f"prompt {data.prompt}", f"answer {data.answer}"]
        columns += [f"demonstration {data.demonstration}"] if data.demonstration else []
        lengths = "" if self.tokens else "; the model's tokenizer cannot be read here, so lengths are not checked"
        return (
            f"{self.prompts:,} prompts ({', '.join(columns)}), graded by {config.reward.description}, "
            f"preset {config.algorithm.preset}{lengths}"
        )

    def check(self, config: Config) -> list[str]:
        """A line about what a training drops of these data, if anything; ValueError for what it refuses in them."""
        report = self.report
        if self.tokens:
            limit = config.max_demonstration_length
            _, report = load_examples(config.data, load_tokenizer(config.model), max_demonstration_length=limit)
        return [f"data: {report.summary()}"] if report.first else []


def find_columns(path: str, fixed: dict[str, Any], model: dict[str, Any]) -> Columns:
    """The columns of the file, read as training reads it; ValueError, in training's words, for what is wrong there.

    fixed: keys of `data` that are given. model: keys of the section model.
    """
    rows = [row for _, row in islice(read_rows([path], None, None), LOOKED_AT)]
    if not rows:
        raise ValueError(f"{path}: want at least one row; got none")
    values: dict[str, Any] = {"path": path} | _named(path, rows, fixed) | fixed
    others = [name for name in NAMES["demonstration"] if name != values["answer"]]  # why none was chosen
    bare = _bare(rows, values, [values["demonstration"]] if values.get("demonstration") else others)
    if "demonstration" not in values:
        bare = tuple(f"{problem}; no demonstrations are taken from it" for problem in bare)
    settings = _section(ModelConfig, "model", model)
    tokens = model_problem(str(settings.path)) is None
    tokenizer = load_tokenizer(settings) if tokens else byte_tokenizer()
    answers = [_answer(row, values) for row in rows]
    if problem := hidden_choices(rows, values["prompt"], values["answer"]):
        raise ValueError(f"{path}: {problem}")
    letters = [bool(LETTER.fullmatch(answer)) for answer in answers if answer]
    reward = "choice" if letters and sum(letters) >= ALMOST_ALL * len(letters) else "math_verify"
    texts = not {"chat", "template"} & values.keys() and any(isinstance(_value(r, values["prompt"]), str) for r in rows)
    if texts and tokenizer.chat_template is not None:
        boxed = reward == "math_verify" and "system_prompt" not in values
        values |= {"chat": True} | ({"system_prompt": BOXED} if boxed else {})
        reward = "math_verify_box" if boxed else reward
    if reward != "choice" and _ask_for_boxes(values, tokenizer):
        values |= _with_boxes(rows, values)
    data = _unlimited(values)
    examples, report = read_examples(data, tokenizer, max_demonstration_length=FAR)
    if not report.kept:
        raise ValueError(str(report.refusal(data)))
    if tokens:
        values.setdefault("max_prompt_length", _longest(report.prompt_lengths))
    if tokens and report.demonstration_lengths:
        values.setdefault("max_demonstration_length", _longest(report.demonstration_lengths))
    return Columns(values, reward, tokens, report.kept, data.demonstration is not None, examples, report, bare)


def _unlimited(values: dict[str, Any]) -> DataConfig:
    return _section(DataConfig, "data", {"max_prompt_length": FAR, "max_dropped_share": 1.0} | values)


def _section(kind: type[T], name: str, values: dict[str, Any]) -> T:
    """The section with these values; ValueError in the words of a whole configuration, without its other sections."""
    try:
        return kind.model_validate(values)
    except ValidationError as section_error:
        try:
            config_from({name: values}, "what is given")
        except ValueError as error:
            head, *lines = str(error).splitlines()
            text = "\n".join([head, *(line for line in lines if line.startswith(name))])
            raise ValueError(text) from section_error
        raise


def _ask_for_boxes(values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts, as the model sees them, ask for an answer in a box, so that the reward wants one."""
    examples, _ = read_examples(_unlimited(values | {"limit": LOOKED_AT}), tokenizer, max_demonstration_length=FAR)
    return any(BOX in tokenizer.decode(list(example.prompt)) for example in examples)


def _with_boxes(rows: list[dict[str, Any]], values: dict[str, Any]) -> dict[str, Any]:
    """Keys that put the answer in a box behind each demonstration, for data whose demonstrations do not have one."""
    column = values.get("demonstration")
    texts = [str(text) for row in rows if column is not None and (text := _value(row, column))]
    boxed = sum(BOX in text for text in texts)
    if boxed >= ALMOST_ALL * len(texts) or "demonstration_template" in values:  # grading drops the others
        return {}
    last_line = {"demonstration_pattern": WORKED_GSM8K} if any("####" in text for text in texts) else {}
    return {"demonstration_template": BOXED_ANSWER} | last_line | values


def _named(path: str, rows: list[dict[str, Any]], fixed: dict[str, Any]) -> dict[str, Any]:
    """The keys of `data` that name columns: those given, else the first known name that the rows have."""
    names = list(dict.fromkeys(name for row in rows for name in row_names(row)))
    taken: list[str | None] = [fixed[key] for key in ("prompt", "answer") if fixed.get(key)]
    found: dict[str, Any] = dict(fixed)
    for key in ("prompt", "answer"):
        if key not in fixed:
            found[key] = _first(rows, [name for name in NAMES[key] if name in names and name not in taken])
            taken.append(found[key])
        if found[key] is None:
            wanted = ", ".join(NAMES[key])
            raise ValueError(
                f"{path}: want a column of the {key}, by one of the names {wanted}, or named by data.{key}=COLUMN; "
                f"got {', '.join(names)}"
            )
    texts = [str(_value(row, found["answer"])) for row in rows]
    gsm8k = "answer_pattern" not in found and sum("#### " in text for text in texts) > MOST * len(texts)
    if gsm8k:
        found |= {"answer_pattern": GSM8K}
    free = (name for name in NAMES["demonstration"] if name in names and name not in taken)
    worked = (name for name in free if not _bare(rows, found, [name]))
    if "demonstration" not in fixed and (name := next(worked, found["answer"] if gsm8k else None)):
        found["demonstration"] = name
    return found


def _bare(rows: list[dict[str, Any]], values: dict[str, Any], demonstrations: Sequence[str]) -> tuple[str, ...]:
    """The problems of those columns that are only the answer."""
    answer = values["answer"]
    pattern = values.get("answer_pattern")
    found = (bare_answers(rows, name, answer, pattern) for name in demonstrations)
    return tuple(filter(None, found))


def _first(rows: list[dict[str, Any]], names: list[str]) -> str | None:
    """The first column that every row has, else the one that most have; None without a name."""
    having = {name: sum(_has(row, name) for row in rows) for name in names}
    return max(having, key=having.__getitem__, default=None)  # the first of equal ones


def _has(row: dict[str, Any], column: str) -> bool:
    try:
        get_column(row, column)
    except KeyError:
        return False
    return True


def _value(row: dict[str, Any], column: str) -> Any:
    return get_column(row, column) if _has(row, column) else ""  # named in training's words, where the row is read


def _answer(row: dict[str, Any], values: dict[str, Any]) -> str:
    """The row's answer; empty where it has none, or where the pattern finds none."""
    value = _value(row, values["answer"])
    pattern = values.get("answer_pattern")
    text = "" if value is None else str(value)
    found = re.search(pattern, text) if pattern else None
    return (found[1] if found else "" if pattern else text).strip()


def _longest(lengths: list[int]) -> int:
    """The length that all but 1% do not exceed, as a multiple of `STEP`."""
    length = int(np.quantile(lengths, SHARE, method="inverted_cdf"))
    return -(-length // STEP) * STEP
