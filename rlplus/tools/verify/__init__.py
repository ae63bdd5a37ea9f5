"""A step of a run, recomputed in float64: the trainer's own phases beside the definitions, and the errors between."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlplus.tools.verify.errors_table import Row, compare_computed, compare_constants
from rlplus.tools.verify.float64 import Constants, Loss, advantages, constants_of, logprob_and_entropy
from rlplus.tools.verify.taken import Accumulated, Taken, accumulate, take
from rlplus.train import checkpoint
from rlplus.train.config import Config, check_training_files
from rlplus.train.learner.adapters import add_adapters
from rlplus.train.learner.pretrained import load_model
from rlplus.train.trainer import Interrupted, Run, open_run
from rlplus.train.trainer.progress import StepGivenUp
from rlplus.train.trainer.run_folder import config_in

__all__ = ["Row", "Verification", "verify_run"]


@dataclass(frozen=True)
class Verification:
    """The comparison of one step. rows: in the order of the computation, so that the first wrong one is a cause.

    step: the one that was taken, from the checkpoint of the step before. sequences: compared, and of the update.
    dtype: the run's and the plain model's. notes: what was not compared.
    """

    step: int
    sequences: tuple[int, int]
    dtype: str
    rows: list[Row]
    notes: list[str]

    @property
    def wrong(self) -> list[Row]:
        """The rows whose error is above its bound."""
        return [row for row in self.rows if not row.right]


@dataclass(frozen=True)
class _Prepared:
    """The trainer's part: what it computed, and the constants by the definitions for the chosen samples, by index."""

    config: Config
    model_config: PretrainedConfig
    taken: Taken
    computed: Accumulated
    rows: list[Row]
    constants: dict[int, Constants]
    notes: list[str]


def verify_run(folder: Path, step: int | None = None, sequences: int = 4) -> Verification:
    """Take the step after a checkpoint, the newest or `step`'s, in a copy of the run, up to its gradients.

    sequences: for how many of the update's sequences logprobs, loss and gradients are compared; the others keep their
    places and their part in the denominators. The run's folder is only read. Raises ValueError for a folder or
    checkpoint that does not fit, RunFailed as a step does, Interrupted on a signal.
    """
    last = _checkpoint(folder, step)
    state = checkpoint.read_state(last)
    if (ranks := state["world_size"]) != 1:
        raise ValueError(f"want the checkpoint of a run of one process; {last} was written by {ranks} ranks")
    recorded = config_in(last, state)
    with TemporaryDirectory(prefix="rlplus-verify-") as place:
        config = _copy(last, recorded, Path(place))
        try:
            prepared = _take(config, last.name, sequences)
        except StepGivenUp as stop:
            raise Interrupted(stop.number, f"stopped by signal {stop.number}") from stop
        if recorded.train.backward == "sampled":
            prepared.notes.append(
                "the draws of train.backward sampled: the gradient is that of the exact backward pass"
            )
        return _compare(prepared, Path(place), step=int(state["step"]) + 1)


def _checkpoint(folder: Path, step: int | None) -> Path:
    checkpoints = folder / "checkpoints"
    last = checkpoint.latest(checkpoints) if step is None else checkpoint.named(checkpoints, checkpoint.name_of(step))
    if last is None:
        raise ValueError(
            f"want the folder of a run with a checkpoint; {checkpoints} has none: checkpoint.every says how often one "
            "is written"
        )
    return last


def _copy(last: Path, config: Config, place: Path) -> Config:
    """Make `place` a copy of the run at that checkpoint, whose files it only refers to; returns its configuration."""
    if config.model.lora is not None and config.model.lora.quantization is not None:
        raise ValueError(
            "want a run without model.lora.quantization, whose frozen weights have no counterpart in float64; got "
            f"{config.model.lora.quantization}"
        )
    if config.rollout.routing_replay:
        raise ValueError(
            "want a run without rollout.routing_replay, whose experts have no product in float64; got true"
        )
    recipe = config.algorithm.resolve().recipe
    if loss := recipe.own_loss:
        raise ValueError(f"want a run whose loss is its objective's; the loss of this one is its recipe's, {loss}")
    if recipe.weighs_tokens:
        raise ValueError(f"want a run whose tokens its objective alone weighs; this one's recipe does, {recipe.name}")
    (place / "checkpoints").mkdir()
    (place / "checkpoints" / last.name).symlink_to(last.resolve(), target_is_directory=True)
    silent = config.log.model_copy(update={"samples_every": 0, "wandb": None, "trackio": None})
    rollout = config.rollout.model_copy(update={"max_logprob_gap": 1e9})  # a gap is a finding, not the end
    exact = config.train.model_copy(update={"backward": "exact", "backward_threshold": None})
    copied = config.model_copy(update={"output_dir": str(place), "log": silent, "rollout": rollout, "train": exact})
    check_training_files(copied)
    return copied


def _take(config: Config, name: str, sequences: int) -> _Prepared:
    """The trainer's step, and the constants of its samples by their definitions."""
    with open_run(config, resume=name) as run:
        taken = take(run)
        constants = constants_of(taken.update.samples, _advantages(run, taken), taken.update.algorithm, run.config)
        rows = compare_constants(taken, constants)
        chosen = _choose(taken, constants, sequences)
        computed = accumulate(run, taken, chosen)
        own = {index: constants[index] for index in chosen}
        return _Prepared(run.config, run.policy.model_config, taken, computed, rows, own, _notes(run))


def _advantages(run: Run, taken: Taken) -> list[float | Sequence[float]]:
    """Advantages of the update's samples by the definition; as given where they do not come from the step's rewards."""
    batch = taken.batch.samples
    found = dict[int, float]()
    if not run.recipe.options.own_advantages:
        limit = run.config.rollout.max_response_length
        found = dict(zip(map(id, batch), advantages(batch, taken.update.algorithm, limit), strict=True))
    return [found.get(id(sample), sample.advantage) for sample in taken.update.samples]


def _choose(taken: Taken, constants: Sequence[Constants], count: int) -> list[int]:
    """Samples with a gradient, evenly over kinds and micro-batches."""
    objective = taken.update.algorithm.objective
    places = taken.places
    able = [i for i, c in enumerate(constants) if c.has_loss(objective)]
    able.sort(key=lambda i: (constants[i].sample.demonstration, places[i][:2] if i in places else (-1, -1)))
    count = min(count, len(able))
    return [able[(2 * k + 1) * len(able) // (2 * count)] for k in range(count)]


def _notes(run: Run) -> list[str]:
    notes = []
    algorithm = run.recipe.algorithm
    if trained := " and ".join(run.recipe.learners):
        notes.append(f"the model that the recipe trains ({trained}), and the advantages, which come from it")
    elif algorithm.recipe.own_advantages:
        notes.append("the advantages, which come from the recipe")
    if algorithm.reward_kl_coef:
        notes.append("the KL penalty in the rewards")
    if algorithm.selects_tokens:
        notes.append("which tokens have the highest entropies")
    return notes


def _compare(prepared: _Prepared, place: Path, *, step: int) -> Verification:
    """Recompute what the trainer computed, in float64 and, as the yardstick, by a plain model in the run's dtype."""
    config = prepared.config
    computed = prepared.computed
    update = prepared.taken.update
    loss = Loss(update.algorithm, config.knows_behavior, off_policy=config.stale)
    constants = prepared.constants
    if update.algorithm.selects_tokens:
        constants = {i: _selected(c, computed.own[i].kept if i in computed.own else None) for i, c in constants.items()}
    models = tuple(_load(prepared, place, dtype) for dtype in ("float64", config.model.dtype))
    references = {}
    if update.algorithm.objective.kl_coef:
        references = {i: [_logprob(lm, c, config) for lm in models] for i, c in constants.items()}
    for lm in models:
        _set_weights(lm, computed.weights)
    rows = compare_computed(models, constants, references, computed, loss, config.rollout.temperature)
    compared = len(constants), len(update.samples)
    return Verification(step, compared, config.model.dtype, [*prepared.rows, *rows], prepared.notes)


@torch.no_grad()
def _logprob(lm: PreTrainedModel, c: Constants, config: Config) -> Tensor:
    return logprob_and_entropy(lm, c.sample, config.rollout.temperature)[0].double()


def _selected(c: Constants, kept: Tensor | None) -> Constants:
    """Without the surrogate of the tokens that the trainer left out, and the bonus of those that were sampled."""
    if kept is None:
        return c
    bonus = c.entropy_weight.where(kept | c.external, 0.0)
    return replace(c, advantage=c.advantage.where(kept, 0.0), entropy_weight=bonus)


def _load(prepared: _Prepared, place: Path, dtype: str) -> PreTrainedModel:
    """The model that the run began with, plain, on the CPU."""
    config = prepared.config
    model_config = copy.deepcopy(prepared.model_config)
    capped = getattr(model_config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    attention = "eager" if capped or config.model.attention == "eager" else "sdpa"
    changes = {"dtype": dtype, "attention": attention, "liger": False}
    path = config.model.path or str(place / "scratch")
    lm = load_model(config.model.model_copy(update=changes), path, model_config).eval()
    if config.model.lora is not None:
        add_adapters(lm, config.model.lora, config.train.seed)
    return lm.double() if dtype == "float64" else lm


@torch.no_grad()
def _set_weights(lm: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in lm.named_parameters():
        parameter.copy_(weights[name])
