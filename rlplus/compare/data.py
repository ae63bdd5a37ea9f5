"""The base model and the data of a setting and a seed, from the demo's family of tasks."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.demo.base import Recipe, make_base
from rlplus.demo.task import WIDTH, Demonstrator, Problem, Task

TRAIN, VALIDATION, TEST = "train.jsonl", "validation.jsonl", "test.jsonl"
NOTE = "data.json"  # in the folder of finished files: the recipe that they were made from
SET = "set"  # the column with the name of a test set
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, TEST_PROBLEMS, TRANSFER_PROBLEMS = 4096, 64, 100, 50


def make_base_model(folder: Path, recipe: Recipe) -> None:
    """Train the base model, or leave it as it is if it is of this recipe; it sees no problem of the other files."""
    tests, validation = _held_out(recipe)
    shown = frozenset(problem for problems in (*tests.values(), validation) for problem in problems)
    make_base(folder, recipe, shown, Console(quiet=True))


def write_data(folder: Path, recipe: Recipe, demonstrator: Demonstrator) -> None:
    """Write the files, unless they are there: problems to train on, with demonstrations, for validation and tests.

    To train on there are three easy problems for each hard one; of the others half are hard. No problem occurs twice.
    """
    note = json.dumps({"recipe": asdict(recipe), "demonstrator": asdict(demonstrator)}, indent=1) + "\n"
    if (folder / NOTE).is_file() and read_text(folder / NOTE) == note:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NOTE).unlink(missing_ok=True)
    task, rng = recipe.task, random.Random(f"train {recipe.seed}")
    tests, validation = _held_out(recipe)
    held_out = frozenset(problem for problems in (*tests.values(), validation) for problem in problems)
    train = task.draw_many(rng, next(iter(tests)), TRAIN_PROBLEMS, easy_for_each_hard=3, exclude=held_out)
    _write(folder / TRAIN, [_demonstrated(each, demonstrator, rng) for each in train])
    _write(folder / VALIDATION, [_row(problem) | {SET: next(iter(tests))} for problem in validation])
    _write(folder / TEST, [_row(problem) | {SET: name} for name, problems in tests.items() for problem in problems])
    write_text(folder / NOTE, note)  # last: without it the files are incomplete


def _held_out(recipe: Recipe) -> tuple[dict[str, list[Problem]], list[Problem]]:
    """The test sets by name, and the problems for validation, which are like the first of them."""
    task, rng = recipe.task, random.Random(f"test {recipe.seed}")
    name, *further = task.sets
    tests = {name: task.draw_many(rng, name, TEST_PROBLEMS, easy_for_each_hard=1)}
    tests |= {other: task.draw_many(rng, other, TRANSFER_PROBLEMS, easy_for_each_hard=1) for other in further}
    validation = task.draw_many(rng, name, VALIDATION_PROBLEMS, easy_for_each_hard=1, exclude=frozenset(tests[name]))
    return tests, validation


def response_tokens(task: Task) -> int:
    """Tokens of a demonstration of a hard problem, and its end: each number with a sign before it."""
    return task.hard * (WIDTH + 1) + 1


def _row(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _demonstrated(problem: Problem, demonstrator: Demonstrator, rng: random.Random) -> dict[str, Any]:
    response = demonstrator.response(problem, rng)
    logprobs = [round(logprob, 4) for logprob in demonstrator.logprobs(problem, response)]
    return _row(problem) | {"demonstration": response, "behavior_logprob": logprobs}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
