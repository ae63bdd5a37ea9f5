"""The training loop, and the phases of a step in the order in which `train_step` takes them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from rlplus.common import activity, agree
from rlplus.common.errors import RunFailed, SharedFailure
from rlplus.loss import PolicyLoss
from rlplus.train.algorithm import Refill
from rlplus.train.algorithm.external_schedule import external_share
from rlplus.train.config import Config
from rlplus.train.data import Example, KeptSample, MicroBatch, Sample, per_token
from rlplus.train.learner import by_sample, has_gradient, make_micro_batches
from rlplus.train.learner.batch import needs_statistics, set_statistics
from rlplus.train.recipe import Batch, Update, refill_batch
from rlplus.train.reward import score, shape
from rlplus.train.trainer.engine import Compared
from rlplus.train.trainer.metrics import (
    Tally,
    tally_demonstrated,
    tally_mismatch,
    tally_outputs,
    tally_samples,
    tally_update,
)
from rlplus.train.trainer.progress import OutOfMemory, StepGivenUp
from rlplus.train.trainer.run import Run
from rlplus.train.trainer.run_parts import AlreadyFinished, open_run
from rlplus.train.trainer.sample_records import kept_samples

Evaluate = Callable[[Run], dict[str, float]]
Work = tuple[Update, list[MicroBatch]]


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


class Step:
    """One step of a run, with its metrics in `tally`. Every rank calls each method."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.tally = Tally()
        self.generated = 0  # tokens, on this rank
        self.updated = False  # the policy
        self.failure: SharedFailure | None = None  # an evaluation's
        self.ungraded: list[tuple[Example, Sample]] = []  # the grader failed on them
        self._compared: list[Compared] = []  # all updates' micro-batches, before statistics replace engine_logprob
        self.kept: list[KeptSample] | None = None
        run.start.take()
        run.rollouts.begin(self.tally)

    def collect(self) -> Batch:
        """The recipe's batch, refilled and with shaped rewards if the algorithm does that.

        Afterwards the engine sleeps, if it does so while the policy trains.
        """
        recipe = self.run.recipe
        options = recipe.algorithm.refill
        batch = recipe.collect(self._draw if options is None else partial(self._refill, options))
        if recipe.algorithm.shaping is not None:
            shape(batch.samples, recipe.algorithm.shaping, self.config.rollout.max_response_length)
            rewards = [sample.reward for sample in batch.samples if not sample.demonstration]
            self.tally.mean("reward/shaped", sum(rewards), len(rewards))
        with self.tally.time("generate"):
            self.run.engine.sleep()
        return batch

    def _draw(self) -> Batch:
        """The next prompts with their samples and rewards, without the samples that the grader failed on.

        Groups that the recipe wants sampled again are replaced.
        """
        run = self.run
        tally = self.tally
        batch = self._score(run.rollouts.draw(run.progress.step, tally))
        tries = 0
        while agree.largest(bool(asks := run.recipe.again(batch, tries))):
            tries += 1
            new = self._score(run.rollouts.again(batch, asks, tries, run.progress.step, tally))
            samples = [sample for sample in batch.samples if sample.group not in asks] + new.samples
            samples.sort(key=lambda sample: sample.group)
            batch = replace(batch, samples=samples, seconds=batch.seconds + new.seconds)
        # Copies: shaping changes them, and an abandoned step goes back to the samples as drawn.
        batch.samples = [replace(sample) for sample in batch.samples if not sample.masked]
        return batch

    def _score(self, batch: Batch) -> Batch:
        """The batch with its samples' rewards set. Metrics are of all samples, those too that are replaced later."""
        with self.tally.time("score"):
            score(batch.samples, batch.examples, self.run.scorer, self.run.decode)
        tally_samples(self.tally, batch.samples)
        self.ungraded += [(batch.examples[sample.group], sample) for sample in batch.samples if sample.masked]
        self.generated += sum(sample.loss_tokens[0] for sample in batch.samples)
        return batch

    def _refill(self, options: Refill) -> Batch:
        """A batch of the usual number of groups from several draws."""
        batch, draws, kept = refill_batch(self._draw, options, self.config.train)
        self.tally.mean("batch/draws", draws)
        self.tally.mean("batch/kept", kept / (draws * self.config.train.prompts_per_step))
        return batch

    def credit(self, batch: Batch) -> None:
        """Let the recipe set the advantages, after its learners' updates if those come first."""
        run = self.run
        if run.recipe.algorithm.reward_kl_coef:
            self._penalize(batch.samples)
        if run.recipe.fits_first:
            run.stop.check()  # while the step can be redone
            self._fit(batch)
        with self._learners():
            run.recipe.credit(batch)

    def _penalize(self, samples: Sequence[Sample]) -> None:
        """Set the token rewards to the KL penalty: -reward_kl_coef (log p - log p_ref) of sampled tokens."""
        run = self.run
        policy = self.run.policy
        coefficient = self.run.recipe.algorithm.reward_kl_coef
        with self.tally.time("old_logprob"):
            ask = partial(by_sample, samples, config=self.config, pad_id=run.pad_id, device=policy.device)
            if self.config.stale:  # sampled by several policies
                logprobs = [torch.tensor(sample.engine_logprob) for sample in samples]
            else:
                logprobs = ask(policy.logprob)
            references = ask(partial(policy.logprob, reference=True))
        penalty = 0.0
        for sample, logprob, reference in zip(samples, logprobs, references, strict=True):
            trained = torch.tensor([*per_token(sample.trained, len(sample.response))])
            reward = -coefficient * (logprob - reference).double().masked_fill(~trained, 0.0)
            sample.token_reward = reward.tolist()
            penalty -= float(reward.sum())
        self.tally.mean("reward/kl_penalty", penalty, len(samples))

    def keep(self, batch: Batch) -> None:
        """Measure the samples that are kept of this step, which `end` writes."""
        every = self.config.log.samples_every
        step = self.run.progress.step + 1
        if every and (step == 1 or step % every == 0):
            with self.tally.time("samples"):
                self.kept = kept_samples(self.run, batch, self.ungraded)

    def fit(self, batch: Batch) -> None:
        """Let the recipe train its learners, unless it has done so."""
        if not self.run.recipe.fits_first:
            self._fit(batch)

    def _fit(self, batch: Batch) -> None:
        """Train the recipe's learners. Afterwards the step cannot be redone."""
        run = self.run
        run.start.can_redo = run.start.can_redo and not run.recipe.learners
        with self._learners():
            run.recipe.fit(batch, partial(run.count_nonfinite, model=" and ".join(run.recipe.learners)))

    def _learners(self) -> AbstractContextManager[None]:
        """The phase "learners", if the recipe asks models that the advantages or the loss come from."""
        options = self.run.recipe.options
        asks = options.own_advantages and (not options.own_loss or options.teacher_server is not None)
        return self.tally.time("learners") if asks else nullcontext()

    def pack(self, update: Update) -> Work:
        """The update, with the step's external_coef, and its micro-batches: none if no rank has a token with a loss."""
        run = self.run
        if update.algorithm.external_schedule is not None:
            update = replace(update, algorithm=update.algorithm.at_step(run.progress.step, run.progress.external_share))
            objective = update.algorithm.objective
            self.tally.mean("actor/external_coef", objective.external_coef if objective.external != "none" else 0.0)
        with self.tally.time("pack"):
            batches = make_micro_batches(update.samples, update.algorithm, run.config, run.pad_id, run.policy.device)
        self.tally.mean("actor/updated", has_gradient(batches))
        return update, batches

    def remember(self, work: Sequence[Work]) -> None:
        """Store the logprobs under the policy before the step's first update, and under the reference, if any."""
        policy = self.run.policy
        config = self.config
        changed = False
        self._compared = [(micro, micro.engine_logprob) for _, batches in work for micro in batches]
        # Demonstrations of train.overlap come with the logprobs of the weights that sampled beside them.
        shown = config.stale and not config.train.overlap and _shows_any(work)
        with self.tally.time("old_logprob"):
            activity.micro_batches.begin(sum(len(batches) for _, batches in work))
            for update, batches in work:
                for micro in batches:
                    if config.stale:  # the old policies sampled the batch, and the trainer no longer has them
                        use_engine_logprob(micro, policy.logprob(micro) if shown else None)
                    elif changed:  # an update's own forward pass is the old policy until the policy changes
                        micro.old_logprob = policy.logprob(micro)
                        tally_mismatch(self.tally, micro.old_logprob, micro.engine_logprob)
                    if update.algorithm.objective.kl_coef:
                        micro.ref_logprob = policy.logprob(micro, reference=True)
                    activity.micro_batches.add()
                changed = changed or has_gradient(batches)

    def accumulate(self, update: Update, batches: Sequence[MicroBatch]) -> list[PolicyLoss]:
        """Gradients and statistics of an update. The first one checks the engine's logprobs before weights change."""
        if not batches:
            return []
        run = self.run
        tally = self.tally
        algorithm = update.algorithm
        on_policy = not self.updated and not self.config.stale
        with tally.time("update"):
            engine_logprobs = [micro.engine_logprob for micro in batches]
            if needs_statistics(algorithm, on_policy):
                with tally.time("statistics"):
                    statistics = [run.policy.statistics(micro) for micro in batches]
                    set_statistics(batches, statistics, algorithm, self.config.train.sequence_parallel)
            with tally.time("forward_backward"):
                before_each = run.stop.check if run.start.can_redo else None
                outputs = run.recipe.accumulate(update, batches, before_each)
            if on_policy:
                for engine_logprob, out in zip(engine_logprobs, outputs, strict=True):
                    tally_mismatch(tally, out.logprob, engine_logprob)
                # No weight learns from samples of another policy: EngineFailed if the engine does not run this one.
                total, count = tally.means.get("mismatch/mean", (0.0, 0.0))
                run.engine.check(total, count, self._compared, f"step {run.progress.step + 1}")
            tally_outputs(tally, outputs)
            tally_demonstrated(tally, batches, outputs, algorithm.objective.gamma)
            if algorithm.external_schedule is not None and algorithm.external_schedule.shape == "gradient-norm":
                for name, squares in run.policy.squared_slopes(batches, outputs, algorithm.objective).items():
                    tally.mean(f"squared_slopes/{name}", squares)
        return outputs

    def optimize(self, update: Update) -> float | None:
        """Take the optimizer's step on the accumulated gradient; returns the gradient's norm."""
        run = self.run
        policy = self.run.policy
        limit = update.algorithm.skip_grad_norm
        self.updated = True
        run.start.can_redo = False
        lr = policy.lr
        with self.tally.time("update"), self.tally.time("optimizer"):
            applied = policy.step(limit)
        grad_norm = policy.grad_norm
        too_large = not applied and grad_norm is not None and isfinite(grad_norm)
        if limit:
            self.tally.mean("actor/skipped", too_large)
        if too_large:
            text = f"update skipped, gradient norm {grad_norm:.3g} above algorithm.skip_grad_norm {limit:g}"
            run.log.say(f"step {run.progress.step + 1}: {text}")
        run.count_nonfinite(applied or too_large)
        tally_update(self.tally, grad_norm, lr, applied or too_large)
        return grad_norm

    def evaluate(self, name: str, evaluate: Callable[[], dict[str, float]]) -> None:
        """Evaluate the weights that the step leaves; metrics begin with `name`.

        A failure costs the evaluation, not the step: `end` raises it.
        """
        run = self.run
        try:
            with self.tally.time("evaluate"):
                agree.phase("validation" if name == "validation" else "evaluate")
                run.check_weights()
                run.rollouts.sync(run.progress.step + 1)
                for metric, value in evaluate().items():
                    self.tally.mean(f"{name}/{metric}", value)
        except SharedFailure as failure:
            self.failure = failure

    def end(self, batch: Batch) -> None:
        """Count the step, log it, and let all ranks agree on whether a signal ended the run."""
        run = self.run
        tally = self.tally
        progress = self.run.progress
        tally.mean("generated", self.generated * run.world)
        tally.maximum("seconds", batch.seconds)
        tally.maximum("signal", run.stop.number)
        for name, (total, count) in run.recipe.metrics().items():
            tally.mean(name, total, count)
        metrics = tally.reduce()
        run.start.under_way = run.start.can_redo = False
        progress.step += 1
        tokens = round(metrics.pop("generated"))
        progress.generated += tokens
        progress.interrupted = int(metrics.pop("signal"))
        if "squared_slopes/external" in metrics:
            squares = metrics.pop("squared_slopes/internal"), metrics.pop("squared_slopes/external")
            progress.external_share = external_share(*squares, before=progress.external_share)
        seconds = metrics.pop("seconds")  # not time/generate: with train.overlap the step waits for a part only
        if tokens:
            metrics["tokens_per_second"] = tokens / seconds
        if progress.epoch is not None:
            metrics["epoch"] = progress.epoch
        for note in (progress.note_idleness(metrics), progress.note_validation(metrics)):
            if note:
                run.log.say(note)
        if self.kept is not None:
            run.log.keep(progress.step, self.kept)
        run.log.write(progress.step, {"generated_tokens": progress.generated} | metrics)
        if self.failure is not None:
            raise self.failure


def _shows_any(work: Sequence[Work]) -> bool:
    """Whether any rank's micro-batches have demonstrated tokens. Collective."""
    return agree.largest(any(bool(micro.external.any()) for _, batches in work for micro in batches)) > 0


def use_engine_logprob(batch: MicroBatch, demonstrated: Tensor | None = None) -> None:
    """Set old_logprob of a batch to engine_logprob: the trainer has not the policies that sampled (`Config.stale`).

    demonstrated (N,): for demonstrated tokens in place of these.
    """
    batch.old_logprob = batch.engine_logprob
    if demonstrated is not None:
        batch.old_logprob = demonstrated.where(batch.external, batch.engine_logprob)
    batch.engine_logprob = batch.engine_logprob.where(~batch.external, torch.nan)
