"""The training loop. Everything it calls fits on a page each."""

from collections.abc import Callable
from pathlib import Path

from rlplus.config import Config
from rlplus.errors import RunFailed, SharedFailure
from rlplus.trainer.memory import OutOfMemory
from rlplus.trainer.run import Run
from rlplus.trainer.step import Step
from rlplus.trainer.stop import StepGivenUp

Evaluate = Callable[[Run], dict[str, float]]


def train(config: Config, *, resume: bool | str = False, evaluate: Evaluate | None = None) -> Path:
    """Train as `config` says; every rank calls it. Returns the output folder.

    output_dir/ receives config.yaml, run.json, metrics.jsonl, tensorboard/, samples/, checkpoints/ and, at the end,
    model/ (Hugging Face).
    resume: True: go on from the newest checkpoint; "auto": start where there is none; "step-000020": from that one, as
    if it were the newest. A run that is finished already is left as it is. evaluate: called on every rank every
    `evaluation.every` steps with the engine holding the step's new weights; its numbers, on all ranks the same, are
    logged.
    SIGINT, SIGTERM, SIGUSR1 and SIGHUP end it with a checkpoint, of the last step's end or of this one's; then it
    raises Interrupted, so that callers do not continue without a model. Raises ValueError for what is wrong with the
    configuration or the data, RunFailed when training or the engine fails.
    """
    with Run(config, resume) as run:
        if run.complete:
            return run.folder.path
        try:
            while not run.progress.finished:
                train_step(run, evaluate)
        except StepGivenUp as stop:
            run.give_up_step()
            run.progress.interrupted = stop.number
        except (RunFailed, OSError, ValueError) as failure:
            if isinstance(failure, SharedFailure) or (run.world == 1 and run.under_way):
                save_what_is_left(run, failure)
            raise
        run.conclude()  # raises Interrupted after a signal
        return run.folder.path


def save_what_is_left(run: Run, failure: Exception) -> None:
    """`Run.give_up_step`; where there is no room for it, RunFailed with both messages."""
    try:
        run.give_up_step()
    except (OSError, OutOfMemory) as second:
        raise RunFailed(f"{failure}. And no checkpoint could be written then: {second}") from failure


def train_step(run: Run, evaluate: Evaluate | None) -> None:
    """One step, on all ranks together; StepGivenUp when a signal comes before the first update.

    Each rank has prompts of its own. The engine first gets the weights that are about to be trained, and samples from
    exactly these. With train.overlap the batch is there already, sampled with weights one update older, and the engine
    starts on the next one, after a probe of its own.
    """
    step, recipe = Step(run), run.recipe
    batch = step.collect()  # prompts, rollouts and rewards, until the recipe has enough
    step.credit(batch)  # an advantage for each sample, or each token
    step.keep(batch)  # some samples, to be read
    work = [step.pack(update) for update in recipe.updates(batch)]
    step.remember(work)  # the logprobs of the policy before the first update, and of the reference
    for update, micro_batches in work:
        if micro_batches:  # else no sample of any rank has a gradient
            outputs = step.accumulate(update, micro_batches)
            recipe.saw(update, outputs, step.optimize(outputs))
    step.fit(batch)  # the models that the recipe trains beside the policy
    if evaluate is not None and run.progress.evaluation_due:
        step.evaluate(lambda: evaluate(run))
    step.end(batch)
    if run.progress.checkpoint_due:
        run.save_checkpoint()
