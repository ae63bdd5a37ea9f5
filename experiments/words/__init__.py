"""Word problems as a comparison uses them: `prepare` makes the base model and the data of a setting and a seed.

`word_problems` has the problems, `words_base` the base model, which can solve them step by step and seldom does.
"""

import random
from pathlib import Path
from typing import Any

from experiments.toy.task import write_rows
from experiments.words.word_problems import MOST_STEPS, Problem, draw_many
from experiments.words.words_base import WordsBase, make_base

PLAIN_BASE = WordsBase()
SET = "set"  # the column with the name of a test set
TRAINED = range(2, MOST_STEPS)  # steps of the problems to train on; the base model has learned one step more
SETS = {"trained": TRAINED, "longer": range(MOST_STEPS, MOST_STEPS + 1)}
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, TEST_PROBLEMS = 1024, 48, 96  # the last two: in each set


def prepare(folder: Path, seed: int, base: WordsBase = PLAIN_BASE, problems: int = TRAIN_PROBLEMS) -> None:
    """Write model/ and train.jsonl, with demonstrations, validation.jsonl and test.jsonl into the folder.

    Every seed has the same base model, copied from another seed's folder beside this one, and the same problems for
    validation and tests, which the base model has not seen; the problems to train on are the seed's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held_out: set[str] = set()
    for name, count in (("test", TEST_PROBLEMS), ("validation", VALIDATION_PROBLEMS)):
        rows = []
        for which, steps in SETS.items():
            drawn = draw_many(random.Random(f"{name}, {which}"), steps, count, held_out)
            held_out |= {problem.prompt for problem in drawn}
            rows += [_row(problem) | {SET: which} for problem in drawn]
        write_rows(folder / f"{name}.jsonl", rows)
    others = [each for each in folder.parent.parent.glob("*/*/model") if each != folder / "model"]
    make_base(folder / "model", base, held_out, others)
    train = draw_many(random.Random(f"train {seed}"), TRAINED, problems, held_out)
    write_rows(folder / "train.jsonl", [_row(each) | {"demonstration": each.demonstration} for each in train])


def _row(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer}
