"""Sampling of every problem, grading and counting: between two steps of a run, or of a finished model."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlplus.common import agree
from rlplus.train.config import Config, EvaluationConfig, RolloutConfig, check_evaluation_files
from rlplus.train.data import SAMPLES, Example, ends_text, find_ends, load_problems, load_tokenizer, response_text
from rlplus.train.evaluation.asked import Asked, asked_of
from rlplus.train.evaluation.output_folder import check_folder, held, others_in
from rlplus.train.evaluation.partial_samples import Answer, Call, Graded, KeptCalls, added
from rlplus.train.evaluation.results import RESULTS, Evaluation, file_part, join
from rlplus.train.evaluation.scorers import Scorers, reward_of
from rlplus.train.learner import check_positions, existing_model, write_pretrained
from rlplus.train.reward import Score, Scorer, unreadable_answers
from rlplus.train.rollout import (
    ENGINES,
    Completion,
    Request,
    Respond,
    RolloutEngine,
    Sampling,
    make_engine,
    make_respond,
    respond,
)

LOOKED_AT = 20  # answers of a benchmark that the grader tries before anything is sampled
_COMPLETIONS_A_CALL = 4096  # bounds what is held as Python lists at a time
_TOKENS_A_CALL = 1 << 23  # a killed evaluation loses at most these: 1024 responses of 8192 tokens

Keep = Callable[[str], KeptCalls]  # the place for the samples of a benchmark, given its name

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
    kept: KeptCalls | None = None,
) -> Evaluation:
    """Sample every problem `samples` times for each of its rows, score, count.

    `examples` are `distinct`; `decode` gives the text to grade, without special tokens. respond: what asks the
    engine, and may give rewards. progress: called with the number of problems that are done, again and again. kept:
    stores samples as they come, and provides an interrupted evaluation's. Each call of the engine has a seed of its
    own: equal prompts never get equal samples.
    """
    sums = _Sums()
    counts = [samples * example.rows for example in examples]
    for start, stop in _calls(counts, max_tokens):
        if kept is None or (call := kept.read(start, stop)) is None:
            began = time.monotonic()
            sampling = Sampling(temperature, seed + start)
            completions = _completions(respond, engine, examples[start:stop], counts[start:stop], max_tokens, sampling)
            answers = _answers(examples[start:stop], completions, scorer, decode)
            call = Call(time.monotonic() - began, [_graded(answer) for answer in answers])
            if kept is not None:
                kept.write(start, stop, name, call.seconds, answers)
        sums.add(call, counts[start:stop])
        progress(len(sums.correct))
    total = sum(counts)
    graded = sum(sums.graded)
    if failed := total - graded:
        logger.warning("%s: the grader failed on %d of %d samples, which count for no problem", name, failed, total)
    return Evaluation(
        name=name,
        problems=tuple(example.index for example in examples),
        n=tuple(sums.graded),
        correct=tuple(sums.correct),
        k=tuple(k),
        temperature=temperature,
        seed=seed,
        mean_response_length=sums.tokens / total,
        truncated_share=sums.truncated / total,
        statuses=dict(sums.statuses),
        mean_reward=sums.reward / graded if graded else None,
        seconds=sums.seconds,
    )


@dataclass
class _Sums:
    """Counts of the samples so far. graded, correct: numbers of samples of each problem."""

    graded: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    truncated: int = 0
    reward: float = 0.0
    seconds: float = 0.0

    def add(self, call: Call, counts: Sequence[int]) -> None:
        """counts: the number of samples of each problem of this call."""
        self.seconds += call.seconds
        self.tokens += sum(sample.tokens for sample in call.samples)
        self.truncated += sum(sample.truncated for sample in call.samples)
        self.statuses.update(sample.status for sample in call.samples)
        values = iter([sample.reward for sample in call.samples])
        for count in counts:
            known = [value for value in islice(values, count) if not math.isnan(value)]
            self.graded.append(len(known))
            self.correct.append(sum(value >= 1 for value in known))
            self.reward += sum(known)


def _answers(
    examples: Sequence[Example],
    groups: Sequence[Sequence[Completion]],
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
) -> list[Answer]:
    """Each completion with its text and the reward that came with it, or the grader's."""
    pairs = [(e, c) for e, group in zip(examples, groups, strict=True) for c in group]
    shown = [decode(example.prompt) for example in examples]
    prompts = [prompt for prompt, group in zip(shown, groups, strict=True) for _ in group]
    texts = [decode(completion.tokens) for _, completion in pairs]
    ungraded = [place for place, (_, completion) in enumerate(pairs) if completion.reward is None]
    given = scorer(
        [texts[place] for place in ungraded],
        [pairs[place][0].answer for place in ungraded],
        [pairs[place][0].columns for place in ungraded],
        prompts=[prompts[place] for place in ungraded],
        cut=[pairs[place][1].truncated for place in ungraded],
    )
    scores = dict(zip(ungraded, given, strict=True))
    return [
        Answer(*pair, text, scores[place] if pair[1].reward is None else Score(pair[1].reward, "ok"))
        for place, (pair, text) in enumerate(zip(pairs, texts, strict=True))
    ]


def _graded(answer: Answer) -> Graded:
    score = answer.score
    completion = answer.completion
    return Graded(score.value, score.status, len(completion.tokens), completion.truncated)


def _completions(
    respond: Respond,
    engine: RolloutEngine,
    examples: Sequence[Example],
    n: list[int],
    max_tokens: int,
    sampling: Sampling,
) -> list[list[Completion]]:
    """The completions of each problem. ValueError unless the engine returned the requested number."""
    requests = [Request(example.prompt, count, max_tokens) for example, count in zip(examples, n, strict=True)]
    groups = respond(engine, examples, requests, sampling)
    if (got := [len(group) for group in groups]) != n:
        raise ValueError(f"want {n} samples of the problems; {engine.name} gave {got}")
    return groups


def _calls(counts: Sequence[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Slices [start, stop) of the problems: as many as fit into one call with their samples, and at least one."""
    most = min(_COMPLETIONS_A_CALL, _TOKENS_A_CALL // max_tokens)
    start = held = 0
    for i, count in enumerate(counts):
        if i > start and held + count > most:
            yield start, i
            start = i
            held = 0
        held += count
    yield start, len(counts)


def evaluate_model(
    config: Config,
    model: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    say: Callable[[str], None] = logger.info,
    chat_expected: bool = False,
    done: Callable[[dict[str, Evaluation]], None] = lambda results: None,
) -> dict[str, Evaluation]:
    """pass@k by benchmark on `evaluation`, of a Hugging Face folder or name (None: the run's result, output_dir/model).

    The same problems, samples and seed for every model. Each rank of a process group has a share of the problems, and
    all get the whole result. progress: called with the number of this rank's problems that are done, and their total.
    output: the folder for the results, whose samples/ keeps the samples; the same evaluation, started again, continues
    with them, and `say` is told. overwrite: remove results and samples of another evaluation in `output`.
    chat_expected: as in `load_problems`. done: called with the results before another evaluation may use `output`, to
    write them. ValueError without evaluation data or model, if prompt and response are too long for the model, if
    `output` has results or samples of another evaluation, and while another one writes there.
    """
    check_evaluation_files(config, model)
    if dist.is_initialized() and dist.get_world_size() > 1 and config.rollout.tensor_parallel_size > 1:
        raise ValueError("want one process for rollout.tensor_parallel_size > 1, which has its own; got several")
    with nullcontext() if output is None else held(output):
        results = _evaluate_model(config, model, progress, output, overwrite, say, chat_expected)
        done(results)
        return results


def _evaluate_model(
    config: Config,
    model: str | None,
    progress: Callable[[int, int], None],
    output: Path | None,
    overwrite: bool,
    say: Callable[[str], None],
    chat_expected: bool,
) -> dict[str, Evaluation]:
    """`evaluate_model` while no other evaluation writes into `output`."""
    path = Path(config.output_dir) / "model" if model is None else Path(model)
    rank, ranks = _rank_of()
    tokenizer = load_tokenizer(config.model, str(path))
    ends = find_ends(config.model, tokenizer, str(path))
    first = rank == 0
    problems = load_problems(
        config.evaluation, tokenizer, chat_expected=chat_expected and first, ends=ends if first else None
    )
    benchmarks = _by_benchmark(config.evaluation, problems)
    further = () if ends == (tokenizer.eos_token_id,) else ends
    asked = {name: asked_of(config, path, name, each, ranks, further) for name, each in benchmarks.items()}
    keep = None if output is None else _keep_in(output, asked, tokenizer, len(problems), overwrite, say, rank, ranks)
    model_config = existing_model(str(path), config.model.trust_remote_code, config.model.overrides)
    check_positions(config, model_config, trains=False)
    own = sum(len(examples[rank::ranks]) for examples in benchmarks.values())
    if first:
        say(f"responses end in {ends_text(tokenizer, ends)}")
        for name, examples in benchmarks.items():
            for line in unreadable_answers(reward_of(config.reward, config.evaluation, name), examples, LOOKED_AT):
                say(f"{name}: {line}")
    progress(0, own)
    respond = make_respond(config.rollout.function, tokenizer, model_config.vocab_size, config.rollout.environment)
    with TemporaryDirectory() as folder, Scorers(config, config.evaluation) as scorers:
        write_pretrained(model_config, folder)
        engine = make_engine(
            _alone(config.rollout),
            str(path),
            dtype=config.model.dtype,
            max_model_len=config.max_evaluation_length,
            end_ids=ends,
            pad_token_id=tokenizer.pad_token_id,
            seed=config.train.seed,
            trust_remote_code=config.model.trust_remote_code,
            config_path=folder,
        )
        try:
            decode = partial(response_text, tokenizer, prefix=config.data.response_prefix, ends=ends)
            results = evaluate_benchmarks(
                config,
                config.evaluation,
                lambda ask: ask(engine),
                problems,
                scorers,
                decode,
                respond,
                keep,
                progress=lambda done: progress(done, own),
            )
            return {name: replace(one, model=asked[name]["model"], asked=asked[name]) for name, one in results.items()}
        finally:
            engine.close()


def _alone(config: RolloutConfig) -> RolloutConfig:
    """The engine where nothing trains beside it: in this process, awake, sampling from the whole vocabulary."""
    changes = {"mode": "colocated", "server_url": None, "sleep": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    changes |= {"routing_replay": False, "lora": "merged"}  # nothing is recorded for a trainer or pushed
    if config.engine not in ENGINES:  # the one of a server, or auto already
        changes |= {"engine": "auto", "weights_folder": None}
    return config.model_copy(update=changes)


def _keep_in(
    output: Path,
    asked: Mapping[str, Asked],
    tokenizer: PreTrainedTokenizerBase,
    problems: int,
    overwrite: bool,
    say: Callable[[str], None],
    rank: int,
    ranks: int,
) -> Keep:
    """The place to keep samples, without damaged files and, with `overwrite`, other evaluations'. Collective.

    ValueError if there are any of others, without `overwrite`.
    """
    if not overwrite:
        check_folder(output, asked)
    start = output / SAMPLES / RESULTS
    kept = {name: KeptCalls(added(start, f"-{file_part(name)}"), rank, tokenizer, asked[name]) for name in asked}
    if rank == 0:
        for path in others_in(output, asked) if overwrite else ():
            path.unlink(missing_ok=True)
        for calls in kept.values():
            calls.remove_damaged()
        if before := sum(calls.problems() for calls in kept.values()):
            say(f"{before} of {problems} problems from the samples kept in {output / SAMPLES}")
    if ranks > 1:
        agree.barrier()  # a file may not vanish while another rank reads it, or be one it has just written
    return kept.__getitem__


def _by_benchmark(section: EvaluationConfig, problems: Sequence[Example]) -> dict[str, list[Example]]:
    """Without a column that names it, the files' names together are one."""
    assert section.data is not None
    files = "+".join(Path(path).stem for path in section.data.paths)
    benchmarks: dict[str, list[Example]] = {}
    for problem in problems:
        benchmarks.setdefault(problem.benchmark or files, []).append(problem)
    return benchmarks


def evaluate_benchmarks(
    config: Config,
    section: EvaluationConfig,
    ask: Callable[[Callable[[RolloutEngine], Evaluation | None]], Evaluation | None],
    problems: Sequence[Example],
    scorers: Scorers,
    decode: Callable[[Sequence[int]], str],
    respond: Respond,
    keep: Keep | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Evaluation]:
    """`evaluate` by benchmark. Collective: each rank has a share of the problems.

    section: `evaluation` or `validation`. ask: calls a function with the engine and returns its answer.
    """
    rank, ranks = _rank_of()
    results = {}
    before = 0
    for name, examples in _by_benchmark(section, problems).items():
        own = examples[rank::ranks]
        question = partial(
            _sampled,
            scorers=scorers,
            examples=own,
            decode=decode,
            samples=section.samples,
            k=section.k,
            temperature=section.temperature,
            max_tokens=config.rollout.max_response_length,
            seed=config.train.seed + rank * len(examples),  # equal prompts on two ranks must not get equal samples
            name=name,
            respond=respond,
            progress=partial(_advance, progress, before),
            kept=keep and keep(name),
        )
        before += len(own)
        share = ask(question if own else lambda _: None)
        shares = agree.gathered(share) if ranks > 1 else [share]
        whole = join([share for share in shares if share is not None], seed=config.train.seed)
        note = scorers.of(name).note if own else ""
        grader = reward_of(config.reward, section, name).description
        results[name] = replace(whole, grader=grader + (f" ({note})" if note else ""))
    return results


def _rank_of() -> tuple[int, int]:
    """This process's rank and the number of ranks; alone without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _sampled(engine: RolloutEngine, scorers: Scorers, name: str, **options: Any) -> Evaluation:
    return evaluate(engine, scorers.of(name), name=name, **options)


def _advance(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)
