"""Evaluations and validations between the steps of a run, with its engine and its grader."""

import logging
from collections.abc import Mapping, Sequence

from rlplus.train.config import Config, EvaluationConfig
from rlplus.train.data import SAMPLES, Example, load_problems, load_tokenizer
from rlplus.train.evaluation.known import known_benchmarks, refusal
from rlplus.train.evaluation.partial_samples import KeptCalls, added
from rlplus.train.evaluation.results import Evaluation, file_part, join
from rlplus.train.evaluation.sample import Keep, evaluate_benchmarks
from rlplus.train.evaluation.scorers import Scorers
from rlplus.train.trainer.loop import Evaluate
from rlplus.train.trainer.run import Run

logger = logging.getLogger(__name__)


def evaluator(config: Config) -> Evaluate | None:
    """The function that `train` calls every `evaluation.every` steps: pass@k by benchmark, as <benchmark>/pass@<k>.

    Every rank has a share of the problems, so that none waits for another to do them all. None without
    `evaluation.every`. ValueError for problems that cannot be used: now, and not in the middle of a run.
    """
    if not config.evaluation.every:
        return None
    tokenizer = load_tokenizer(config.model)
    problems = load_problems(config.evaluation, tokenizer)

    def evaluate_run(run: Run) -> dict[str, float]:
        step = run.progress.step + 1  # which the weights are of
        start = run.folder.path / SAMPLES / f"step-{step:06d}"

        def keep(benchmark: str) -> KeptCalls:
            return KeptCalls(added(start, f"-{file_part(benchmark)}"), run.rank, tokenizer, None, step)

        return _passed(_evaluate(config, config.evaluation, run, problems, keep if config.log.samples_every else None))

    return evaluate_run


def validator(config: Config) -> Evaluate | None:
    """The function that `train` calls every `validation.every` steps: the mean reward, and pass@k by benchmark.

    As `evaluator`, on the problems of `validation`. ValueError also for a known test benchmark's.
    """
    if not config.validation.every:
        return None
    problems = load_problems(config.validation, load_tokenizer(config.model))
    if tests := known_benchmarks(config.validation, problems):
        if not config.validation.allow_test_benchmarks:
            raise ValueError(refusal(tests))
        logger.warning("the best checkpoint will be chosen by a test benchmark: %s", ", ".join(tests))

    def validate(run: Run) -> dict[str, float]:
        results = _evaluate(config, config.validation, run, problems, None)
        reward = join([*results.values()], seed=config.train.seed).mean_reward
        return _passed(results) if reward is None else {"reward": reward} | _passed(results)

    return validate


def _evaluate(
    config: Config, section: EvaluationConfig, run: Run, problems: Sequence[Example], keep: Keep | None
) -> dict[str, Evaluation]:
    """Results of the policy that a run trains, by benchmark. Collective."""
    with Scorers(config, section, run.scorer) as scorers:
        return evaluate_benchmarks(config, section, run.engine.ask, problems, scorers, run.decode, run.respond, keep)


def _passed(results: Mapping[str, Evaluation]) -> dict[str, float]:
    return {f"{name}/pass@{k}": one.pass_at(k).mean for name, one in results.items() for k in one.k}
