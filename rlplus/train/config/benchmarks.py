"""The benchmarks that evaluations know by name: the problems' source and layout, the grader."""

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Row = dict[str, Any]

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


def _gsm8k(row: Row) -> tuple[str, str]:
    return row["question"], row["answer"].rsplit("####", 1)[1].strip().replace(",", "")


def _options(question: str, options: Sequence[str]) -> str:
    return "\n".join([f"{question}\n", *(f"{letter}) {o}" for letter, o in zip(_LETTERS, options, strict=False))])


def _arc(row: Row) -> tuple[str, str]:
    labels = list(row["choices"]["label"])  # 1 to 4 in some questions
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
    question = row["question_content"]
    starter = row["starter_code"]
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
    """Decode tests: JSON, or packed by base64, zlib, pickle."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        packed = zlib.decompress(base64.b64decode(text))
        return json.loads(_TextUnpickler(io.BytesIO(packed)).load())


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. A file of the user's can replace `source`: the column `data.benchmark` selects its rows.

    source: `data.path` of the problems on the hub. layout: makes question and answer of a row there. grader: the
    reward's `kind`, which evaluation.math_grader replaces for mathematics. aliases: other names in files, such as
    LUFFY's and RL-PLUS's, which are in verl's layout.
    """

    source: str
    layout: Callable[[Row], tuple[str, str]]
    grader: str
    aliases: tuple[str, ...] = ()

    @property
    def mathematical(self) -> bool:
        return self.grader == "math_verify"


def _mathematical(source: str, *aliases: str) -> Benchmark:
    return Benchmark(source, _math, "math_verify", aliases)


# The six of the paper's Table 1, then its Table 2, then others. lkevinzc/math-eval is the evaluation suite of Oat-Zero.
BENCHMARKS = {
    "aime24": _mathematical("hf://lkevinzc/math-eval/aime", "aime"),
    "aime25": _mathematical("hf://math-ai/aime25/test"),
    "amc": _mathematical("hf://lkevinzc/math-eval/amc"),
    "math500": _mathematical("hf://lkevinzc/math-eval/math", "math"),
    "minerva": _mathematical("hf://lkevinzc/math-eval/minerva"),
    "olympiadbench": _mathematical("hf://lkevinzc/math-eval/olympiad_bench", "olympiad_bench"),
    "humaneval": Benchmark("hf://openai/openai_humaneval/test", _humaneval, "code"),
    "leetcode": Benchmark("hf://davidheineman/deepseek-leetcode/test", _leetcode, "code"),
    "livecodebench": Benchmark("hf://livecodebench/code_generation_lite/test.jsonl", _livecodebench, "code"),
    "arc_c": Benchmark("hf://allenai/ai2_arc/ARC-Challenge/test", _arc, "choice"),
    "gpqa_diamond": Benchmark("hf://Idavidrein/gpqa/gpqa_diamond/train", _gpqa, "choice", ("gpqa",)),
    "mmlu_pro": Benchmark("hf://TIGER-Lab/MMLU-Pro/test", _mmlu_pro, "choice"),
    "gsm8k": Benchmark("hf://openai/gsm8k/main/test", _gsm8k, "math_verify"),
}


def benchmark_name(name: str) -> str | None:
    """The benchmark that has this name in files; None if unknown."""
    return next((own for own, entry in BENCHMARKS.items() if name in (own, *entry.aliases)), None)


# Names of test sets, without case and punctuation; a longer name that contains one of these is still the benchmark's.
_PART = re.compile(
    "aime(20)?2[4-9]|amc(20)?23|math500|minervamath|olympiadbench|gpqa|mmlupro|arcchallenge|humaneval|livecodebench"
    "|(gsm8k|math)test"
)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_WHOLE = {_plain(name) for key, entry in BENCHMARKS.items() for name in (key, *entry.aliases)}
_WHOLE -= {"math", "gsm8k"}  # also the names of the training sets


def is_test_benchmark(name: str) -> bool:
    """Whether a test benchmark, in the registry or otherwise well known, has that name, in any spelling."""
    plain = _plain(name)
    return plain in _WHOLE or _PART.search(plain) is not None
