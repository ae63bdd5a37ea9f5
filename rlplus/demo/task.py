"""The task: add numbers digit by digit without carrying, at once or with a scratchpad of running sums.

    prompt          01233+33210+-----+-----+-----=      (a form with five places, here three of them empty)
    direct answer   :30003
    demonstration   ;01233:30003                        (the running sums; after the colon the last, the answer)

A model this small can add two numbers at once, but not five: those need the scratchpad.
"""

import json
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DIGITS = "0123"
WIDTH = 5  # digits of a number: a guess is right once in 4**5 times
EASY, HARD = 2, 5  # numbers to add
TRAIN_PROBLEMS, TEST_PROBLEMS = 4096, 200
SCRATCHPAD, ANSWER, EMPTY = ";", ":", "-"
PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Problem:
    """Numbers of WIDTH digits to add."""

    numbers: tuple[str, ...]

    @property
    def hard(self) -> bool:
        return len(self.numbers) == HARD

    @property
    def prompt(self) -> str:
        empty = (EMPTY * WIDTH,) * (HARD - len(self.numbers))
        return "+".join(self.numbers + empty) + "="

    @property
    def answer(self) -> str:
        return self.running_sums()[-1]

    @property
    def demonstration(self) -> str:
        return scratchpad(self.running_sums())

    def running_sums(self, rng: random.Random | None = None, slip: float = 0.0) -> list[str]:
        """The sums of the first one, two, ... numbers. `slip`: the probability of a wrong digit, which propagates."""
        total = self.numbers[0] if rng is None else blur(self.numbers[0], rng, slip)
        sums = [total]
        for number in self.numbers[1:]:
            total = "".join(DIGITS[(int(a) + int(b)) % len(DIGITS)] for a, b in zip(total, number, strict=True))
            total = total if rng is None else blur(total, rng, slip)
            sums.append(total)
        return sums


def scratchpad(sums: list[str]) -> str:
    """A response that writes the running sums before the answer."""
    return SCRATCHPAD + ",".join(sums[:-1]) + ANSWER + sums[-1]


def blur(number: str, rng: random.Random, share: float) -> str:
    """Each digit is drawn anew with probability `share`."""
    return "".join(rng.choice(DIGITS) if rng.random() < share else digit for digit in number)


def draw(rng: random.Random, length: int, exclude: Collection[Problem] = ()) -> Problem:
    """A random problem of `length` numbers that is not in `exclude`."""
    while True:
        problem = Problem(tuple("".join(rng.choices(DIGITS, k=WIDTH)) for _ in range(length)))
        if problem not in exclude:
            return problem


def draw_splits(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and to evaluate on: no problem is in both, or twice in either."""
    rng = random.Random(f"problems {seed}")
    test = draw_many(rng, TEST_PROBLEMS, easy_for_each_hard=1)
    return draw_many(rng, TRAIN_PROBLEMS, easy_for_each_hard=3, exclude=frozenset(test)), test


def draw_many(
    rng: random.Random, count: int, easy_for_each_hard: int, exclude: Collection[Problem] = ()
) -> list[Problem]:
    """`count` different problems, several easy ones and a hard one in turn, none of them in `exclude`."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        hard = len(problems) % (easy_for_each_hard + 1) == easy_for_each_hard
        problems[draw(rng, HARD if hard else EASY, exclude)] = None
    return list(problems)


def write_jsonl(path: Path, problems: Iterable[Problem]) -> None:
    """Write one row per problem, with the columns prompt, answer and demonstration."""
    rows = ({"prompt": p.prompt, "answer": p.answer, "demonstration": p.demonstration} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of the task; any other character is an error."""
    alphabet = [PAD, EOS, *DIGITS, "+", "=", ",", EMPTY, SCRATCHPAD, ANSWER]
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
