"""The toy task as a comparison uses it: `prepare` makes the base model and the data of a setting and a seed.

`task` has the family of tasks, `base_model` the base model, which knows a skill and seldom uses it.
"""

import random
from math import log
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.toy.base_model import ToyBase, make_base
from experiments.toy.task import Demonstrator, Problem, Task, make_tokenizer, write_rows
from rlplus.common.textfiles import read_text

PLAIN_BASE, PLAIN_AUTHOR = ToyBase(), Demonstrator()  # every dial as in the demo
SET = "set"  # the column with the name of a test set
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, TEST_PROBLEMS, TRANSFER_PROBLEMS = 4096, 64, 100, 50


def prepare(
    folder: Path,
    seed: int,
    base: ToyBase = PLAIN_BASE,
    demonstrator: Demonstrator = PLAIN_AUTHOR,
    problems: int = TRAIN_PROBLEMS,
    validation: Literal["trained", "all"] = "trained",
) -> None:
    """Write model/ and train.jsonl, with demonstrations, validation.jsonl and test.jsonl into the folder.

    Training has three easy problems per hard one, `problems` in all; half of the other problems are hard. No problem
    occurs twice, and the base model has seen none for validation or tests. validation: problems like those trained on,
    or of all test sets, in the tests' proportions. The base model of another setting is copied if it is the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task, rng = base.task, random.Random(f"train {seed}")
    tests, tuning = _held_out(task, seed, with_further=validation == "all")
    held_out = frozenset(problem for problems in (*tests.values(), *tuning.values()) for problem in problems)
    for name, sets in (("validation.jsonl", tuning), ("test.jsonl", tests)):
        write_rows(
            folder / name, [_row(problem) | {SET: name} for name, problems in sets.items() for problem in problems]
        )
    same = [each / "model" for each in folder.parent.parent.glob(f"*/{folder.name}") if _same_problems(each, folder)]
    make_base(folder / "model", base, seed, held_out, Console(quiet=True), same)
    train = task.draw_many(rng, next(iter(tests)), problems, easy_for_each_hard=3, exclude=held_out)
    uniform = round(-log(len(make_tokenizer(task))), 4)
    write_rows(folder / "train.jsonl", [_demonstrated(each, demonstrator, rng, uniform) for each in train])


def _held_out(
    task: Task, seed: int, *, with_further: bool
) -> tuple[dict[str, list[Problem]], dict[str, list[Problem]]]:
    """The problems of the tests and of the validation, by the name of the set; with_further: also the others'."""
    rng = random.Random(f"test {seed}")
    name, *further = task.sets
    tests = {name: task.draw_many(rng, name, TEST_PROBLEMS, easy_for_each_hard=1)}
    tests |= {other: task.draw_many(rng, other, TRANSFER_PROBLEMS, easy_for_each_hard=1) for other in further}
    counts = {name: VALIDATION_PROBLEMS}
    if with_further:
        counts |= dict.fromkeys(further, VALIDATION_PROBLEMS * TRANSFER_PROBLEMS // TEST_PROBLEMS)
    return tests, {
        each: task.draw_many(rng, each, count, easy_for_each_hard=1, exclude=frozenset(tests[each]))
        for each, count in counts.items()
    }


def _same_problems(first: Path, second: Path) -> bool:
    """Whether both folders hold out the same problems."""
    files = ("validation.jsonl", "test.jsonl")
    return (
        first != second
        and all((first / name).is_file() for name in files)
        and all(read_text(first / name) == read_text(second / name) for name in files)
    )


def _row(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _demonstrated(problem: Problem, demonstrator: Demonstrator, rng: random.Random, uniform: float) -> dict[str, Any]:
    """A row with the logprobs of its tokens under the demonstrator, and under the uniform policy."""
    response = demonstrator.response(problem, rng)
    logprobs = [round(logprob, 4) for logprob in demonstrator.logprobs(problem, response)]
    return _row(problem) | {
        "demonstration": response,
        "behavior_logprob": logprobs,
        "uniform_logprob": [uniform] * len(logprobs),
    }
