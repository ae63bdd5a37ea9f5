"""Word problems of several steps in English, after GSM8K: who has how many of what, and what becomes of them.

    prompt          Mia picks 12 apples in the morning and 9 in the afternoon. She gives 5 of them to Tom. A week later
                    she has 3 times as many. How many apples does Mia have now?
    worked          12+9=21. 21-5=16. 16*3=48. #### 48
    demonstration   First 12+9=21. Then 21-5=16. Then 16*3=48. So the answer is #### 48

Every number is a whole one from 1 to 99, so that a model of a million parameters can learn the arithmetic.
"""

import operator
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MOST = 99  # the largest number
ANSWER = "#### "  # GSM8K's mark
PAD, EOS = "<pad>", "<eos>"
VOCABULARY = 512  # tokens at most; 433 hold every word
FEWEST_STEPS, MOST_STEPS = 2, 5

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
WOMEN = ("Mia", "Natalia", "Betty", "Julie", "Maila", "Joy", "Alexis", "Tina", "Jasmine", "Weng")
MEN = ("Tom", "James", "Mark", "Albert", "Ken", "Randy", "Tobias", "John", "Jerry", "Toulouse")
ITEMS = (
    "apples", "clips", "flowers", "books", "cookies", "marbles", "stickers", "pencils", "cards", "eggs", "candies",
    "shells", "stamps", "toys", "balloons", "oranges", "buttons", "beads", "cups", "coins",
)  # fmt: skip

# A way to begin with one number or two, and then what happens. Of a number there is {a} or {b}.
ONE = ("{name} has {a} {items}.", "There are {a} {items} in {name}'s box.", "{name} starts the week with {a} {items}.")
TWO = {
    "+": (
        "{name} picks {a} {items} in the morning and {b} in the afternoon.",
        "{name} has {a} red {items} and {b} blue {items}.",
        "{name} buys {a} {items} on Monday and {b} {items} on Tuesday.",
    ),
    "*": (
        "{name} buys {a} bags with {b} {items} in each.",
        "{name} has {a} shelves, and there are {b} {items} on each.",
        "Each of {name}'s {a} friends brings {b} {items}.",
    ),
}
CHANGES = {
    "+": (
        "{he} buys {b} more.",
        "{other} gives {him} {b} {items}.",
        "Then {he} finds {b} more {items} at home.",
        "{his} sister sends {him} {b} more.",
    ),
    "-": (
        "{he} gives {b} of them to {other}.",
        "{he} sells {b} {items} at the market.",
        "On the way home {he} loses {b} of them.",
        "{he} uses {b} {items} at school.",
    ),
    "*": ("A week later {he} has {b} times as many.", "With {other}'s help {he} makes that {b} times as many {items}."),
    "/": (
        "{he} puts them into {b} equal piles and keeps one pile.",
        "{he} shares them equally among {b} children, of whom {other} is one, and keeps what {other} got.",
    ),
}
QUESTION = "How many {items} does {name} have now?"
LAST = {
    "*": "{he} then sells each of them for {b} dollars. How many dollars does {name} get?",
    "/": "{he} then packs them equally into {b} boxes. How many {items} are in each box?",
}


@dataclass(frozen=True)
class Step:
    """first · operation · second = result, of numbers from 1 to MOST."""

    first: int
    operation: str
    second: int

    @property
    def result(self) -> int:
        return OPERATIONS[self.operation](self.first, self.second)

    @property
    def whole(self) -> bool:
        """Whether the result is a number that the problems may have."""
        exact = self.operation != "/" or self.first % self.second == 0
        return exact and 1 <= self.result <= MOST

    def line(self, result: int | None = None) -> str:
        return f"{self.first}{self.operation}{self.second}={self.result if result is None else result}."


@dataclass(frozen=True)
class Problem:
    """A text and the steps that answer it; each step but the first begins with the result of the one before."""

    prompt: str
    steps: tuple[Step, ...]

    @cached_property
    def answer(self) -> str:
        return str(self.steps[-1].result)

    def worked(self, rng: random.Random | None = None, slip: float = 0.0) -> str:
        """The solution as the base model writes it. slip: the probability of a wrong result, with which it goes on."""
        lines, value = [], self.steps[0].first
        for step in self.steps:
            step = replace(step, first=value)
            value = step.result if step.whole else max(1, min(MOST, step.result))
            if rng is not None and rng.random() < slip:
                value = rng.choice([near for near in range(max(1, value - 10), min(MOST, value + 10)) if near != value])
            lines.append(step.line(value))
        return " ".join([*lines, f"{ANSWER}{value}"])

    @property
    def demonstration(self) -> str:
        """The same steps in words that the base model never saw."""
        first, *others = (step.line() for step in self.steps)
        return " ".join(
            [f"First {first}", *(f"Then {line}" for line in others), f"So the answer is {ANSWER}{self.answer}"]
        )


def draw(rng: random.Random, steps: int, exclude: Collection[str] = ()) -> Problem:
    """A random problem of that many steps, whose prompt is not in `exclude`."""
    while True:
        problem = _draw(rng, steps)
        if problem.prompt not in exclude:
            return problem


def draw_many(rng: random.Random, steps: range, count: int, exclude: Collection[str] = ()) -> list[Problem]:
    """`count` different problems, their numbers of steps in turn, none with a prompt in `exclude`."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw(rng, steps[len(problems) % len(steps)], exclude)
        problems[problem.prompt] = problem
    return list(problems.values())


def _draw(rng: random.Random, count: int) -> Problem:
    woman = rng.random() < 0.5
    name = rng.choice(WOMEN if woman else MEN)
    words = {"name": name, "other": rng.choice([each for each in (*WOMEN, *MEN) if each != name])}
    words |= {"items": rng.choice(ITEMS), "he": "she" if woman else "he"}
    words |= {"him": "her", "his": "her"} if woman else {"him": "him", "his": "his"}
    sentences, steps = [], []
    if rng.random() < 0.5:
        first = _step(rng, rng.choice(tuple(TWO)), rng.randint(2, MOST // 2))
        steps.append(first)
        sentences.append(rng.choice(TWO[first.operation]).format(**words, a=first.first, b=first.second))
        value = first.result
    else:
        value = rng.randint(2, MOST)
        sentences.append(rng.choice(ONE).format(**words, a=value))
    while len(steps) < count:
        step = _step(rng, rng.choice(tuple(CHANGES)), value)
        steps.append(step)
        value = step.result
        last = len(steps) == count and step.operation in LAST and rng.random() < 0.5
        text = LAST[step.operation] if last else rng.choice(CHANGES[step.operation])
        sentences.append(_sentence(text.format(**words, b=step.second)))
        if last:
            return Problem(" ".join(sentences), tuple(steps))
    return Problem(" ".join([*sentences, QUESTION.format(**words)]), tuple(steps))


def _step(rng: random.Random, operation: str, first: int) -> Step:
    """A step with this operation, or with another one where this has no whole result."""
    for each in (operation, *rng.sample(tuple(OPERATIONS), len(OPERATIONS))):
        most = 9 if each in "*/" else MOST
        able = [s for n in range(2, most + 1) if (s := Step(first, each, n)).whole]
        if able:
            return rng.choice(able)
    raise AssertionError(f"no step from {first}")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-pair encoding learned from 4,000 problems and their solutions; every digit is a token of its own."""
    rng = random.Random("tokenizer")
    texts = []
    for problem in draw_many(rng, range(FEWEST_STEPS, MOST_STEPS + 1), 4000):
        texts += [problem.prompt, problem.worked(), problem.demonstration]
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[PAD, EOS], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
