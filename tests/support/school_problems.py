"""Problems in the style of GSM8K, with worked solutions, for tests of pretrained models."""

import json
from pathlib import Path

PROBLEMS = [  # question, worked solution, answer
    (
        "Anna picks 12 apples in the morning and twice as many in the afternoon. How many apples does she pick?",
        "In the afternoon she picks 2 * 12 = 24 apples. Together that is 12 + 24 = 36 apples.",
        36,
    ),
    (
        "A box holds 6 eggs. A baker uses 3 boxes and 4 more eggs. How many eggs does he use?",
        "Three boxes hold 3 * 6 = 18 eggs. He uses 18 + 4 = 22 eggs.",
        22,
    ),
    (
        "Tom has 50 dollars and buys 3 books at 9 dollars each. How many dollars does he have left?",
        "The books cost 3 * 9 = 27 dollars. He has 50 - 27 = 23 dollars left.",
        23,
    ),
    (
        "A train travels 60 miles an hour. How many miles does it travel in 3 hours and a half?",
        "In 3 hours it travels 3 * 60 = 180 miles, in half an hour 60 / 2 = 30 miles, so 180 + 30 = 210 miles.",
        210,
    ),
    (
        "Mia reads 15 pages a day, and her book has 120 pages. How many days does she need?",
        "She needs 120 / 15 = 8 days.",
        8,
    ),
    (
        "A farmer has 7 cows and 5 times as many hens. How many animals does he have?",
        "He has 5 * 7 = 35 hens. Together he has 7 + 35 = 42 animals.",
        42,
    ),
    (
        "Sam earns 11 dollars an hour, works 8 hours and spends a quarter of it. How many dollars does he keep?",
        "He earns 11 * 8 = 88 dollars. He spends 88 / 4 = 22 dollars. He keeps 88 - 22 = 66 dollars.",
        66,
    ),
    (
        "There are 4 rows of 9 chairs in a hall, and 5 chairs are broken. How many chairs can be used?",
        "There are 4 * 9 = 36 chairs, and 36 - 5 = 31 of them can be used.",
        31,
    ),
    (
        "A rope of 96 feet is cut into 4 equal pieces, and each of these in half. How long is a piece?",
        "A quarter of the rope has 96 / 4 = 24 feet, and a half of that has 24 / 2 = 12 feet.",
        12,
    ),
    (
        "Ben is 3 times as old as Eva, who is 9. How old is Ben in 4 years?",
        "Ben is 3 * 9 = 27 years old. In 4 years he is 27 + 4 = 31.",
        31,
    ),
    (
        "A shop sells 14 pens on Monday and half as many on each of the next 2 days. How many pens does it sell?",
        "On each of the next days it sells 14 / 2 = 7 pens. In all it sells 14 + 2 * 7 = 28 pens.",
        28,
    ),
    (
        "A tank holds 200 liters and loses 8 liters an hour. How many liters are left after 6 hours?",
        "It loses 6 * 8 = 48 liters, so 200 - 48 = 152 liters are left.",
        152,
    ),
]


def write_problems(folder: Path, count: int = len(PROBLEMS)) -> Path:
    """A file of the first problems, in columns that `rlplus init` knows; each solution ends in its answer in a box."""
    rows = [
        {"question": question, "answer": str(answer), "solution": f"{solution} The answer is \\boxed{{{answer}}}."}
        for question, solution, answer in PROBLEMS[:count]
    ]
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
