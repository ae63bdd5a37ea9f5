"""A run: everything that a step needs, and what its checkpoints contain. `run_parts.open_run` makes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlplus.common import agree
from rlplus.common.durable import remove_unfinished, write_text
from rlplus.train import checkpoint
from rlplus.train.config import Config
from rlplus.train.data import Example, PromptSampler, response_text
from rlplus.train.learner import Learner, Policy, write_pretrained
from rlplus.train.recipe import Recipe
from rlplus.train.reward import Scorer
from rlplus.train.rollout import Respond, RunFailed
from rlplus.train.trainer.card import model_card
from rlplus.train.trainer.engine import SyncedEngine
from rlplus.train.trainer.metrics import RunLog
from rlplus.train.trainer.progress import Interrupted, Progress, StopSignal, naming_phase
from rlplus.train.trainer.rollouts import Rollouts
from rlplus.train.trainer.run_folder import RunFolder

# Parts whose `state()` checkpoints keep, in the order in which their `restore(state)` is called. Each rank has its own
# state of OF_RANK, in rank-<rank>.pt. The others are equal on all ranks, and in state.json: the entries of "progress"
# by themselves, those of "sampler" under its name, beside what never changes (`RunFolder.fixed`).
STATE = ("progress", "sampler", "rollouts", "recipe")
OF_RANK = ("rollouts", "recipe")


class StepStart:
    """The start of the step under way, to which a run can go back.

    under_way: whether there is one. can_redo: whether it has not changed a model yet.
    """

    def __init__(self, rollouts: Rollouts, recipe: Recipe) -> None:
        self._rollouts = rollouts
        self._recipe = recipe
        self.under_way = self.can_redo = False

    def take(self) -> None:
        """A step begins here."""
        self.under_way = self.can_redo = True
        self._random = checkpoint.random_state()
        self._of_recipe = self._recipe.state()

    def go_back(self) -> None:
        self._rollouts.rewind()
        self._recipe.restore(self._of_recipe)
        checkpoint.set_random_state(self._random)


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of a run, all of them made and, if it resumes, restored.

    config: with the number of steps, computed from epochs if needed. learners: the policy and the models that the
    recipe trains alongside it, by name. ends: the tokens that end a response.
    """

    config: Config
    rank: int
    world: int
    folder: RunFolder
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    scorer: Scorer
    examples: Sequence[Example]
    progress: Progress
    sampler: PromptSampler
    recipe: Recipe
    policy: Policy
    learners: Mapping[str, Learner]
    engine: SyncedEngine
    respond: Respond
    rollouts: Rollouts
    start: StepStart
    log: RunLog
    stop: StopSignal
    ends: Sequence[int]

    def decode(self, tokens: Sequence[int]) -> str:
        """Response tokens as the reward reads them: `data.response_prefix` first, no special tokens."""
        return response_text(self.tokenizer, tokens, self.config.data.response_prefix, self.ends)

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
        if what := where_nonfinite(self.learners):
            updated = self.start.under_way and not self.start.can_redo
            raise RunFailed(
                f"step {self.progress.step + updated}: an update left NaN or infinity in {what}. Nothing of it was "
                f"saved, the newest checkpoint is {checkpoint.latest(self.folder.checkpoints)}. Lower its learning "
                "rate, or raise its warmup_steps"
            )

    def give_up_step(self) -> None:
        """Write a checkpoint of the step's start, unless the step has changed a model; between steps, of now."""
        if not self.progress.step or (self.start.under_way and not self.start.can_redo):
            return
        if self.start.under_way:
            self.start.go_back()
        self.save_checkpoint()

    @naming_phase("checkpoint")
    def save_checkpoint(self) -> None:
        self.check_weights()
        agree.phase("checkpoint")
        states = {name: getattr(self, name).state() for name in STATE}
        own = {name: states.pop(name) for name in OF_RANK}
        rank_state = own if any(state is not None for state in own.values()) else None
        state = states.pop("progress") | states | self.folder.fixed
        best = state["best"] and checkpoint.name_of(state["best"]["step"])
        # Parameters that are not trained are in the model's own files, which a resumed run finds unchanged or refuses.
        unknown = self.config.model.path is not None and self.folder.fixed["weights"] is None
        checkpoint.save(
            engines(self.learners),
            self.folder.checkpoints,
            self.progress.step,
            state,
            self.config.checkpoint.keep,
            rank_state,
            spared=best,
            frozen=unknown,
        )

    def conclude(self) -> None:
        """Write the model and log its path; Interrupted if a signal ended the run."""
        step = self.progress.step
        signal = self.progress.interrupted
        if signal:
            next_time = "--resume goes on from here" if step else "there is no checkpoint yet, start the run again"
            self.log.say(f"stopped after step {step}: {next_time}")
            raise Interrupted(signal, f"stopped by signal {signal} after step {step}")
        model = self.folder.model
        agree.phase("export")
        self.policy.export(str(model), self.ends)
        if self.rank == 0:
            write_pretrained(self.tokenizer, str(model))
            remove_unfinished(model, r"README\.md")
            write_text(model / "README.md", model_card(self.config, step, self.progress.best))
            self.folder.note_result(step)
        agree.barrier()  # the next stage reads it on every rank
        idle = self.progress.idle == step
        unchanged = " (no step had an update: it is the one that the run began with)" if idle else ""
        train = self.config.train
        steps = f"{step} steps done"
        if train.steps is not None and step < train.steps and not self.progress.early_end:
            steps = f"{step} of at most {train.steps} steps done, with train.generated_tokens={train.generated_tokens}"
        self.log.say(f"{steps}; model in {model}{unchanged}")
        if (best := self.progress.best) is not None:
            place = self.folder.checkpoints / checkpoint.name_of(best["step"])
            self.log.say(f"the best validation was in step {best['step']}, mean reward {best['reward']:.4g}: {place}")


def restore(parts: Mapping[str, Any], folder: RunFolder) -> None:
    """Restore the parts of STATE from the checkpoint that the run resumes from, if there is one."""
    if folder.last is None:
        return
    ranks = folder.state["world_size"]
    states = dict.fromkeys(OF_RANK)
    if ranks == dist.get_world_size():
        states |= checkpoint.read_rank_state(folder.last, dist.get_rank()) or {}
    elif found := [
        each for rank in range(ranks) if (each := checkpoint.read_rank_state(folder.last, rank, mapped=True))
    ]:
        states |= {name: parts[name].redistributed([each[name] for each in found]) for name in OF_RANK}
    states |= {"progress": folder.state, "sampler": folder.state["sampler"]}
    for name in STATE:
        parts[name].restore(states[name])


def engines(learners: Mapping[str, Learner]) -> dict[str, Any]:
    """DeepSpeed's engines, by the names of their folders in a checkpoint."""
    return {name: learner.engine for name, learner in learners.items()}


def where_nonfinite(learners: Mapping[str, Learner]) -> str:
    """Where NaN or infinity is first found in the policy and the recipe's learners; empty if nowhere. Collective."""
    for name, learner in learners.items():
        if what := learner.nonfinite():
            return what if name == "policy" else f"{what} of the {name}"
    return ""
