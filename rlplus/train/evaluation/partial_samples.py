"""The samples of an evaluation, kept to be read, and so that a killed evaluation resumes where it stopped."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rlplus.common.durable import remove_unfinished
from rlplus.train.data import Example, KeptSample, kept_facts, read_kept, token_texts, write_kept
from rlplus.train.evaluation.asked import Asked, comparable
from rlplus.train.reward import Score
from rlplus.train.rollout import Completion

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A sampled response to a problem. text: as it was graded."""

    problem: Example
    completion: Completion
    text: str
    score: Score


class Graded(NamedTuple):
    """The numbers of a sample that count. reward: NaN where the grader failed. tokens: the response's and its end."""

    reward: float
    status: str
    tokens: int
    truncated: bool


class Call(NamedTuple):
    """Samples from one call of the engine, problem by problem. seconds: its duration."""

    seconds: float
    samples: list[Graded]


@dataclass(frozen=True)
class KeptCalls:
    """The samples of a benchmark: a file per call of the engine, <start>-<rank>-<the first problem's number>.parquet.

    asked: what determines the samples; the files of another evaluation are not read, and with None no file is. step: of
    the training whose weights are evaluated.
    """

    start: Path
    rank: int
    tokenizer: PreTrainedTokenizerBase
    asked: Asked | None
    step: int | None = None

    def remove_damaged(self) -> None:
        """Remove damaged and unfinished files, of all ranks. For one rank to call."""
        remove_unfinished(self.start.parent, self._names)
        damaged = [path for path in self._files() if facts_of(path) is None]
        for path in damaged:
            path.unlink(missing_ok=True)
        if damaged:
            names = ", ".join(path.name for path in damaged)
            logger.warning("damaged samples in %s are removed and drawn again: %s", self.start.parent, names)

    def problems(self) -> int:
        """The number of problems whose samples this evaluation has kept, of all ranks."""
        facts = {path: facts_of(path) or {} for path in self._files()}
        return sum(int(f["stop"]) - int(path.stem.rpartition("-")[2]) for path, f in facts.items() if self._is_own(f))

    @property
    def _names(self) -> str:
        """The benchmark's file names as a regular expression: another's may begin like this one's."""
        return rf"{re.escape(self.start.name)}-\d+-\d+\.parquet"

    def _files(self) -> list[Path]:
        return [path for path in self.start.parent.glob("*.parquet") if re.fullmatch(self._names, path.name)]

    def _is_own(self, facts: Mapping[str, str]) -> bool:
        return self.asked is not None and comparable(asked_in(facts)) == comparable(self.asked)

    def read(self, first: int, stop: int) -> Call | None:
        """The samples of the problems [first, stop) if this evaluation kept them, else None."""
        path = self._path(first)
        if self.asked is None or not path.is_file():
            return None
        facts = facts_of(path) or {}
        if not self._is_own(facts) or facts["stop"] != str(stop):
            return None
        try:
            samples = read_kept(path)
        except ValueError as error:
            logger.warning("its samples are drawn again: %s", error)
            return None
        return Call(
            float(facts["seconds"]),
            [
                Graded(nan if kept.reward is None else kept.reward, kept.status, len(kept.tokens), kept.truncated)
                for kept in samples
            ],
        )

    def write(self, first: int, stop: int, benchmark: str, seconds: float, answers: Iterable[Answer]) -> None:
        """Keep the samples of the problems [first, stop); they are on the disk when this returns."""
        samples = (self._kept(benchmark, answer) for answer in answers)
        write_kept(self._path(first), samples, self._facts(stop) | {"seconds": repr(seconds)})

    def _path(self, first: int) -> Path:
        return self.start.with_name(f"{self.start.name}-{self.rank}-{first:06d}.parquet")

    def _facts(self, stop: int) -> dict[str, str]:
        return {"asked": json.dumps(self.asked), "stop": str(stop)}

    def _kept(self, benchmark: str, answer: Answer) -> KeptSample:
        problem, completion, text, score = answer
        return KeptSample(
            step=self.step,
            problem=problem.index,
            benchmark=benchmark,
            prompt=self.tokenizer.decode(list(problem.prompt)),
            response=text,
            reward=None if isnan(score.value) else score.value,
            status=score.status,
            truncated=completion.truncated,
            tokens=token_texts(self.tokenizer, completion.tokens),
            external=[False] * len(completion.tokens),
            logprob=completion.logprob,
            answer=problem.answer,
            detail=score.detail,
        )


def facts_of(path: Path) -> dict[str, str] | None:
    """The facts of a file; None of a damaged one."""
    try:
        return kept_facts(path)
    except ValueError:
        return None


def asked_in(facts: Mapping[str, str]) -> Asked:
    """The settings, model and data of a file's samples; empty where unknown, as in files of older versions."""
    return json.loads(facts.get("asked", "null")) or {}


def added(path: Path, end: str) -> Path:
    """The path with something behind its name."""
    return path.with_name(path.name + end)
