"""Rows of the known benchmarks' own data sets as questions and answers."""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

from rlplus.data.row_files import Row

_LETTERS = "ABCDEFGHIJ"
# The instruction of simple-evals, as in LUFFY's file of GPQA, and PRIME's for code (PRIME-RL/PRIME, README.md).
_ASK_LETTER = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'ANSWER: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
)
_ASK_CODE = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."


def _math(row: Row) -> tuple[str, str]:
    answers = row["answer"]
    return row["problem"], ", ".join(map(str, answers)) if isinstance(answers, list) else str(answers)


def _options(question: str, options: Sequence[str]) -> str:
    return "\n".join([f"{question}\n", *(f"{letter}) {o}" for letter, o in zip(_LETTERS, options, strict=False))])


def _arc(row: Row) -> tuple[str, str]:
    labels = list(row["choices"]["label"])  # of some questions 1 to 4
    return _options(row["question"], row["choices"]["text"]), _LETTERS[labels.index(row["answerKey"])]


def _gpqa(row: Row) -> tuple[str, str]:
    """The right option has a column of its own: its place among the others depends on the question only."""
    right = row["Correct Answer"].strip()
    options = [right, *(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
    Random(row["Question"]).shuffle(options)
    return _ASK_LETTER + _options(row["Question"].strip(), options), _LETTERS[options.index(right)]


def _mmlu_pro(row: Row) -> tuple[str, str]:
    return _options(row["question"], row["options"]), row["answer"]


def _humaneval(row: Row) -> tuple[str, str]:
    question = f"Complete this Python function.\n\n```python\n{row['prompt'].rstrip()}\n```{_ASK_CODE}"
    name = row["entry_point"]
    tests = {"before": row["prompt"], "after": f"{row['test']}\ncheck({name})\n", "function": name}
    return question, json.dumps(tests)


def _leetcode(row: Row) -> tuple[str, str]:
    return row["prompt_sft"] + _ASK_CODE, json.dumps({"after": row["test"]})


def _livecodebench(row: Row) -> tuple[str, str]:
    question, starter = row["question_content"], row["starter_code"]
    if starter:
        question += f"\n\nUse this starter code:\n```python\n{starter.rstrip()}\n```"
    else:
        question += "\n\nRead the inputs from stdin and write the answer to stdout."
    tests = [*json.loads(row["public_test_cases"]), *_private_tests(row["private_test_cases"])]
    cases = [[test["input"], test["output"]] for test in tests]
    return question + _ASK_CODE, json.dumps({"cases": cases, "function": json.loads(row["metadata"]).get("func_name")})


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse every name: only text is expected, and a pickle may name any function."""
        raise ValueError(f"want a pickled text as LiveCodeBench's private tests; got {module}.{name}")


def _private_tests(text: str) -> Any:
    """As JSON, or packed: base64, zlib, pickle."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        packed = zlib.decompress(base64.b64decode(text))
        return json.loads(_TextUnpickler(io.BytesIO(packed)).load())


LAYOUTS = {
    "math": _math,
    "arc": _arc,
    "gpqa": _gpqa,
    "mmlu_pro": _mmlu_pro,
    "humaneval": _humaneval,
    "leetcode": _leetcode,
    "livecodebench": _livecodebench,
}
