"""The data of a run as the model will see them: loaded, rendered and graded by the run's own code."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rlplus.common import agree
from rlplus.common.agree import initialize_distributed
from rlplus.tools.plan.likelihood import Likelihood, likelihood
from rlplus.train.config import Config
from rlplus.train.data import (
    Example,
    LoadReport,
    find_ends,
    load_tokenizer,
    read_examples,
    read_problems,
    response_text,
)
from rlplus.train.data.bare_answers import bare_answers
from rlplus.train.data.choices import hidden_choices
from rlplus.train.data.row_files import read_rows
from rlplus.train.evaluation.known import known_benchmarks, refusal
from rlplus.train.reward import RewardOrStatus, Scorer, unreadable_answers
from rlplus.train.trainer.run_parts import Prompts, select_prompts

SHOWN = 3
LOOKED_AT = 200  # rows whose other columns are read


@dataclass(frozen=True)
class Rendered:
    """A row, counted from 0, with its tokens as text, special ones too.

    verdict: the reward of the demonstration, or the status under which it is dropped; None where it is not graded.
    """

    row: int
    prompt: str
    prompt_tokens: int
    answer: str
    demonstration: str | None
    demonstration_tokens: int
    verdict: RewardOrStatus | None


@dataclass(frozen=True)
class Lengths:
    """Tokens of `count` texts, also of those that are dropped for being longer than `limit`."""

    count: int
    smallest: int
    median: int
    p95: int
    largest: int
    limit: int


@dataclass(frozen=True)
class DataPlan:
    """The data that a training reads.

    prompts: their number, from which it draws. summaries: counts of what was kept and dropped, by section or grading.
    lengths: by kind of text. refusals: reasons for which a run would not start. likelihood: None where not measured.
    """

    prompts: int
    summaries: tuple[str, ...]
    lengths: dict[str, Lengths]
    rendered: tuple[Rendered, ...]
    refusals: tuple[str, ...]
    likelihood: Likelihood | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_data(config: Config, *, logprob: bool = False) -> DataPlan:
    """Load all that a training reads, grade its demonstrations, and render some prompts.

    logprob: also load the model, and measure how likely it finds the demonstrations.

    ValueError where there is nothing to show: no tokenizer, a malformed row, a reward that cannot be set up.
    """
    initialize_distributed()
    agree.phase("data")
    tokenizer = load_tokenizer(config.model)
    ends = find_ends(config.model, tokenizer)
    recipe = config.algorithm.resolve().recipe
    loaded, report = read_examples(
        config.data,
        tokenizer,
        max_demonstration_length=config.max_demonstration_length,
        teacher_template=recipe.demonstration_prompt,
        shows_responses=recipe.shows_responses,
        topk=recipe.topk,
        ends=ends,
    )
    reports = {"data": report}
    reasons = [report.refusal(config.data)]
    for key, section in config.evaluations_read.items():
        sources = read_problems(section, tokenizer)
        reports |= {f"{key}.{source.source}": source.report for source in sources}
        reasons += [source.refusal for source in sources]
        problems = [example for source in sources for example in source.examples]
        tests = known_benchmarks(config.validation, problems) if key == "validation" else []
        if tests and not config.validation.allow_test_benchmarks:
            reasons.append(refusal(tests))
    refusals = [reason for reason in reasons if reason is not None]
    with Scorer(config.reward, config.data.columns) as scorer:
        decode = partial(response_text, tokenizer, prefix=config.data.response_prefix, ends=ends)
        prompts = select_prompts(config, loaded, scorer, decode)
    graded = [] if prompts.graded is None else [prompts.graded.summary()]
    graded += [*unreadable_answers(config.reward, loaded), *_column_problems(config)]
    return DataPlan(
        len(prompts.variants),
        (*(f"{key}: {report.summary()}" for key, report in reports.items()), *graded),
        dict(_lengths(reports)),
        tuple(_rendered(loaded, prompts, tokenizer)),
        (*refusals, *prompts.refusals(config)),
        likelihood(config, prompts.examples) if logprob else None,
    )


def _column_problems(config: Config) -> list[str]:
    """Choices that the prompts do not show, demonstrations that are bare answers: of rows with all their columns."""
    rows = [row for _, row in islice(read_rows(config.data.paths, None, None), LOOKED_AT)]
    data = config.data
    problems = [hidden_choices(rows, data.prompt, data.answer)]
    if data.demonstration is not None:
        problems.append(bare_answers(rows, data.demonstration, data.answer, data.answer_pattern))
    return [problem for problem in (*problems, data.note) if problem is not None]


def _lengths(reports: dict[str, LoadReport]) -> Iterator[tuple[str, Lengths]]:
    for key, report in reports.items():
        part = [word for word in key.split(".") if word != "data"]
        for name, lengths, limit in (
            ("prompts", report.prompt_lengths, report.max_prompt_length),
            ("demonstrations", report.demonstration_lengths, report.max_demonstration_length),
        ):
            if lengths:
                # Lengths that occur: the smallest ones that such a share of all does not exceed.
                smallest, median, p95, largest = np.quantile(lengths, [0, 0.5, 0.95, 1], method="inverted_cdf").tolist()
                yield " ".join([*part, name]), Lengths(len(lengths), smallest, median, p95, largest, limit)


def _rendered(examples: Sequence[Example], prompts: Prompts, tokenizer: Any) -> Iterator[Rendered]:
    """The first rows, those with a demonstration before others; the last is one that the reward refused, if any was."""
    demonstrated = [i for i, example in enumerate(examples) if example.demonstration is not None]
    verdicts = dict(zip(demonstrated, prompts.verdicts, strict=False))  # none where the algorithm takes none
    others = (i for i, example in enumerate(examples) if example.demonstration is None)
    chosen = [*demonstrated, *others][:SHOWN]
    refused = [i for i, verdict in verdicts.items() if isinstance(verdict, str)]
    if refused and not set(refused) & set(chosen):
        chosen[-1] = refused[0]
    for i in chosen:
        example = examples[i]
        demonstration = example.demonstration
        yield Rendered(
            example.index,
            tokenizer.decode(list(example.prompt)),
            len(example.prompt),
            example.answer,
            None if demonstration is None else tokenizer.decode(list(demonstration)),
            len(demonstration or ()),
            verdicts.get(i),
        )
