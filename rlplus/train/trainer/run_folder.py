"""A run's folder: shared by all ranks, written by one run at a time, and resumed only by that run."""

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlplus import __version__
from rlplus.common import agree
from rlplus.common.durable import flush_all, make_folder, remove_unfinished, write_text
from rlplus.common.textfiles import read_text
from rlplus.train import checkpoint
from rlplus.train.config import STARTS, Config, recorded_config
from rlplus.train.config.surroundings import MAY_CHANGE, surroundings
from rlplus.train.data import SAMPLES, Example, drop_kept, ends_text
from rlplus.train.evaluation.asked import model_hash
from rlplus.train.learner.deepspeed_settings import check_resharding
from rlplus.train.trainer.provenance import note_start

# Keys that may differ if their contents are the same, with the name of the fingerprint that tells.
MAY_MOVE = {"data.path": "examples", "model.path": "weights"}

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder of a run, locked until `stack` closes. Collective.

    last: the checkpoint to resume from, None for a new run; its files are intact. state: its JSON. notes: messages for
    the user about it. fixed: entries that are the same in each checkpoint of the run, such as its inputs' fingerprints.
    """

    def __init__(self, config: Config, resume: str | None, stack: ExitStack) -> None:
        self.config = config
        self.path = Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self._exported = (
            self.checkpoints / "exported"
        )  # names the checkpoint whose model has been written, and the model
        self.surroundings = surroundings(config)  # at the start of the run
        self.fixed: dict[str, Any] = {"config": config.model_dump(mode="json"), "surroundings": self.surroundings}
        if not agree.largest(self.path.is_dir()):  # a mistyped folder is not created
            find_checkpoint(self.path, resume)
        make_folder(self.path)
        refusal = (
            f"another run is writing into {self.path}: wait for its end, or choose another output_dir. Ranks whose "
            "launcher was killed go on training: look for them"
        )
        stack.enter_context(agree.locked(self.path / ".lock", refusal))
        self.last = find_checkpoint(self.path, resume)
        self.state: dict[str, Any] = {}
        self.notes: list[str] = []
        if self.last is not None:
            self.state, self.notes = state_to_resume(self.last, config, self.surroundings)
            self.notes += _check_ranks(config, self.last, self.state["world_size"])

    @property
    def has_result(self) -> bool:
        """Whether the model of `last` has been written, and no other is in its place."""
        if self.last is None or not self._exported.exists() or not (self.model / "config.json").exists():
            return False
        name, *identity = read_text(self._exported).split()
        return name == self.last.name and identity in ([], [model_hash(self.model)])  # 0.3 noted the name alone

    def keep_ends(self, found: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """The tokens that end a response: those found now, or those that the resumed run began with."""
        before = [tokenizer.eos_token_id]  # versions without this entry knew this one only
        ends = found if self.last is None else tuple(self.state.get("ends", before))
        if set(ends) != set(found):
            self.notes.append(
                f"responses go on ending as when the run began, in {ends_text(tokenizer, ends)}; those of a new run "
                f"would end in {ends_text(tokenizer, found)}"
            )
        self.fixed["ends"] = [*ends]
        return ends

    def set_inputs(self, weights: str | None, examples: Sequence[Example]) -> None:
        """Fingerprint the inputs; ValueError if the checkpoint has others; their location may differ."""
        fingerprints = {"weights": weights, "examples": fingerprint(examples)}
        self.fixed |= fingerprints
        if self.last is not None:
            check_inputs(self.last, self.state, self.config, fingerprints)

    def begin(self, devices: Sequence[str]) -> None:
        """Mark the folder, on rank 0, as this run's, which continues from `last`, on these devices."""
        step = self.state.get("step", 0)
        self._exported.unlink(missing_ok=True)
        if self.last is not None:
            checkpoint.point_to(self.last)  # which may be an older one; it flushes that removal, too
        remove_unfinished(self.path, r"config\.yaml|run\.json|metrics\.jsonl")
        write_text(self.path / "config.yaml", self.config.to_yaml())
        drop_kept(self.path / SAMPLES, after=step)
        self.notes += note_start(self.path / STARTS, step, self.surroundings, devices)

    def note_result(self, step: int) -> None:
        """Record, on rank 0, that the model of this step was written. It is on the disk before that is."""
        flush_all(self.model)
        write_text(self._exported, f"{checkpoint.name_of(step)} {model_hash(self.model)}")


def find_checkpoint(folder: Path, resume: str | None) -> Path | None:
    """The checkpoint to resume from, None for a new run; its files are intact. Collective; call it under the lock.

    resume: as for `rlplus.train.trainer.train`. Raises ValueError, on all ranks, if there is none or it is damaged, or
    if ranks see different ones: some would start anew, and train other steps.
    """
    last = None
    failure = None
    try:
        last = _find(folder, resume)
    except ValueError as error:
        failure = str(error)
    found = agree.gathered((last and last.name, failure))
    if failures := sorted({text for _, text in found if text}):
        raise ValueError("; ".join(failures))
    _check_shared(folder, [name for name, _ in found])
    if last is not None:
        checkpoint.verify(last)
    return last


def _find(folder: Path, resume: str | None) -> Path | None:
    checkpoints = folder / "checkpoints"
    if resume not in (None, "newest", "auto"):
        return checkpoint.named(checkpoints, resume)
    last = checkpoint.latest(checkpoints)
    if last is not None and resume is None:
        raise ValueError(
            f"{folder} already holds a run, at {last.name}: resume it (--resume), or choose another output_dir"
        )
    if last is None and resume == "newest":
        raise ValueError(
            f"there is nothing to resume in {folder}, which has no checkpoint: leave --resume out to start a run "
            "there; --resume=auto resumes where there is a checkpoint and starts where there is none"
        )
    return last


def _check_shared(folder: Path, names: Sequence[str | None]) -> None:
    if len(set(names)) > 1:
        seen = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise ValueError(f"want {folder} on a file system that all ranks share; its newest checkpoint is {seen}")


def _check_ranks(config: Config, last: Path, saved: int) -> list[str]:
    """Notes for the user about another number of ranks; ValueError if they cannot go on from the checkpoint."""
    if saved == (now := dist.get_world_size()):
        return []
    try:
        check_resharding(config.train, saved, now)
    except ValueError as error:
        raise ValueError(f"{last}: {error}") from error
    return [
        f"the number of ranks has changed: {saved} -> {now}. Weights, moments and all that waits are divided anew; new "
        f"responses are drawn as in a run of {now}"
    ]


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the loaded data, in order."""
    digest = hashlib.sha256()
    for example in examples:
        for tokens in (example.prompt, example.demonstration or ()):
            digest.update(array("q", [len(tokens), *tokens]).tobytes())
        digest.update(example.answer.encode() + b"\0")
        digest.update(array("f", example.behavior_logprob or ()).tobytes())
        for part in example.teacher_topk or ():
            digest.update(part.numpy().tobytes())
        if example.columns:
            digest.update(repr(example.columns).encode())
    return digest.hexdigest()


def state_to_resume(last: Path, config: Config, now: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The state of the checkpoint `last`, and notes for the user; ValueError if `config` does not fit.

    now: this run's `surroundings`. `data.path` and `model.path` are left to `check_inputs`.
    """
    state = checkpoint.read_state(last)
    written = config_in(last, state)
    before = written.model_copy(update={"reward": written.reward.stated})
    after = config.model_copy(update={"reward": config.reward.stated})
    changed = _differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    if changed:
        raise ValueError(f"{last} was written with another configuration: {'; '.join(changed)}")
    notes = [f"resumed at step {state['step']}, from {last}"]
    lengths = [(part.train.steps, part.train.epochs) for part in (written, config)]
    if config.train.lr_needs_length and lengths[0] != lengths[1]:
        notes.append("the run's length has changed: from here on its learning rate is that of a run of the new length")
    if state["best"] is not None and _choice(written) != _choice(config):
        notes.append("validation has changed: from here on the best checkpoint is chosen anew")
        state["best"] = None
        state["since_best"] = 0
    was = state["surroundings"]
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            notes.append(
                f"since that checkpoint {name} has changed: {was.get(name, 'none')} -> {now.get(name, 'none')}"
            )
    return state, notes


def config_in(last: Path, state: Mapping[str, Any]) -> Config:
    """The configuration in the state of the checkpoint `last`; ValueError if it is another version's."""
    try:
        return recorded_config(state["config"])
    except ValueError as error:
        was = state["surroundings"]["rlplus"]
        advice = "" if was == __version__ else ". Go on with that version, or a later one"
        raise ValueError(
            f"{last} was written by rlplus {was}, this is {__version__}, which does not read its configuration: "
            f"{error}{advice}"
        ) from error


def _choice(config: Config) -> dict[str, Any]:
    """The settings on which the choice of the best checkpoint depends."""
    return config.validation.model_dump(exclude={"every", "patience"})


def check_inputs(last: Path, state: dict[str, Any], config: Config, fingerprints: dict[str, str | None]) -> None:
    """ValueError if data or model differ from the checkpoint's. Their location does not matter."""
    for key, name in MAY_MOVE.items():
        section = key.partition(".")[0]
        was = state["config"][section]["path"]
        now = config.model_dump(mode="json")[section]["path"]
        saved = state[name]
        found = fingerprints[name]
        if was != now and (saved is None or found is None):
            raise ValueError(f"{last} has no fingerprint to compare with: want {key} {was!r} as there; got {now!r}")
        if saved is not None and saved != found:
            raise ValueError(f"{last} was written by a run on other {section} than {now}: it has changed")


def _differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(saved.keys() | now.keys()):
        name = f"{prefix}{key}"
        was = saved.get(key)
        is_ = now.get(key)
        if name in MAY_CHANGE or name in MAY_MOVE or was == is_:
            continue
        if isinstance(was, dict) and isinstance(is_, dict):
            found += _differences(was, is_, f"{name}.")
        else:
            found.append(f"{name} was {was!r}, is {is_!r}")
    return found
