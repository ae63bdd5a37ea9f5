"""The samples of an evaluation, kept to be read, and so that a killed evaluation resumes where it stopped."""

import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rlplus.config import Config
from rlplus.data import Example, KeptSample, kept_facts, read_kept, token_texts, write_kept
from rlplus.data.kept import UNFINISHED
from rlplus.evaluation.scorers import reward_of
from rlplus.reward import Score
from rlplus.rollout import Completion
from rlplus.trainer.folder import surroundings

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A sampled response to a problem. text: as it was graded."""

    problem: Example
    completion: Completion
    text: str
    score: Score


class Graded(NamedTuple):
    """The numbers of a sample that count. reward: NaN where the grader failed. tokens: of the response and its end."""

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

    identity: a hash of everything that determines the samples; the files of another evaluation are not read, and with
    None no file is. step: of the training whose weights are evaluated.
    """

    start: Path
    rank: int
    tokenizer: PreTrainedTokenizerBase
    identity: str | None
    step: int | None = None

    def remove_others(self) -> None:
        """Remove the files of other evaluations, damaged and unfinished ones, of all ranks. For one rank to call."""
        ours = re.compile(rf"{re.escape(self.start.name)}-\d+-\d+")
        files = [path for path in self.start.parent.glob("*.parquet") if ours.fullmatch(path.stem)]
        same = [path for path in files if _facts_of(path).get("identity") == self.identity]
        for path in self.start.parent.glob(f"*{UNFINISHED}"):
            if ours.fullmatch(path.stem):
                path.unlink(missing_ok=True)
        for path in set(files).difference(same):
            path.unlink(missing_ok=True)
        if others := len(files) - len(same):
            logger.warning(
                "removed %d files of %s-*: they are damaged, or of another model, data or settings", others, self.start
            )
        if same:
            logger.info("resuming with the %d calls in %s-*", len(same), self.start)

    def read(self, first: int, stop: int) -> Call | None:
        """The samples of the problems [first, stop) if this evaluation kept them, else None."""
        path = self._path(first)
        if self.identity is None or not path.is_file():
            return None
        if not self._facts(stop).items() <= (facts := _facts_of(path)).items():
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
        return {"identity": self.identity or "", "stop": str(stop)}

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


def _facts_of(path: Path) -> dict[str, str]:
    """The facts of a file; none of a damaged one."""
    try:
        return kept_facts(path)
    except ValueError:
        return {}


def added(path: Path, end: str) -> Path:
    """The path with something behind its name."""
    return path.with_name(path.name + end)


def identity(config: Config, model: Path, benchmark: str, problems: Sequence[Example], ranks: int) -> str:
    """A hash of everything that determines the samples of a benchmark and their grades.

    model: a folder, or a name on the hub whose config.json is in the cache.
    """
    settings = config.model_dump(
        include={"model", "rollout", "evaluation"}, exclude={"evaluation": {"k", "every", "benchmarks"}}
    )
    asked = [(benchmark, e.prompt, e.answer, e.rows, dict(e.columns)) for e in problems]
    everything = (
        settings,
        reward_of(config, benchmark),
        surroundings(config),
        model_identity(model),
        asked,
        config.data.response_prefix,
        config.train.seed,
        ranks,
    )
    return hashlib.sha256(repr(everything).encode(errors="surrogatepass")).hexdigest()


def model_identity(model: Path) -> str:
    """The folder with a hash of its files' names, sizes and dates, or the hub's name with the commit."""
    if not model.is_dir():
        return f"{model}@{_cached_revision(str(model))}"
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(model.glob("*"))]
    return f"{model}@{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"


def _cached_revision(name: str) -> str | None:
    """The commit of the hub's model that the cache has as its newest; None without any."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "config.json")
    return Path(path).parent.name if isinstance(path, str) else None
