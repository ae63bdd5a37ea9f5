"""The training loop. Every function that it calls fits on a page."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlplus.common.errors import RunFailed, SharedFailure
from rlplus.train.config import Config
from rlplus.train.learner import has_gradient
from rlplus.train.trainer.progress import OutOfMemory, StepGivenUp
from rlplus.train.trainer.run import Run
from rlplus.train.trainer.run_parts import AlreadyFinished, open_run
from rlplus.train.trainer.step import Step

Evaluate = Callable[[Run], dict[str, float]]


def train(
    config: Config,
    *,
    resume: str | None = None,
    evaluate: Evaluate | None = None,
    validate: Evaluate | None = None,
) -> Path:
    """Train as `config` says; every rank calls it. Returns the output folder.

    output_dir/ receives config.yaml, run.json, metrics.jsonl, tensorboard/, samples/, checkpoints/ and, at the end,
    model/ (Hugging Face).
    resume: "newest": continue from the newest checkpoint; "auto": the same, or start if there is none; "step-000020":
    from that one, as if it were the newest. A finished run is left as it is. evaluate: called on every rank every
    `evaluation.every` steps with the engine holding the step's new weights; its numbers, the same on all ranks, are
    logged. validate: the same every `validation.every` steps; the checkpoint with the highest "reward" is kept.
    SIGINT, SIGTERM, SIGUSR1 and SIGHUP end it with a checkpoint of the last step or of the current one; then it raises
    Interrupted, so that callers do not continue without a model. Raises ValueError for an invalid configuration or
    invalid data, RunFailed when training or the engine fails.
    """
    with suppress(AlreadyFinished), open_run(config, resume) as run:
        try:
            while not run.progress.finished:
                train_step(run, evaluate, validate)
        except StepGivenUp as stop:
            run.give_up_step()
            run.progress.interrupted = stop.number
        except (RunFailed, OSError, ValueError) as failure:
            if isinstance(failure, SharedFailure) or (run.world == 1 and run.start.under_way):
                save_what_is_left(run, failure)
            raise
        run.conclude()  # raises Interrupted after a signal
    return Path(config.output_dir)


def save_what_is_left(run: Run, failure: Exception) -> None:
    """`Run.give_up_step`; if its checkpoint cannot be written, RunFailed with both messages."""
    try:
        run.give_up_step()
    except (OSError, OutOfMemory) as second:
        raise RunFailed(f"{failure}. And no checkpoint could be written then: {second}") from failure


def train_step(run: Run, evaluate: Evaluate | None = None, validate: Evaluate | None = None) -> None:
    """One step, on all ranks together; StepGivenUp when a signal comes before the first update.

    Each rank has different prompts. The engine first gets the weights that are about to be trained, and samples from
    exactly these. With train.overlap the batch exists already, sampled with weights at most so many steps older, and
    the engine continues with the next ones. With rollout.segment the first tokens of long responses are older, too.
    """
    step = Step(run)
    recipe = run.recipe
    batch = step.collect()  # prompts, rollouts and rewards, until the recipe has enough
    step.credit(batch)  # an advantage per sample or per token
    step.keep(batch)  # some samples, to be read
    work = [step.pack(update) for update in recipe.updates(batch)]
    step.remember(work)  # the logprobs of the policy before the first update, and of the reference
    for update, micro_batches in work:
        outputs = step.accumulate(update, micro_batches)
        if has_gradient(micro_batches):  # any rank's
            recipe.saw(update, outputs, step.optimize(update))
    step.fit(batch)  # the models that the recipe trains alongside the policy
    if evaluate is not None and run.progress.evaluation_due:
        step.evaluate("val", lambda: evaluate(run))
    if validate is not None and run.progress.validation_due:
        step.evaluate("validation", lambda: validate(run))
    step.end(batch)
    if run.progress.checkpoint_due:
        run.save_checkpoint()
