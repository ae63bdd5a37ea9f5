"""Sampling of every problem, grading and counting: between two steps of a run, or of a finished model."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlplus import agree
from rlplus.config import Config, check_evaluation_files
from rlplus.data import SAMPLES, Example, distinct, load_examples, load_tokenizer, response_text
from rlplus.evaluation.keep import KeptFiles
from rlplus.evaluation.known import known_benchmarks, refusal
from rlplus.evaluation.results import Evaluation, join
from rlplus.learner import prepare_model
from rlplus.reward import Score, Scorer
from rlplus.rollout import Completion, Respond, RolloutEngine, make_engine, make_respond, respond
from rlplus.trainer import Evaluate, Run

_COMPLETIONS_A_CALL = 4096  # bounds what is held as Python lists at a time

Keep = Callable[[Sequence[Example], Sequence[int], Sequence[Completion], Sequence[Score]], None]

logger = logging.getLogger(__name__)


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
    respond: Respond = respond,
    keep: Keep = lambda examples, n, completions, scores: None,
) -> Evaluation:
    """Sample every problem `samples` times for each of its rows, score, count.

    `examples` are `distinct`; `decode` gives the text to grade, without special tokens. respond: what asks the
    engine, and may give rewards. progress: called with the number of problems that are done, again and again. keep:
    called with some problems at a time, how many samples each has, these samples, and their scores. ValueError without
    problems, or if a k is not in 1..samples.
    """
    if not examples:
        raise ValueError("want at least one problem to evaluate on, got none")
    if not k or min(k) < 1 or max(k) > samples:
        raise ValueError(f"want every k in 1..samples={samples}, got k={list(k)}")
    graded: list[int] = []
    correct: list[int] = []
    reward = 0.0
    statuses: Counter[str] = Counter()
    tokens = truncated = 0
    counts = [samples * example.rows for example in examples]
    for start, stop in _calls(counts):
        part, n = examples[start:stop], counts[start:stop]
        # Equal prompts in different calls must not get equal samples.
        options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed + start}
        completions = _completions(respond, engine, part, n, options)
        tokens += sum(len(completion.tokens) for completion in completions)
        truncated += sum(completion.truncated for completion in completions)
        answers = [example.answer for example, count in zip(part, n, strict=True) for _ in range(count)]
        scores = _scores(scorer, completions, answers, decode)
        keep(part, n, completions, scores)
        statuses.update(score.status for score in scores)
        values = iter([score.value for score in scores])
        for count in n:
            known = [value for value in islice(values, count) if not math.isnan(value)]
            graded.append(len(known))
            correct.append(sum(value >= 1 for value in known))
            reward += sum(known)
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
        mean_reward=reward / sum(graded) if sum(graded) else None,
    )


def _scores(
    scorer: Scorer, completions: Sequence[Completion], answers: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> list[Score]:
    """The score of each completion: the reward that came with it, or the grader's."""
    ungraded = [i for i, completion in enumerate(completions) if completion.reward is None]
    scores = {i: Score(c.reward, "ok") for i, c in enumerate(completions) if c.reward is not None}
    given = scorer([decode(completions[i].tokens) for i in ungraded], [answers[i] for i in ungraded])
    scores |= zip(ungraded, given, strict=True)
    return [scores[i] for i in range(len(completions))]


def _completions(
    respond: Respond, engine: RolloutEngine, examples: Sequence[Example], n: list[int], options: dict[str, Any]
) -> list[Completion]:
    """The completions of all problems, in order. ValueError unless the engine returned the requested number."""
    groups = respond(engine, examples, n, **options)
    if (got := [len(group) for group in groups]) != n:
        raise ValueError(f"want {n} samples of the problems; {engine.name} gave {got}")
    return [completion for group in groups for completion in group]


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
    """The function that `train` calls every `evaluation.every` steps: pass@k by benchmark, as <benchmark>/pass@<k>.

    Every rank has a share of the problems, so that none waits for another to do them all. None without
    `evaluation.every`. ValueError for problems that cannot be used: now, and not in the middle of a run.
    """
    if not config.evaluation.every:
        return None
    tokenizer = load_tokenizer(config.model)
    problems = _problems(config, tokenizer)

    def evaluate_run(run: Run) -> dict[str, float]:
        step = run.progress.step + 1  # which the weights are of
        kept = KeptFiles(run.folder.path / SAMPLES / f"step-{step:06d}", tokenizer, run.decode, step)
        results = _evaluate(
            config,
            run.engine.ask,
            run.scorer,
            problems,
            run.decode,
            run.respond,
            kept if config.log.samples_every else None,
            run.rank,
            run.world,
        )
        return {f"{name}/pass@{k}": one.pass_at(k).mean for name, one in results.items() for k in one.k}

    return evaluate_run


def validator(config: Config) -> Evaluate | None:
    """The function that `train` calls every `validation.every` steps: the mean reward, and pass@k by benchmark.

    As `evaluator`, on the problems of `validation`. ValueError also for those of a known test benchmark.
    """
    if not config.validation.every:
        return None
    config = config.model_copy(update={"evaluation": config.validation})
    problems = _problems(config, load_tokenizer(config.model))
    if tests := known_benchmarks(config.validation, problems):
        if not config.validation.allow_test_benchmarks:
            raise ValueError(refusal(tests))
        logger.warning("the best checkpoint will be chosen by a test benchmark: %s", ", ".join(tests))

    def validate(run: Run) -> dict[str, float]:
        ask, rank, ranks = run.engine.ask, run.rank, run.world
        results = _evaluate(config, ask, run.scorer, problems, run.decode, run.respond, None, rank, ranks)
        reward = join([*results.values()], seed=config.train.seed).mean_reward
        passed = {f"{name}/pass@{k}": one.pass_at(k).mean for name, one in results.items() for k in one.k}
        return passed if reward is None else {"reward": reward} | passed

    return validate


def evaluate_model(
    config: Config,
    model: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    samples: Path | None = None,
) -> dict[str, Evaluation]:
    """pass@k by benchmark on `evaluation.data`, of a Hugging Face folder (None: the run's result, output_dir/model).

    The same problems, samples and seed for every model. progress: called with how many problems are done, and of how
    many. samples: what the names of the files start with that keep the samples, which -<benchmark>-0.parquet follows;
    older ones are removed. None: none are kept. ValueError without evaluation data or model.
    """
    check_evaluation_files(config, model)
    path = Path(config.output_dir) / "model" if model is None else Path(model)
    settings = config.model.model_copy(update={"path": str(path), "scratch": None})
    tokenizer = load_tokenizer(settings)
    problems = _problems(config, tokenizer)
    progress(0, len(problems))
    _, model_config = prepare_model(settings, path, config.train.seed)
    respond = make_respond(config.rollout.function, tokenizer, model_config.vocab_size)
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
            for old in samples.parent.glob(f"{escape(samples.name)}-*.parquet") if samples is not None else ():
                old.unlink()
            return _evaluate(
                config,
                lambda ask: ask(engine),
                scorer,
                problems,
                decode,
                respond,
                None if samples is None else KeptFiles(samples, tokenizer, decode),
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
    respond: Respond,
    kept: KeptFiles | None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Evaluation]:
    """Results by benchmark; without a column that names it, the files' names together are one. Collective."""
    settings = config.evaluation
    assert settings.data is not None
    files = "+".join(Path(path).stem for path in settings.data.paths)
    benchmarks: dict[str, list[Example]] = {}
    for problem in problems:
        benchmarks.setdefault(problem.benchmark or files, []).append(problem)
    results, before = {}, 0
    for number, (name, examples) in enumerate(benchmarks.items()):
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
            respond=respond,
            progress=partial(_advance, progress, before),
        )
        if kept is not None:
            question = partial(kept.answer, question, name, f"-{number}-{rank}.parquet")
        before += len(own)
        part = ask(question if own else lambda _: None)
        parts = agree.gathered(part) if ranks > 1 else [part]
        results[name] = join([part for part in parts if part is not None], seed=config.train.seed)
    return results


def _advance(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)
