"""The training loop. Everything it calls fits on a page each."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlplus.config import Config
from rlplus.data import MicroBatch
from rlplus.errors import RunFailed, SharedFailure
from rlplus.learner import make_micro_batches
from rlplus.learner.statistics import needs_statistics, set_statistics
from rlplus.trainer.batch import score, set_advantages
from rlplus.trainer.memory import OutOfMemory
from rlplus.trainer.metrics import Tally, tally_mismatch, tally_samples, tally_update
from rlplus.trainer.rollouts import use_engine_logprob
from rlplus.trainer.run import Run
from rlplus.trainer.stop import StepGivenUp

Evaluate = Callable[[Run], dict[str, float]]


def train(config: Config, *, resume: bool | str = False, evaluate: Evaluate | None = None) -> Path:
    """Train as `config` says; every rank calls it. Returns the output folder.

    output_dir/ receives config.yaml, metrics.jsonl, tensorboard/, checkpoints/ and, at the end, model/ (Hugging Face).
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
            return run.folder
        try:
            while not run.finished:
                train_step(run, evaluate)
        except StepGivenUp as stop:
            run.give_up_step()
            run.interrupted = stop.number
        except (RunFailed, OSError, ValueError) as failure:
            if isinstance(failure, SharedFailure) or (run.world == 1 and run.under_way):
                save_what_is_left(run, failure)
            raise
        run.conclude()  # raises Interrupted after a signal
        return run.folder


def save_what_is_left(run: Run, failure: Exception) -> None:
    """`Run.give_up_step`; where there is no room for it, RunFailed with both messages."""
    try:
        run.give_up_step()
    except (OSError, OutOfMemory) as second:
        raise RunFailed(f"{failure}. And no checkpoint could be written then: {second}") from failure


def train_step(run: Run, evaluate: Evaluate | None) -> None:
    """Generate, score, weigh, update, log, save; StepGivenUp when a signal comes before the first update."""
    config, algorithm, overlap = run.config, run.algorithm, run.config.train.overlap
    tally = Tally()
    run.begin_step()

    # Groups: G rollouts a prompt, or G - 1 and a demonstration. Each rank has prompts of its own. The engine first gets
    # the weights that are about to be trained, and samples from exactly these. With train.overlap the batch is there
    # already, sampled with weights one update older, and the engine starts on the next one, after a probe of its own.
    examples, batch = run.rollouts.next(run.step, tally)
    samples = batch.samples
    with tally.time("score"):
        statuses = score(samples, examples, run.scorer, run.decode)
    tally_samples(tally, samples, statuses)
    samples = [sample for sample in samples if not sample.masked]
    set_advantages(samples, algorithm)

    # Mini-batches of whole groups, each one optimiser step.
    with tally.time("pack"):
        updates = [
            make_micro_batches(part, algorithm, config, run.pad_id, run.policy.device) for part in run.split(samples)
        ]
    tally.mean("actor/updated", sum(map(bool, updates)), len(updates))
    updates = [batches for batches in updates if batches]  # in the others no sample of any rank has a gradient
    with tally.time("old_logprob"):
        set_old_logprobs(run, updates, tally)
    with tally.time("update"):
        for i, batches in enumerate(updates):
            engine_logprobs = [micro.engine_logprob for micro in batches]
            if needs_statistics(algorithm, on_policy=not i and not overlap):
                with tally.time("statistics"):
                    statistics = [run.policy.statistics(micro) for micro in batches]
                    set_statistics(batches, statistics, algorithm, run.policy.group and run.policy.group.group)
            with tally.time("forward_backward"):
                outputs = run.policy.accumulate(batches, run.stop.check if run.can_redo else None)
            if run.can_redo and not overlap:  # the first update
                for engine_logprob, out in zip(engine_logprobs, outputs, strict=True):
                    tally_mismatch(tally, out.logprob, engine_logprob)
                run.check_mismatch(tally)  # no weight learns from samples of another policy
            run.can_redo, lr = False, run.policy.lr  # from here on the step cannot be given up and done again
            with tally.time("optimizer"):
                applied = run.policy.step()
            run.count_nonfinite(applied)
            tally_update(tally, outputs, run.policy.grad_norm, lr, applied)

    failure = None
    if evaluate is not None and run.evaluation_due:
        try:
            with tally.time("evaluate"):
                run.evaluate(evaluate, tally)
        except SharedFailure as error:  # costs the evaluation, not the step
            failure = error
    run.end_step(tally, batch)
    if failure is not None:
        raise failure
    if run.checkpoint_due:
        run.save_checkpoint()


def set_old_logprobs(run: Run, updates: Sequence[Sequence[MicroBatch]], tally: Tally) -> None:
    """The logprobs under the policy before the step's first update, and under the reference where there is one."""
    for i, micro in ((i, micro) for i, batches in enumerate(updates) for micro in batches):
        if run.config.train.overlap:  # the old policy is the one that sampled, which the trainer no longer has
            use_engine_logprob(micro)
        elif i:  # for the first update its own forward pass is the old policy
            micro.old_logprob = run.policy.logprob(micro)
            tally_mismatch(tally, micro.old_logprob, micro.engine_logprob)
        if run.algorithm.objective.kl_coef:
            micro.ref_logprob = run.policy.logprob(micro, reference=True)
