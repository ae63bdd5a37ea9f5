"""A run's parts: everything that a step needs and a checkpoint must contain."""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rlplus import checkpoint
from rlplus.common import agree
from rlplus.common.durable import write_text
from rlplus.common.terminal import Terminal
from rlplus.config import Config, check_trackers
from rlplus.data import PromptSampler, load_examples, load_tokenizer, response_text
from rlplus.learner import Learner, Policy, check_positions, prepare_model, say_dropout, weights_fingerprint
from rlplus.learner.learner import this_device
from rlplus.loss.tuning import kind_of, using
from rlplus.recipe import make_recipe
from rlplus.reward import Scorer
from rlplus.rollout import RunFailed, make_engine, make_respond
from rlplus.trainer import run_tuning
from rlplus.trainer.card import model_card
from rlplus.trainer.engine import NoEngine, SyncedEngine
from rlplus.trainer.metrics import RunLog
from rlplus.trainer.out_of_memory import naming_phase
from rlplus.trainer.progress import Progress
from rlplus.trainer.prompt_pool import select_prompts
from rlplus.trainer.provenance import device_name
from rlplus.trainer.ranks import initialize_distributed
from rlplus.trainer.rollouts import Rollouts
from rlplus.trainer.run_folder import RunFolder
from rlplus.trainer.stop import Interrupted, StopSignal
from rlplus.trainer.trackers import open_trackers


class Run:
    """A context manager: entering builds all parts, leaving closes them.

    The process group stays, for the next run of the process: DeepSpeed keeps references to it.
    """

    log: RunLog

    def __init__(self, config: Config, resume: bool | str) -> None:
        self.config, self.resume = config, resume
        self.progress = Progress(config)
        self.under_way = False  # a step
        self.can_redo = False  # it has not changed a model yet
        self.stop = StopSignal(lambda message: self.log.say(message))
        self.complete = False  # at the start: the run is finished and its model written

    def __enter__(self) -> Self:
        with naming_phase("start"), ExitStack() as stack:  # closes what was opened if building fails half-way
            self._build(stack)
            self._open = stack.pop_all()
        return self

    def _build(self, stack: ExitStack) -> None:
        config = self.config
        check_trackers(config)
        initialize_distributed(config.train.collective_timeout_s)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if (each := config.train.prompts_per_update or config.train.prompts_per_step) % self.world:
            raise ValueError(f"want prompts_per_step and _per_update multiples of the {self.world} ranks; got {each}")
        self.folder = folder = RunFolder(config, self.resume, stack)
        if folder.last is not None:
            self._count_steps(folder.state["sampler"]["n"])
            self.progress.restore(folder.state)
            self.complete = agree.gathered(self.progress.finished and folder.has_result)[0]
        if self.complete:
            if self.rank == 0:
                done = f"nothing to do: this run is finished, {self.progress.step} steps; model in {folder.model}"
                Terminal(stderr=True).print(done)
            return
        model_path, model_config = prepare_model(config.model, folder.path, config.train.seed)
        say_dropout(model_config)
        check_positions(config, model_config)
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path, "scratch": None}))
        self.pad_id = self.tokenizer.pad_token_id
        self.respond = make_respond(config.rollout.function, self.tokenizer, model_config.vocab_size)
        self.scorer = stack.enter_context(Scorer(config.reward, config.data.columns))
        agree.phase("data")
        dropped = self._load_data()
        config = self.config
        self.recipe = make_recipe(config)
        agree.phase("model")
        self._start_tuning(model_config, stack)
        self._make_learners(model_path, model_config, stack)
        self._start_engine(model_path, model_config, stack)
        if folder.last is not None and (remembered := checkpoint.read_rank_state(folder.last)) is not None:
            self.rollouts.restore(remembered["rollouts"])
            self.recipe.restore(remembered["recipe"])
        devices = agree.gathered(device_name())
        if self.rank == 0:
            folder.begin(devices)
        self._open_log(dropped, stack)
        self.stop.install(stack)
        # Imported and built objects stay alive: the collector spent a tenth of the demo's time on them.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)

    def _make_learners(self, model_path: str, model_config: PretrainedConfig, stack: ExitStack) -> None:
        """Create the sampler of prompts, the policy and the recipe's models; load the checkpoint's state into them."""
        train = self.config.train
        self.sampler = PromptSampler(len(self.prompts), train.prompts_per_step, train.seed, self.prompts)
        reference = self.recipe.algorithm.needs_reference
        self.policy = Policy(self.config, model_path, model_config, reference=reference)
        self.recipe.build(model_path, model_config, self.pad_id)
        self.learners: dict[str, Learner] = {"policy": self.policy} | dict(self.recipe.learners)
        for learner in self.learners.values():
            stack.callback(learner.close)
        self.engines = {name: learner.engine for name, learner in self.learners.items()}
        if (last := self.folder.last) is not None:
            self.sampler.load_state_dict(self.folder.state["sampler"])
            checkpoint.load(self.engines, last)
            if what := self._nonfinite():
                raise ValueError(f"{last} has NaN or infinity in {what}: want a checkpoint with finite weights")

    def _open_log(self, dropped: Sequence[str], stack: ExitStack) -> None:
        """Open metrics and trackers, and say what this run consists of."""
        config, folder = self.config, self.folder
        trackers = open_trackers(config, folder.path, resumed=folder.last is not None, stack=stack)
        title, main = config.algorithm.preset, self.rank == 0
        self.log = RunLog(folder.path, self.progress.step, title, enabled=main, trackers=trackers)
        stack.callback(self.log.close)
        source = f"rollouts by {self.engine.engine.name}" if config.needs_engine else "no rollouts, and no engine"
        head = f"head by backend {self.policy.backend!r}: {self.policy.why_backend}"
        for note in (*folder.notes, *dropped, head, f"{source}; output in {folder.path}"):
            self.log.say(note)

    def _start_tuning(self, model_config: PretrainedConfig, stack: ExitStack) -> None:
        """Set `tuning`, which checkpoints keep, and use it until the run closes."""
        text, dtype = model_config.get_text_config(decoder=True), getattr(torch, self.config.model.dtype)
        kind = kind_of(this_device(), dtype, text.vocab_size, text.hidden_size)
        if self.folder.last is None:
            self.tuning, tiling, note = run_tuning.begin(self.config.train.tuning, kind)
        else:
            self.tuning, tiling, note = run_tuning.resume(self.folder.state["tuning"], kind)
        if note:
            self.folder.notes.append(f"tuning: {note}")
        if tiling is not None:
            stack.enter_context(using(kind, tiling))

    def _count_steps(self, prompts: int) -> None:
        """Replace the run's configuration by one with the number of steps, computed from epochs if needed."""
        self.config = self.progress.config = self.config.with_steps(prompts)

    def _start_engine(self, model_path: str, model_config: PretrainedConfig, stack: ExitStack) -> None:
        """Create the engine, with this run's model configuration, and the rollouts that use it."""
        config, config_path = self.config, str(self.folder.path / f"model_config/{self.rank}")
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
            config, self.recipe, self.policy, self.examples, self.sampler, self.pad_id, self.engine, self.respond
        )
        stack.callback(self.rollouts.close)

    def _load_data(self) -> list[str]:
        """Set examples, whose demonstrations the run's own reward accepts, and prompts; returns what was dropped."""
        config, folder = self.config, self.folder
        weights = None if config.model.path is None or self.rank else weights_fingerprint(config.model.path)
        examples, report = load_examples(
            config.data, self.tokenizer, max_demonstration_length=config.max_demonstration_length
        )
        folder.set_inputs(agree.gathered(weights)[0], examples)
        selected = select_prompts(config, examples, self.scorer, self.decode, folder.state.get("verdicts", []))
        if refusals := [*selected.refusals(config)]:
            raise ValueError("; ".join(refusals))
        self.examples, self.prompts, self.verdicts = selected.examples, selected.variants, selected.verdicts
        notes = [report.summary(), *([selected.graded.summary()] if selected.graded else [])]
        self._count_steps(len(self.prompts))
        if (epochs := config.train.epochs) is not None:
            notes.append(f"{epochs} epochs of {len(self.prompts)} prompts: {self.config.train.steps} steps")
        return notes

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def decode(self, tokens: Sequence[int]) -> str:
        """Response tokens as the reward reads them: `data.response_prefix` first, no special tokens."""
        return response_text(self.tokenizer, tokens, self.config.data.response_prefix)

    def count_nonfinite(self, applied: bool, model: str = "policy") -> None:
        """RunFailed after `max_nonfinite` consecutive updates of a model with a non-finite gradient, all skipped."""
        nonfinite = self.progress.nonfinite
        nonfinite[model] = 0 if applied else nonfinite.get(model, 0) + 1
        if not applied:
            self.log.say(f"step {self.progress.step + 1}: non-finite gradient, update of the {model} skipped")
        if nonfinite[model] >= self.config.train.max_nonfinite:
            self.check_weights()
            raise RunFailed(
                f"{nonfinite[model]} updates of the {model} in a row had a non-finite gradient; the newest checkpoint "
                f"is {checkpoint.latest(self.folder.checkpoints)}. Lower the learning rate, or use a bounded objective"
            )

    def check_weights(self) -> None:
        """RunFailed on all ranks if an update left NaN or infinity, before such weights are saved or used."""
        if what := self._nonfinite():
            updated = self.under_way and not self.can_redo
            raise RunFailed(
                f"step {self.progress.step + updated}: an update left NaN or infinity in {what}. Nothing of it was "
                f"saved, the newest checkpoint is {checkpoint.latest(self.folder.checkpoints)}. Lower its learning "
                "rate, or raise its warmup_steps"
            )

    def _nonfinite(self) -> str:
        """Where NaN or infinity is first found in the policy and the recipe's learners; empty if nowhere."""
        for name, learner in self.learners.items():
            if what := learner.nonfinite():
                return what if learner is self.policy else f"{what} of the {name}"
        return ""

    def begin_step(self) -> None:
        """Save the state that `give_up_step` restores."""
        self.under_way = self.can_redo = True
        self.random_state, self.recipe_state = checkpoint.random_state(), self.recipe.state()

    def give_up_step(self) -> None:
        """Write a checkpoint of the step's start, unless the step has changed a model; between steps, of now."""
        if not self.progress.step or (self.under_way and not self.can_redo):
            return
        if self.under_way:
            self.rollouts.rewind()
            self.recipe.restore(self.recipe_state)
            checkpoint.set_random_state(self.random_state)
        self.save_checkpoint()

    @naming_phase("checkpoint")
    def save_checkpoint(self) -> None:
        self.check_weights()
        agree.phase("checkpoint")
        state = self.progress.state() | {"sampler": self.sampler.state_dict(), "verdicts": self.verdicts}
        state["tuning"] = self.tuning
        remembered = {"rollouts": self.rollouts.state(), "recipe": self.recipe.state()}
        rank_state = remembered if any(value is not None for value in remembered.values()) else None
        self.folder.save(self.engines, self.progress.step, state, rank_state)

    def conclude(self) -> None:
        """Write the model and log its path; Interrupted if a signal ended the run."""
        step, signal = self.progress.step, self.progress.interrupted
        if signal:
            next_time = "--resume goes on from here" if step else "there is no checkpoint yet, start the run again"
            self.log.say(f"stopped after step {step}: {next_time}")
            raise Interrupted(signal, f"stopped by signal {signal} after step {step}")
        model = self.folder.model
        agree.phase("export")
        self.policy.export(str(model))
        if self.rank == 0:
            self.tokenizer.save_pretrained(str(model))
            write_text(model / "README.md", model_card(self.config, step, self.progress.best))
            self.folder.note_result(step)
        agree.barrier()  # the next stage reads it on every rank
        idle = self.progress.idle == step
        unchanged = " (no step had an update: it is the one that the run began with)" if idle else ""
        self.log.say(f"{step} steps done; model in {model}{unchanged}")
        if (best := self.progress.best) is not None:
            place = self.folder.checkpoints / checkpoint.name_of(best["step"])
            self.log.say(f"the best validation was in step {best['step']}, mean reward {best['reward']:.4g}: {place}")
