"""Samples that a run keeps to be read: prompts, responses, and what is known of each token, as Parquet files.

`output_dir/samples/` has step-<step>.parquet for the groups of a step. An evaluation after the step has a file
per call of the engine: step-<step>-<benchmark>-<rank>-<the first problem's number>.parquet.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from rlplus.common.durable import UNSEALED, is_sealed, make_folder, remove_unfinished, replacing
from rlplus.common.errors import printable
from rlplus.train.config import SAMPLES as SAMPLES

_CHECKSUM = "checksum"  # a fact of every file
_ROWS = 256  # converted at a time
_STEP = re.compile(r"step-(\d+)(-.*)?\.parquet")


@dataclass(frozen=True)
class KeptSample:
    """A prompt and a response; the lists have a value per token of the response. None: unknown.

    - `step`: the step of training; for an evaluation the last one done, None for a model outside of a run
    - `problem`: the number of the row in the data, counted from 0
    - `benchmark`: of an evaluation, else empty
    - `response`: as it was graded
    - `reward`, `status`: the grader's, see `Score`, the reward as the algorithm shapes it; none where the
      grader failed
    - `truncated`: the response was cut at the length limit
    - `tokens`: their texts, special tokens included
    - `external`: demonstrated, not sampled
    - `logprob`, `entropy`: in nats, of the distribution that is sampled from, under the policy before the step's first
      update; an evaluation's logprobs are the engine's
    - `exploration_weight`: (1 - p)^gamma, of demonstrated tokens
    - `advantage`: as the loss has it
    - `answer`: the reference; empty in older files, as is `detail`
    - `detail`: the grader's reason, see `rlplus.train.reward.Score`; empty without one
    - `grade`: the grader's reward where the algorithm shaped it; None: as `reward`
    """

    step: int | None
    problem: int
    benchmark: str
    prompt: str
    response: str
    reward: float | None
    status: str
    truncated: bool
    tokens: list[str]
    external: list[bool]
    logprob: list[float]
    entropy: list[float] | None = None
    exploration_weight: list[float | None] | None = None
    advantage: list[float] | None = None
    answer: str = ""
    detail: str = ""
    grade: float | None = None

    @property
    def right(self) -> bool | None:
        """Whether the grader found it right; None where it did not grade it."""
        value = self.reward if self.grade is None else self.grade
        return None if value is None else value >= 1

    @property
    def graded(self) -> str:
        """The grader's verdict, right, wrong or no, and its reason."""
        verdict = {True: "right", False: "wrong", None: "no"}[self.right]
        return f"{verdict} ({self.detail})" if self.detail else verdict

    @property
    def row(self) -> str:
        """The place of the problem in the data, counted from 1 as in messages about the data."""
        return f"row {self.problem + 1:,} of the data"

    @property
    def demonstration(self) -> bool:
        """Whether the whole response was demonstrated."""
        return bool(self.external) and all(self.external)

    @property
    def facts(self) -> str:
        """Kind, reward, status and length of the sample, in one line."""
        parts = ["demonstration" if self.demonstration else "response"]
        parts.append("not graded" if self.reward is None else f"reward {self.reward:g}")
        parts += [self.status] if self.status != "ok" else []
        parts.append(f"{len(self.tokens)} tokens{', cut off' if self.truncated else ''}")
        return ", ".join(parts)

    @property
    def heading(self) -> str:
        """Its place in the run, and its facts."""
        place = [] if self.step is None else [f"step {self.step}"]
        place += [self.benchmark] if self.benchmark else []
        return ", ".join([*place, self.row, self.facts])


_NUMBERS = pa.list_(pa.float32())
_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "problem": pa.int64(),
        "benchmark": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "reward": pa.float64(),
        "status": pa.string(),
        "truncated": pa.bool_(),
        "tokens": pa.list_(pa.string()),
        "external": pa.list_(pa.bool_()),
        "logprob": _NUMBERS,
        "entropy": _NUMBERS,
        "exploration_weight": _NUMBERS,
        "advantage": _NUMBERS,
        "answer": pa.string(),
        "detail": pa.string(),
        "grade": pa.float64(),
    }
)
_NEW = ("answer", "detail", "grade")  # which older files lack


def write_kept(path: Path, samples: Iterable[KeptSample], facts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the samples and facts about them; the file has its name, and replaces an older one, when it is complete.

    Raises OSError that names the file.
    """
    schema = _SCHEMA.with_metadata(dict(facts) | {_CHECKSUM: UNSEALED})
    if not path.parent.exists():
        make_folder(path.parent)
    rows = (vars(sample) | {"detail": printable(sample.detail)} for sample in samples)  # may hold anything
    options = {"compression": "zstd", "write_page_checksum": True}  # ours checks the whole file
    with replacing(path, sealed=True) as file, pq.ParquetWriter(file, schema, **options) as writer:
        while some := list(islice(rows, _ROWS)):
            writer.write_table(pa.Table.from_pylist(some, schema))


def kept_facts(path: Path) -> dict[str, str]:
    """The facts that `write_kept` stored with the samples. ValueError for another file."""
    with _opened(path) as file:
        facts = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
        return {key: value for key, value in facts.items() if key != _CHECKSUM}


def read_kept(path: Path, most: int | None = None) -> list[KeptSample]:
    """The samples that `write_kept` wrote, or at most so many of the first ones. ValueError for another file."""
    return list(islice(iter_kept(path), most))


def iter_kept(path: Path) -> Iterator[KeptSample]:
    """The samples that `write_kept` wrote, one by one. ValueError for another file."""
    with _opened(path) as file:
        schema = file.schema_arrow
        lacking = [] if set(_NEW) & set(schema.names) else _NEW
        if not schema.equals(pa.schema([field for field in _SCHEMA if field.name not in lacking])):
            raise TypeError(f"the columns {', '.join(schema.names)[:200]}, in other types or with others than a run's")
        for batch in file.iter_batches(batch_size=_ROWS):
            yield from (KeptSample(**row) for row in batch.to_pylist())


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """The file, whose content is checked; ValueError for another or a damaged one. Files of 0.2.0 have no checksum."""
    try:
        content = path.read_bytes()
        sealed = is_sealed(content, path)
        with pq.ParquetFile(pa.BufferReader(content)) as file:
            if not sealed and _CHECKSUM.encode() in (file.schema_arrow.metadata or {}):
                raise TypeError("a damaged checksum")
            yield file
    except (pa.ArrowException, OSError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"want a file of kept samples in {path}; got {str(error).splitlines()[0]}") from error


def kept_steps(folder: Path) -> dict[Path, int]:
    """The files of a run's `samples/` that belong to a step, with that step, in their order."""
    found = {path: match for path in sorted(folder.glob("*.parquet")) if (match := _STEP.fullmatch(path.name))}
    return {path: int(match[1]) for path, match in found.items()}


def drop_kept(folder: Path, after: int) -> None:
    """Remove the files of later steps, which are done again, and those that a killed run did not finish."""
    for path in (path for path, step in kept_steps(folder).items() if step > after):
        path.unlink(missing_ok=True)
    remove_unfinished(folder, _STEP.pattern)
