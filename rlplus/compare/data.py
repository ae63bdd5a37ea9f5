"""The base model and the data of a setting and a seed, from the demo's family of tasks."""

import json
import random
from pathlib import Path

from rich.console import Console

from rlplus.demo.base import Recipe, make_base
from rlplus.demo.task import Problem, Task
from rlplus.textfiles import write_text

BASE_MODEL, TRAIN, VALIDATION, TEST = "base", "train.jsonl", "validation.jsonl", "test.jsonl"
SET = "set"  # the column with the name of a test set
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, TEST_PROBLEMS, TRANSFER_PROBLEMS = 4096, 64, 100, 50


def make_task(folder: Path, recipe: Recipe) -> None:
    """Write the model and the files, or leave them as they are if they are of this recipe.

    Problems to train on: three easy ones for each hard one, with demonstrations. Of the others half are hard; no
    problem occurs twice, nor in the base model's training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task, rng = recipe.task, random.Random(f"problems {recipe.seed}")
    name, *further = task.sets
    tests = {name: task.draw_many(rng, name, TEST_PROBLEMS, easy_for_each_hard=1)}
    tests |= {other: task.draw_many(rng, other, TRANSFER_PROBLEMS, easy_for_each_hard=1) for other in further}
    held_out = frozenset(problem for problems in tests.values() for problem in problems)
    validation = task.draw_many(rng, name, VALIDATION_PROBLEMS, easy_for_each_hard=1, exclude=held_out)
    held_out |= frozenset(validation)
    train = task.draw_many(rng, name, TRAIN_PROBLEMS, easy_for_each_hard=3, exclude=held_out)
    _write(folder / TRAIN, [_row(problem) | {"demonstration": task.demonstration(problem, rng)} for problem in train])
    _write(folder / VALIDATION, [_row(problem) | {SET: name} for problem in validation])
    _write(folder / TEST, [_row(problem) | {SET: name} for name, problems in tests.items() for problem in problems])
    make_base(folder / BASE_MODEL, recipe, held_out, Console(quiet=True))


def response_tokens(task: Task) -> int:
    """Tokens of a demonstration with its end: as many numbers as the problem has, each with its sign before it."""
    return len(task.demonstration(task.draw(random.Random(0), task.kinds[1]), random.Random(0))) + 1


def _row(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
