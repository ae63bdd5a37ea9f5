"""pass@k: sampling, the unbiased estimate, and what can be said about it (bootstrap over seeds and problems)."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.config import Config, check_evaluation_files
from rlplus.data import Example, distinct, load_examples, load_tokenizer, response_text
from rlplus.reward import Scorer
from rlplus.rollout import RolloutEngine, make_engine
from rlplus.textfiles import read_text, write_text
from rlplus.trainer import Evaluate, Run, prepare_model

_COMPLETIONS_A_CALL = 4096  # bounds what is held as Python lists at a time
_REPLICATES = 2000
_TAIL = 0.025  # of a 95% interval, at either end
_INDICES_AT_ONCE = 1 << 22  # bootstrap indices held at a time (32 MB)

logger = logging.getLogger(__name__)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated without bias from c right ones among n.

    1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, eq. 1), in integers and therefore exact until the one
    division. ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"want 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


@dataclass(frozen=True)
class Estimate:
    """A mean with the limits of its 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Evaluation:
    """Counts of one model on one set of problems; `problems`, `n` and `correct` are aligned.

    `problems`: the number of each problem's first row. `n`: graded samples of each, `correct`: those with reward >= 1.
    A sample on which the grader failed is in `statuses` only, unless reward.on_failure is "zero". `k`: the values asked
    for, at most the samples that were drawn of each problem. `mean_response_length` in tokens, the end token included.
    `truncated_share`: samples that met `max_tokens` without an end. `statuses`: number of scores by status (see
    rlplus.reward.Score).
    """

    name: str
    problems: tuple[int, ...]
    n: tuple[int, ...]
    correct: tuple[int, ...]
    k: tuple[int, ...]
    temperature: float
    seed: int
    mean_response_length: float
    truncated_share: float
    statuses: dict[str, int]

    def __post_init__(self) -> None:
        if not self.problems or not len(self.problems) == len(self.n) == len(self.correct):
            lengths = (len(self.problems), len(self.n), len(self.correct))
            raise ValueError(f"want problems, n and correct of one length above 0, got lengths {lengths}")

    def pass_at(self, k: int) -> Estimate:
        """Mean pass@k over the problems, with a bootstrap interval over the problems."""
        return pooled_pass_at([self], k)

    def values(self, k: int) -> Tensor:
        """pass@k of every problem, (problems,) float64; ValueError if k is above `largest_k`.

        Where failures of the grader left fewer than k graded samples, the missing ones count as wrong.
        """
        if k > self.largest_k:
            raise ValueError(f"want k <= {self.largest_k}, the samples per problem; got k={k}")
        counts = zip(self.n, self.correct, strict=True)
        return torch.tensor([pass_at_k(max(n, k), c, k) for n, c in counts], dtype=torch.float64)

    @property
    def largest_k(self) -> int:
        """Every problem had at least as many samples, graded or not."""
        return max(min(self.n), *self.k)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. ValueError if the file holds something else."""
        try:
            content = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        wanted = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or set(content) != wanted:
            got = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"want an evaluation with the fields {sorted(wanted)} in {path}, got {got}")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items()}
        return cls(**values)


def evaluate(
    engine: RolloutEngine,
    scorer: Scorer,
    examples: Sequence[Example],
    decode: Callable[[Sequence[int]], str],
    *,
    samples: int,
    k: Sequence[int],
    temperature: float,
    max_tokens: int,
    seed: int,
    name: str = "",
    progress: Callable[[int], None] = lambda solved: None,
) -> Evaluation:
    """Sample every problem `samples` times for each of its rows, score, count.

    `examples` are `distinct`; `decode` gives the text to grade, without special tokens. progress: called with the
    number of problems that are done, again and again. ValueError without problems, or if a k is not in 1..samples.
    """
    if not examples:
        raise ValueError("want at least one problem to evaluate on, got none")
    if not k or min(k) < 1 or max(k) > samples:
        raise ValueError(f"want every k in 1..samples={samples}, got k={list(k)}")
    graded: list[int] = []
    correct: list[int] = []
    statuses: Counter[str] = Counter()
    tokens = truncated = 0
    counts = [samples * example.rows for example in examples]
    for start, stop in _calls(counts):
        part, n = examples[start:stop], counts[start:stop]
        groups = engine.generate(
            [example.prompt for example in part],
            n,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed + start,  # equal prompts in different calls must not get equal samples
        )
        if (got := [len(group) for group in groups]) != n:
            raise ValueError(f"want {n} samples of the problems; {engine.name} gave {got}")
        completions = [completion for group in groups for completion in group]
        tokens += sum(len(completion.tokens) for completion in completions)
        truncated += sum(completion.truncated for completion in completions)
        texts = [decode(completion.tokens) for completion in completions]
        scores = scorer(texts, [example.answer for example, count in zip(part, n, strict=True) for _ in range(count)])
        statuses.update(score.status for score in scores)
        values = iter([score.value for score in scores])
        for count in n:
            known = [value for value in islice(values, count) if not math.isnan(value)]
            graded.append(len(known))
            correct.append(sum(value >= 1 for value in known))
        progress(len(correct))
    total = sum(counts)
    if failed := total - sum(graded):
        logger.warning("%s: the grader failed on %d of %d samples, which count for no problem", name, failed, total)
    return Evaluation(
        name=name,
        problems=tuple(example.index for example in examples),
        n=tuple(graded),
        correct=tuple(correct),
        k=tuple(k),
        temperature=temperature,
        seed=seed,
        mean_response_length=tokens / total,
        truncated_share=truncated / total,
        statuses=dict(statuses),
    )


def _calls(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slices [start, stop) of the problems with at most _COMPLETIONS_A_CALL samples together, or one problem."""
    start = held = 0
    for i, count in enumerate(counts):
        if i > start and held + count > _COMPLETIONS_A_CALL:
            yield start, i
            start, held = i, 0
        held += count
    yield start, len(counts)


def evaluator(config: Config) -> Evaluate | None:
    """What `train` calls every `evaluation.every` steps: pass@k on the evaluation data, as <benchmark>/pass@<k>.

    Every rank has a share of the problems, so that none waits for another to do them all.
    """
    if not config.evaluation.every:
        return None
    problems: list[Example] = []

    def evaluate_run(run: Run) -> dict[str, float]:
        if not problems:
            problems.extend(_problems(config, run.tokenizer))
        results = _evaluate(config, run.engine.ask, run.scorer, problems, run.decode, run.rank, run.world)
        return {f"{name}/pass@{k}": one.pass_at(k).mean for name, one in results.items() for k in one.k}

    return evaluate_run


def evaluate_model(
    config: Config, model: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Evaluation]:
    """pass@k by benchmark on `evaluation.data`, of a Hugging Face folder (None: the run's result, output_dir/model).

    The same problems, samples and seed for every model. progress: called with how many problems are done, and of how
    many. ValueError without evaluation data or model.
    """
    check_evaluation_files(config, model)
    path = Path(config.output_dir) / "model" if model is None else Path(model)
    settings = config.model.model_copy(update={"path": str(path), "scratch": None})
    tokenizer = load_tokenizer(settings)
    problems = _problems(config, tokenizer)
    progress(0, len(problems))
    _, model_config = prepare_model(settings, path, config.train.seed)
    with TemporaryDirectory() as folder, Scorer(config.reward) as scorer:
        model_config.save_pretrained(folder)
        # Nothing trains beside it, so it is always in this process and awake.
        alone = {"mode": "colocated", "server_url": None, "sleep": False}
        engine = make_engine(
            config.rollout.model_copy(update=alone),
            str(path),
            dtype=config.model.dtype,
            max_model_len=config.max_generation_length,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            seed=config.train.seed,
            trust_remote_code=config.model.trust_remote_code,
            config_path=folder,
        )
        try:
            decode = partial(response_text, tokenizer, prefix=config.data.response_prefix)
            return _evaluate(
                config,
                lambda ask: ask(engine),
                scorer,
                problems,
                decode,
                progress=lambda done: progress(done, len(problems)),
            )
        finally:
            engine.close()


def _problems(config: Config, tokenizer: Any) -> list[Example]:
    data = config.evaluation.data
    assert data is not None
    return distinct(load_examples(data, tokenizer, max_demonstration_length=config.max_demonstration_length)[0])


def _evaluate(
    config: Config,
    ask: Callable[[Callable[[RolloutEngine], Evaluation | None]], Evaluation | None],
    scorer: Scorer,
    problems: Sequence[Example],
    decode: Callable[[Sequence[int]], str],
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Evaluation]:
    """By benchmark; without a column that names it, the files' names together are one. All ranks call it together."""
    settings = config.evaluation
    assert settings.data is not None
    files = "+".join(Path(path).stem for path in settings.data.paths)
    benchmarks: dict[str, list[Example]] = {}
    for problem in problems:
        benchmarks.setdefault(problem.benchmark or files, []).append(problem)
    results, before = {}, 0
    for name, examples in benchmarks.items():
        own = examples[rank::ranks]
        question = partial(
            evaluate,
            scorer=scorer,
            examples=own,
            decode=decode,
            samples=settings.samples,
            k=settings.k,
            temperature=settings.temperature,
            max_tokens=config.rollout.max_response_length,
            seed=config.train.seed + rank * len(examples),  # equal prompts on two ranks must not get equal samples
            name=name,
            progress=partial(_advance, progress, before),
        )
        before += len(own)
        part = ask(question if own else lambda _: None)
        parts: list[Evaluation | None] = [part]
        if ranks > 1:
            parts = [None] * ranks
            dist.all_gather_object(parts, part)
        results[name] = join([part for part in parts if part is not None], seed=config.train.seed)
    return results


def _advance(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def join(parts: Sequence[Evaluation], seed: int) -> Evaluation:
    """One evaluation of all the problems of `parts`, which differ in nothing else, in the problems' order."""
    rows = sorted(row for part in parts for row in zip(part.problems, part.n, part.correct, strict=True))
    samples = [sum(part.statuses.values()) for part in parts]  # not n: those that could not be graded have a length

    def mean(values: Sequence[float]) -> float:
        return sum(value * count for value, count in zip(values, samples, strict=True)) / sum(samples)

    return replace(
        parts[0],
        problems=tuple(problem for problem, _, _ in rows),
        n=tuple(n for _, n, _ in rows),
        correct=tuple(correct for _, _, correct in rows),
        seed=seed,
        mean_response_length=mean([part.mean_response_length for part in parts]),
        truncated_share=mean([part.truncated_share for part in parts]),
        statuses=dict(sum((Counter(part.statuses) for part in parts), Counter())),
    )


def pooled_pass_at(evaluations: Sequence[Evaluation], k: int) -> Estimate:
    """Mean pass@k over seeds (each weighs the same), with a bootstrap over seeds and, within each, problems.

    One evaluation a seed. Few seeds say little about the spread over seeds: in simulations where it was about twice the
    standard error over problems, 95% intervals covered the truth in 78% of trials with 2 seeds, 82% with 3, 93% with 5.
    """
    return _bootstrap([evaluation.values(k) for evaluation in evaluations])


def paired_difference(first: Sequence[Evaluation], second: Sequence[Evaluation], k: int) -> Estimate:
    """pass@k of `second` minus that of `first`, seed by seed on the same problems; interval as in `pooled_pass_at`."""
    return _bootstrap([other.values(k) - one.values(k) for one, other in _pairs(first, second)], least=-1.0)


def seeds_below(first: Sequence[Evaluation], second: Sequence[Evaluation], k: int) -> int:
    """Number of seeds on which the mean pass@k of `second` is below that of `first`, on the same problems."""

    def total(one: Evaluation) -> float:
        return math.fsum(one.values(k).tolist())  # exact: ties in another order are ties

    return sum(total(other) < total(one) for one, other in _pairs(first, second))


def _pairs(first: Sequence[Evaluation], second: Sequence[Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    """Seed by seed. ValueError unless there are as many on both sides, on the same problems."""
    if len(first) != len(second):
        raise ValueError(f"want as many evaluations on both sides, got {len(first)} and {len(second)}")
    pairs = list(zip(first, second, strict=True))
    for one, other in pairs:
        if one.problems != other.problems:
            raise ValueError(f"want the same problems on both sides, got others for {one.name!r} and {other.name!r}")
    return pairs


def _bootstrap(seeds: Sequence[Tensor], least: float = 0.0) -> Estimate:
    """95% interval of the mean over seeds of the means over problems; each value is in [least, 1].

    Percentiles over resampled seeds and, within each, resampled problems. Where all problems are solved, or none is (or
    no difference is seen), resampling shows no spread. The interval is then exact (Clopper and Pearson 1934): n of n
    problems are like these, so at least a share of 0.025^(1/n) of all are, and the others can be anything in
    [least, 1]. n is the number of problems of one seed, since further seeds add no problems.
    """
    if not seeds:
        raise ValueError("want at least one evaluation, got none")
    value = seeds[0][0].item()
    if value in (-1, 0, 1) and all((values == value).all() for values in seeds):
        unlike = 1 - _TAIL ** (1 / min(map(len, seeds)))
        return Estimate(value, value - unlike * (value - least), value + unlike * (1 - value))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(seeds), (_REPLICATES, len(seeds)), generator=generator)
    means = torch.empty(_REPLICATES, len(seeds), dtype=torch.float64)
    for seed, values in enumerate(seeds):
        places = (chosen == seed).nonzero()
        for part in places.split(max(1, _INDICES_AT_ONCE // len(values))):
            problems = torch.randint(len(values), (len(part), len(values)), generator=generator)
            means[part[:, 0], part[:, 1]] = values[problems].mean(1)
    low, high = means.mean(1).quantile(torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist()
    mean = torch.stack([values.mean() for values in seeds]).mean().item()
    return Estimate(mean, min(low, mean), max(mean, high))  # rounding may put a limit an ulp beyond the mean
