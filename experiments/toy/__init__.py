"""The toy task as a comparison uses it: `prepare` makes the base model and the data of a setting and a seed.

`task` has the family of tasks, `base_model` the base model, which knows a skill and seldom uses it.
"""

import json
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.toy.base_model import ToyBase, make_base
from experiments.toy.task import Demonstrator, Problem, Task
from rlplus.common.durable import write_text

PLAIN_BASE, PLAIN_AUTHOR = ToyBase(), Demonstrator()  # every dial as in the demo
SET = "set"  # the column with the name of a test set
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, TEST_PROBLEMS, TRANSFER_PROBLEMS = 4096, 64, 100, 50


def prepare(folder: Path, seed: int, base: ToyBase = PLAIN_BASE, demonstrator: Demonstrator = PLAIN_AUTHOR) -> None:
    """Write model/ and train.jsonl, with demonstrations, validation.jsonl and test.jsonl into the folder.

    Training has three easy problems per hard one; half of the other problems are hard. No problem occurs twice,
    and the base model has seen none for validation or tests.
    """
    task, rng = base.task, random.Random(f"train {seed}")
    tests, validation = _held_out(task, seed)
    held_out = frozenset(problem for problems in (*tests.values(), validation) for problem in problems)
    make_base(folder / "model", base, seed, held_out, Console(quiet=True))
    train = task.draw_many(rng, next(iter(tests)), TRAIN_PROBLEMS, easy_for_each_hard=3, exclude=held_out)
    _write(folder / "train.jsonl", [_demonstrated(each, demonstrator, rng) for each in train])
    _write(folder / "validation.jsonl", [_row(problem) | {SET: next(iter(tests))} for problem in validation])
    test = [_row(problem) | {SET: name} for name, problems in tests.items() for problem in problems]
    _write(folder / "test.jsonl", test)


def _held_out(task: Task, seed: int) -> tuple[dict[str, list[Problem]], list[Problem]]:
    """The test sets by name, and the problems for validation, which are like the first of them."""
    rng = random.Random(f"test {seed}")
    name, *further = task.sets
    tests = {name: task.draw_many(rng, name, TEST_PROBLEMS, easy_for_each_hard=1)}
    tests |= {other: task.draw_many(rng, other, TRANSFER_PROBLEMS, easy_for_each_hard=1) for other in further}
    validation = task.draw_many(rng, name, VALIDATION_PROBLEMS, easy_for_each_hard=1, exclude=frozenset(tests[name]))
    return tests, validation


def _row(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _demonstrated(problem: Problem, demonstrator: Demonstrator, rng: random.Random) -> dict[str, Any]:
    response = demonstrator.response(problem, rng)
    logprobs = [round(logprob, 4) for logprob in demonstrator.logprobs(problem, response)]
    return _row(problem) | {"demonstration": response, "behavior_logprob": logprobs}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
