"""A run's parts and its place in time: everything that the loop needs and a checkpoint must remember."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from transformers import PretrainedConfig

from rlplus import agree, checkpoint
from rlplus.config import Config
from rlplus.data import Example, PromptSampler, Sample, load_examples, load_tokenizer, response_text
from rlplus.learner import Policy, check_positions, prepare_model, weights_fingerprint
from rlplus.objective import Algorithm
from rlplus.reward import Scorer, Verdict, grade_demonstrations, keep_passed
from rlplus.rollout import RunFailed, make_engine
from rlplus.terminal import Terminal
from rlplus.textfiles import write_text
from rlplus.trainer import folder
from rlplus.trainer.engine import EngineFailed, NoEngine, SyncedEngine, max_gap
from rlplus.trainer.memory import naming_phase
from rlplus.trainer.metrics import RunLog, Tally
from rlplus.trainer.ranks import initialize_distributed
from rlplus.trainer.rollouts import Batch, Rollouts
from rlplus.trainer.stop import Interrupted, StopSignal

IDLE_STEPS = 4  # in a row without an update: fewer may be chance where steps are small, more would tell the user late


class Run:
    """Use as a context manager: entering builds everything, leaving closes it.

    The process group stays, for the next run of the process: DeepSpeed keeps references to it.
    """

    def __init__(self, config: Config, resume: bool | str) -> None:
        self.config, self.resume = config, resume
        self.folder = Path(config.output_dir)
        self.algorithm: Algorithm = config.algorithm.resolve()
        self.step = self.generated = self.nonfinite = 0
        self.idle = 0  # steps in a row without an update, since this process started
        self.under_way = False  # a step
        self.can_redo = False  # it has not changed the policy yet
        self.stop = StopSignal(lambda message: self.log.say(message))
        self.interrupted = 0  # the signal that did it
        self.complete = False  # before it began: the run is over and its model written
        self.inputs: dict[str, str | None] = {}  # fingerprints
        self.surroundings = folder.surroundings(config)  # those that it starts with

    def __enter__(self) -> Self:
        with naming_phase("start"), ExitStack() as stack:  # closes what was opened when building fails half-way
            self._build(stack)
            self._open = stack.pop_all()
        return self

    def _build(self, stack: ExitStack) -> None:
        config = self.config
        initialize_distributed(config.train.collective_timeout_s)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        per_update = config.train.prompts_per_update or config.train.prompts_per_step
        if per_update % self.world:
            raise ValueError(
                f"want prompts_per_step and _per_update multiples of the {self.world} ranks; got {per_update}"
            )
        last, state, notes = self._find_place(stack)
        if self.complete:
            return
        model_path, model_config = prepare_model(config.model, self.folder, config.train.seed)
        check_positions(config, model_config)
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path, "scratch": None}))
        self.pad_id = self.tokenizer.pad_token_id
        self.scorer = stack.enter_context(Scorer(config.reward))
        agree.phase("data")
        weights = None if config.model.path is None or self.rank else weights_fingerprint(config.model.path)
        self.inputs["weights"] = agree.gathered(weights)[0]
        self.examples, dropped = self._load_data(last, state)
        agree.phase("model")
        self.sampler = PromptSampler(len(self.examples), config.train.prompts_per_step, config.train.seed)
        self.policy = Policy(config, model_path, model_config, self.algorithm.objective)
        if last is not None:
            self.sampler.load_state_dict(state["sampler"])
            checkpoint.load(self.policy.engine, last)
            if what := self.policy.nonfinite():
                raise ValueError(f"{last} has NaN or infinity in {what}: want a checkpoint with finite weights")
        self._start_engine(model_path, model_config, stack)
        if last is not None:
            self.rollouts.restore(checkpoint.read_rank_state(last))
        if self.rank == 0:
            if last is not None:
                checkpoint.point_to(last)  # which may be an older one
            self._exported.unlink(missing_ok=True)
            write_text(self.folder / "config.yaml", config.to_yaml())
        self.log = RunLog(self.folder, self.step, config.algorithm.preset, enabled=self.rank == 0)
        stack.callback(self.log.close)
        source = f"rollouts by {self.engine.engine.name}" if config.needs_engine else "no rollouts, and no engine"
        head = f"head by backend {self.policy.backend!r}: {self.policy.why_backend}"
        for note in (*notes, *dropped, head, f"{source}; output in {self.folder}"):
            self.log.say(note)
        self.stop.install(stack)
        # What was imported and built stays: walking it took the collector a tenth of the demo's time.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)

    def _start_engine(self, model_path: str, model_config: PretrainedConfig, stack: ExitStack) -> None:
        """Make the engine, with this run's model configuration, and the rollouts that ask it."""
        config, config_path = self.config, str(self.folder / f"model_config/{self.rank}")
        model_config.save_pretrained(config_path)
        make = partial(
            make_engine,
            config.rollout,
            model_path,
            dtype=config.model.dtype,
            max_model_len=config.max_generation_length,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.pad_id,
            seed=config.train.seed,
            trust_remote_code=config.model.trust_remote_code,
            config_path=config_path,
        )
        starts = make if config.needs_engine else NoEngine
        self.engine = SyncedEngine(config, self.policy, self.examples[0].prompt, self.pad_id, starts, self.stop)
        self.rollouts = Rollouts(
            config, self.algorithm, self.policy, self.examples, self.sampler, self.pad_id, self.engine
        )
        stack.callback(self.rollouts.close)

    def _find_place(self, stack: ExitStack) -> tuple[Path | None, dict[str, Any], list[str]]:
        """Take the folder; the checkpoint to go on from, its state, and what to say about it."""
        if not agree.largest(self.folder.is_dir()):  # a mistyped folder is not made
            folder.find_checkpoint(self.folder, self.resume)
        self.folder.mkdir(parents=True, exist_ok=True)
        folder.lock(self.folder, stack)
        last = folder.find_checkpoint(self.folder, self.resume)
        if last is None:
            return None, {}, []
        state, notes = folder.read_state(last, self.config, self.surroundings)
        self.step, self.generated, self.nonfinite = state["step"], state["generated"], state["nonfinite"]
        exported = self._exported.read_text() if self._exported.exists() else ""
        complete = self.finished and exported == last.name and (self.folder / "model/config.json").exists()
        self.complete = agree.gathered(complete)[0]
        if self.complete and self.rank == 0:
            done = f"nothing to do: this run is finished, {self.step} steps; model in {self.folder / 'model'}"
            Terminal(stderr=True).print(done)
        return last, state, notes

    def _load_data(self, last: Path | None, state: dict[str, Any]) -> tuple[list[Example], list[str]]:
        """Examples whose demonstrations the run's own reward accepts, and what was dropped on the way.

        Each demonstration is graded once: a resumed run has the verdicts of its checkpoint.
        """
        data = self.config.data
        examples, report = load_examples(
            data, self.tokenizer, max_demonstration_length=self.config.max_demonstration_length
        )
        self.inputs["examples"] = folder.fingerprint(examples)
        if last is not None:
            folder.check_inputs(last, state, self.config, self.inputs)
        notes = [report.summary()]
        self.verdicts: list[Verdict] = state.get("verdicts", [])
        if self.algorithm.demonstrations != "none":
            self.verdicts = self.verdicts or grade_demonstrations(examples, self.scorer, self.decode)
            examples, graded = keep_passed(examples, self.verdicts)
            notes.append(graded.summary())
            if graded.dropped_share > data.max_dropped_share:
                raise ValueError(
                    f"{graded.summary()}; want at most data.max_dropped_share={data.max_dropped_share:g} dropped"
                )
        if self.algorithm.demonstrations == "only":
            examples = [e for e in examples if e.demonstration is not None]
        return examples, notes

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _exported(self) -> Path:
        """Names the checkpoint whose model has been written."""
        return self.checkpoints / "exported"

    @property
    def finished(self) -> bool:
        return self.interrupted > 0 or self._share_done >= 1

    @property
    def _share_done(self) -> float:
        train = self.config.train
        tokens = self.generated / train.generated_tokens if train.generated_tokens else 0.0
        return min(1.0, max(self.step / train.steps, tokens))

    @property
    def evaluation_due(self) -> bool:
        every = self.config.evaluation.every
        return every > 0 and (self.step + 1) % every == 0

    @property
    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        return self.finished or (every > 0 and self.step % every == 0)

    def decode(self, tokens: Sequence[int]) -> str:
        """Response tokens as the reward reads them: `data.response_prefix` first, no special tokens."""
        return response_text(self.tokenizer, tokens, self.config.data.response_prefix)

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Samples of each update, whole groups in order."""
        config = self.config.train
        groups = (config.prompts_per_update or config.prompts_per_step) // self.world
        parts: list[list[Sample]] = [[] for _ in range(config.prompts_per_step // self.world // groups)]
        for sample in samples:
            parts[sample.group // groups].append(sample)
        return parts

    def count_nonfinite(self, applied: bool) -> None:
        """RunFailed after `max_nonfinite` updates in a row that a non-finite gradient made impossible."""
        self.nonfinite = 0 if applied else self.nonfinite + 1
        if not applied:
            self.log.say(f"step {self.step + 1}: non-finite gradient, update skipped")
        if self.nonfinite >= self.config.train.max_nonfinite:
            self.check_weights()
            raise RunFailed(
                f"{self.nonfinite} updates in a row had a non-finite gradient; the newest checkpoint is "
                f"{checkpoint.latest(self.checkpoints)}. Lower train.lr, or use a bounded objective"
            )

    def check_weights(self) -> None:
        """RunFailed on all ranks where an update left NaN or infinity: nothing is made of such weights, or blamed."""
        if what := self.policy.nonfinite():
            updated = self.under_way and not self.can_redo
            raise RunFailed(
                f"step {self.step + updated}: an update left NaN or infinity in {what}. Nothing of it was saved, the "
                f"newest checkpoint is {checkpoint.latest(self.checkpoints)}. Lower train.lr, or raise "
                "train.warmup_steps"
            )

    def _note_idleness(self, metrics: dict[str, float]) -> None:
        """Say so when steps in a row had no update: after IDLE_STEPS, then each time that their number has doubled."""
        self.idle = 0 if metrics["actor/updated"] else self.idle + 1
        if self.idle >= IDLE_STEPS and self.idle & (self.idle - 1) == 0:
            clipped, masked = (metrics.get(name, 0.0) for name in ("response_length/clipped", "reward/masked"))
            rewards = f"mean {metrics['reward/mean']:.3g}" if "reward/mean" in metrics else "none"
            self.log.say(
                f"step {self.step}: no update in {self.idle} steps: the rewards in each group are equal ({rewards} in "
                f"this step; {masked:.0%} of the responses not graded, {clipped:.0%} cut off), so no sample has a "
                "gradient. Check the reward on a response of the model, the prompts' format, "
                "rollout.max_response_length, and whether the problems are much too hard or too easy"
            )

    def begin_step(self) -> None:
        """Remember what `give_up_step` goes back to."""
        self.under_way = self.can_redo = True
        self.random_state = checkpoint.random_state()

    def check_mismatch(self, tally: Tally) -> None:
        """RunFailed when engine and trainer disagree about the step's logprobs: the engine does not run the policy."""
        limit = max_gap(self.config)
        gap, tokens = agree.sums(*tally.means.get("mismatch/mean", (0.0, 0.0)))
        if tokens and not gap / tokens <= limit:
            raise EngineFailed(
                f"step {self.step + 1}: the mean gap between the logprobs of the {self.engine.engine.name} engine and "
                f"of the trainer is {gap / tokens:.2e}; want at most rollout.max_logprob_gap={limit:g}. "
                "No weight was changed",
                clear=True,
            )

    def evaluate(self, evaluate: Callable[["Run"], dict[str, float]], tally: Tally) -> None:
        """With the weights of the step that ends; every rank has the same numbers."""
        self.check_weights()
        self.rollouts.sync(self.step + 1)
        for name, value in evaluate(self).items():
            tally.mean(f"val/{name}", value)

    def end_step(self, tally: Tally, batch: Batch) -> None:
        """Count the step, log it, and let all ranks agree whether a signal ended the run."""
        generated = sum(len(s.response) for s in batch.samples if not s.external)
        tally.mean("generated", generated * self.world)
        tally.maximum("seconds", batch.seconds)
        tally.maximum("signal", self.stop.number)
        metrics = tally.reduce()
        self.step += 1
        self.under_way = self.can_redo = False
        tokens = round(metrics.pop("generated"))
        self.generated += tokens
        self.interrupted = int(metrics.pop("signal"))
        seconds = metrics.pop("seconds")  # not time/generate: with train.overlap the step does not wait for all of it
        if tokens:
            metrics["tokens_per_second"] = tokens / seconds
        self._note_idleness(metrics)
        self.log.write(self.step, {"generated_tokens": self.generated} | metrics, self._share_done)

    def give_up_step(self) -> None:
        """Write a checkpoint of the step's beginning, unless it has changed the policy; between two steps, of now."""
        if not self.step or (self.under_way and not self.can_redo):
            return
        if self.under_way:
            self.rollouts.rewind()
            checkpoint.set_random_state(self.random_state)
        self.save_checkpoint()

    @naming_phase("checkpoint")
    def save_checkpoint(self) -> None:
        self.check_weights()
        state = {
            "generated": self.generated,
            "nonfinite": self.nonfinite,
            "sampler": self.sampler.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "verdicts": self.verdicts,
            "surroundings": self.surroundings,
        } | self.inputs
        agree.phase("checkpoint")
        ahead = self.rollouts.state()
        checkpoint.save(self.policy.engine, self.checkpoints, self.step, state, self.config.checkpoint.keep, ahead)

    def conclude(self) -> None:
        """Write the model and say where; Interrupted when a signal ended the run."""
        if self.interrupted:
            next_time = "--resume goes on from here" if self.step else "there is no checkpoint yet, start the run again"
            self.log.say(f"stopped after step {self.step}: {next_time}")
            raise Interrupted(self.interrupted, f"stopped by signal {self.interrupted} after step {self.step}")
        model = self.folder / "model"
        agree.phase("export")
        self.policy.export(str(model))
        if self.rank == 0:
            self.tokenizer.save_pretrained(str(model))
            self._exported.write_text(f"step-{self.step:06d}")
        unchanged = " (no step had an update: it is the one that the run began with)" if self.idle == self.step else ""
        self.log.say(f"{self.step} steps done; model in {model}{unchanged}")
