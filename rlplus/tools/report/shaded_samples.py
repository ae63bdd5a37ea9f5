"""The kept samples that a page shows: a few groups of a few steps, each token with its shades."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, isnan
from pathlib import Path
from typing import NamedTuple

from rlplus.train.data import KeptSample, kept_steps, read_kept

MOST_STEPS = 12  # shown for a run
PROBLEMS = 4  # shown for an evaluation, two responses each
# Tokens that are shown of a longer response.
HEAD = 800
TAIL = 200
SHADES = 10
EVALUATED = 512  # samples of an evaluation among which to choose
ANSWER = 400  # characters of a longer reference answer

logger = logging.getLogger(__name__)


class Token(NamedTuple):
    """Text, and how strongly it is shaded: by 1 - p, and by the exploration weight where it has one.

    facts: p, entropy, exploration weight, advantage, for a reader's pointer; empty where unknown.
    """

    text: str
    doubt: int
    weight: int | None
    facts: str


@dataclass(frozen=True)
class Shown:
    """A sample on a page. left_out: tokens between head and tail."""

    sample: KeptSample
    head: list[Token]
    tail: list[Token]
    left_out: int

    @property
    def verdict(self) -> str:
        """right, wrong, ungraded, or shown: a demonstration."""
        if self.sample.demonstration:
            return "shown"
        return {True: "right", False: "wrong", None: "ungraded"}[self.sample.right]


@dataclass(frozen=True)
class Group:
    """Responses to one prompt; `answer` is the expected one, empty in older files."""

    prompt: str
    row: str
    answer: str
    members: list[Shown]


@dataclass(frozen=True)
class Moment:
    """A step of a run, or the evaluation of the finished model (step None), with some of its groups."""

    name: str
    groups: list[Group]
    step: int | None = None


def moments(folder: Path, damaged: list[str]) -> list[Moment]:
    """The first and the last of the kept steps and some between them, one group of each, and of the last evaluation.

    What is wrong with a file that cannot be read is added to `damaged`.
    """
    steps = step_files(folder)
    found = [moment_of(path, steps[path], damaged, groups=1) for path in _spread([*steps], MOST_STEPS)]
    return [moment for moment in found if moment] + [
        Moment(name, _groups(samples)) for name, samples in _evaluation(folder, damaged)
    ]


def step_files(folder: Path) -> dict[Path, int]:
    """The files with the groups of steps, the oldest first, and their steps."""
    return {path: step for path, step in kept_steps(folder).items() if path.stem.count("-") == 1}


def moment_of(path: Path, step: int, damaged: list[str], groups: int | None = None) -> Moment | None:
    """The groups of a step's file, or the first ones; None without any."""
    samples = _read(path, damaged)
    if others := [sample.step for sample in samples if sample.step != step]:
        damaged.append(f"these samples are left out: {path} has those of step {others[0]}")
        logger.warning(damaged[-1])
        return None
    return Moment(f"step {step}", _groups(samples)[:groups], step) if samples else None


def _evaluation(folder: Path, damaged: list[str]) -> Iterator[tuple[str, list[KeptSample]]]:
    """One right and one wrong response to the first problems of each benchmark, by the finished model."""
    for path in sorted(folder.glob("evaluation*-0-000000.parquet")):
        samples = _read(path, damaged, EVALUATED)
        chosen = {(s.problem, bool(s.right)): s for s in reversed(samples)}
        problems = list(dict.fromkeys(s.problem for s in samples))[:PROBLEMS]
        found = [chosen[key] for problem in problems for key in ((problem, True), (problem, False)) if key in chosen]
        if found:
            yield f"evaluation{f' on {found[0].benchmark}' if found[0].benchmark else ''}", found


def _read(path: Path, damaged: list[str], most: int | None = None) -> list[KeptSample]:
    """`read_kept` of a file; none of a damaged one, which is logged."""
    try:
        return read_kept(path, most)
    except ValueError as error:
        damaged.append(f"these samples are left out: {error}")
        logger.warning(damaged[-1])
        return []


def _spread(files: Sequence[Path], most: int) -> list[Path]:
    """`most` of the files at most, evenly, with the first and the last."""
    if len(files) <= most:
        return list(files)
    return [files[round(i * (len(files) - 1) / (most - 1))] for i in range(most)]


def _groups(samples: Iterable[KeptSample]) -> list[Group]:
    groups: dict[tuple[int, str], list[KeptSample]] = {}
    for sample in samples:
        groups.setdefault((sample.problem, sample.prompt), []).append(sample)
    return [
        Group(members[0].prompt, members[0].row, shortened(members[0].answer), [_shown(one) for one in members])
        for members in groups.values()
    ]


def shortened(answer: str) -> str:
    """The answer, cut at `ANSWER` characters: a program's is a list of tests."""
    return answer if len(answer) <= ANSWER else f"{answer[:ANSWER]} … ({len(answer):,} characters)"


def _shown(sample: KeptSample) -> Shown:
    tokens = list(_tokens(sample))
    if len(tokens) <= HEAD + TAIL:
        return Shown(sample, tokens, [], 0)
    return Shown(sample, tokens[:HEAD], tokens[-TAIL:], len(tokens) - HEAD - TAIL)


def _tokens(sample: KeptSample) -> Iterator[Token]:
    for i, (text, logprob) in enumerate(zip(sample.tokens, sample.logprob, strict=True)):
        p = None if isnan(logprob) else exp(min(0.0, logprob))
        weight = None if sample.exploration_weight is None else sample.exploration_weight[i]
        entropy = None if sample.entropy is None else sample.entropy[i]
        advantage = None if sample.advantage is None else sample.advantage[i]
        facts = ("" if fact is None else f"{fact:.3g}" for fact in (p, entropy, weight, advantage))
        yield Token(
            text, 0 if p is None else _shade(1 - p), None if weight is None else _shade(weight), ";".join(facts)
        )


def _shade(share: float) -> int:
    return min(SHADES - 1, int(share * SHADES))


def count(found: Iterable[Moment]) -> int:
    return sum(len(group.members) for group in chain.from_iterable(moment.groups for moment in found))
