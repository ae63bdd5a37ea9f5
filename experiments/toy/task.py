"""A family of tasks: add numbers digit by digit without carrying, at once or with a scratchpad of running sums.

    prompt          01233+33210+-----+-----+-----=      (a form with five places, here three of them empty)
    direct answer   :30003
    demonstration   ;01233:30003                        (the running sums; after the colon the last, the answer)

A model this small can add two numbers at once, but not five: those need the scratchpad. `Task` and
`Demonstrator` have the dials of the family; in the demo every dial is at its default.
"""

import json
import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlplus.common.durable import write_text

DIGITS = "0123"
WIDTH = 5  # digits of a number: a guess is right once in 4**5 times
EASY, HARD = 2, 5  # numbers to add
MOST = 10  # numbers for which the base model has positions
PLUS, MINUS = "+", "~"  # the dash stands for an empty place
DEMO_TRAIN, DEMO_TEST = 4096, 200  # problems of `draw_splits`
SCRATCHPAD, ANSWER, EMPTY = ";", ":", "-"
PAD, EOS = "<pad>", "<eos>"


Kind = tuple[str, int]  # the operation, and how many numbers


@dataclass(frozen=True)
class Problem:
    """Numbers of WIDTH digits to add, or, with MINUS, to subtract from the first one; `places` of the form."""

    numbers: tuple[str, ...]
    operation: str = PLUS
    places: int = HARD

    @property
    def hard(self) -> bool:
        return len(self.numbers) > EASY

    @property
    def prompt(self) -> str:
        empty = (EMPTY * WIDTH,) * (self.places - len(self.numbers))
        return self.operation.join(self.numbers + empty) + "="

    @property
    def answer(self) -> str:
        return self.running_sums()[-1]

    @property
    def demonstration(self) -> str:
        return scratchpad(self.running_sums())

    def running_sums(self, rng: random.Random | None = None, slip: float = 0.0) -> list[str]:
        """The sums of the first one, two, ... numbers. `slip`: the probability of a wrong digit, which propagates."""
        sign = 1 if self.operation == PLUS else -1
        total = self.numbers[0] if rng is None else blur(self.numbers[0], rng, slip)
        sums = [total]
        for number in self.numbers[1:]:
            total = "".join(DIGITS[(int(a) + sign * int(b)) % len(DIGITS)] for a, b in zip(total, number, strict=True))
            total = total if rng is None else blur(total, rng, slip)
            sums.append(total)
        return sums


@dataclass(frozen=True)
class Task:
    """A task of the family, as far as the base model learns it.

    - `hard`: numbers of a hard problem; more make longer responses
    - `transfer`: whether the base model also learns problems that are never trained on later: other numbers of numbers,
      and subtraction
    """

    hard: int = HARD
    transfer: bool = False

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if not 4 <= self.hard <= MOST:
            raise ValueError(f"want 4 to {MOST} numbers in a hard problem; got {self.hard}")

    @property
    def sets(self) -> dict[str, tuple[Kind, Kind]]:
        """The kinds of problems, easy and hard, of each test set; the first is what is trained on."""
        sets: dict[str, tuple[Kind, Kind]] = {"trained": ((PLUS, EASY), (PLUS, self.hard))}
        if self.transfer:
            sets |= {"lengths": ((PLUS, 3), (PLUS, self.hard - 1)), "subtraction": ((MINUS, EASY), (MINUS, self.hard))}
        return sets

    @property
    def kinds(self) -> list[Kind]:
        """All that the base model learns."""
        return [kind for kinds in self.sets.values() for kind in kinds]

    def draw(self, rng: random.Random, kind: Kind, exclude: Collection[Problem] = ()) -> Problem:
        """A random problem of this kind that is not in `exclude`."""
        operation, length = kind
        while True:
            numbers = tuple("".join(rng.choices(DIGITS, k=WIDTH)) for _ in range(length))
            problem = Problem(numbers, operation, self.hard)
            if problem not in exclude:
                return problem

    def draw_many(
        self, rng: random.Random, name: str, count: int, easy_for_each_hard: int, exclude: Collection[Problem] = ()
    ) -> list[Problem]:
        """`count` different problems of a set, several easy ones and a hard one in turn, none of them in `exclude`."""
        easy, hard = self.sets[name]
        problems: dict[Problem, None] = {}
        while len(problems) < count:
            is_hard = len(problems) % (easy_for_each_hard + 1) == easy_for_each_hard
            problems[self.draw(rng, hard if is_hard else easy, exclude)] = None
        return list(problems)


@dataclass(frozen=True)
class Demonstrator:
    """The author of demonstrations, whose answers are always right.

    - `order`: "forward" writes running sums as the base model learned to; "backward" starts from the last number, which
      the base model never saw
    - `noise`: probability that a digit of the running sums, not of the answer, is drawn anew
    - `copies`: whether it begins with the first number, as the base model learned to; else with the sum of two, a form
      that the base model never saw and has the parts of
    """

    order: Literal["forward", "backward"] = "forward"
    noise: float = 0.0
    copies: bool = True

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ValueError(f"want noise a probability; got {self.noise}")

    def response(self, problem: Problem, rng: random.Random) -> str:
        """A response to a problem of addition."""
        shown = replace(problem, numbers=problem.numbers[::-1]) if self.order == "backward" else problem
        *sums, answer = shown.running_sums()
        kept = sums if self.copies else sums[1:]
        return scratchpad([*(blur(each, rng, self.noise) for each in kept), answer])

    def logprobs(self, problem: Problem, response: str) -> list[float]:
        """Exact logprob of each character of its response to a problem, and of the end behind it.

        Only the digits on the way are random, each right with probability 1 - noise · 3/4.
        """
        exact = replace(self, noise=0.0).response(problem, random.Random())
        right, wrong = (math.log(p) if p else -math.inf for p in (1 - self.noise * 3 / 4, self.noise / 4))
        on_the_way = response.index(ANSWER)
        found = [
            (right if shown == sure else wrong) if shown in DIGITS and place < on_the_way else 0.0
            for place, (shown, sure) in enumerate(zip(response, exact, strict=True))
        ]
        return [*found, 0.0]


def scratchpad(sums: list[str]) -> str:
    """A response that writes the running sums before the answer."""
    return SCRATCHPAD + ",".join(sums[:-1]) + ANSWER + sums[-1]


def blur(number: str, rng: random.Random, share: float) -> str:
    """Each digit is drawn anew with probability `share`."""
    return "".join(rng.choice(DIGITS) if rng.random() < share else digit for digit in number)


def draw_splits(seed: int) -> tuple[list[Problem], list[Problem]]:
    """The demo's problems to train on and to evaluate on: no problem is in both, or twice in either."""
    rng = random.Random(f"problems {seed}")
    test = Task().draw_many(rng, "trained", DEMO_TEST, easy_for_each_hard=1)
    return Task().draw_many(rng, "trained", DEMO_TRAIN, easy_for_each_hard=3, exclude=frozenset(test)), test


def write_jsonl(path: Path, problems: Iterable[Problem]) -> None:
    """Write one row per problem, with the columns prompt, answer and demonstration."""
    write_rows(path, ({"prompt": p.prompt, "answer": p.answer, "demonstration": p.demonstration} for p in problems))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line of JSON for each row."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(task: Task = Task()) -> PreTrainedTokenizerFast:
    """One token per character of the task; any other character is an error."""
    alphabet = [PAD, EOS, *DIGITS, PLUS, "=", ",", EMPTY, SCRATCHPAD, ANSWER, *([MINUS] if task.transfer else [])]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(alphabet)}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def read_jsonl(path: Path) -> list[Problem]:
    """The problems that `write_jsonl` wrote."""
    prompts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
    numbers = [prompt.removesuffix("=").split("+") for prompt in prompts]
    return [Problem(tuple(number for number in each if EMPTY not in number)) for each in numbers]
