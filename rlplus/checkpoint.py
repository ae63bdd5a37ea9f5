"""Checkpoints that are complete or not there, and that resume exactly.

    checkpoints/latest            the name of the newest complete checkpoint
    checkpoints/step-000050/      DeepSpeed's shards, rng-<rank>.pt, rank-<rank>.pt, state.json
    checkpoints/saving/           one that is being written, or was when the process died

A checkpoint is written under the name `saving`, flushed to the disk, renamed, and only then named in `latest`.
Loading unpickles (DeepSpeed's format does): load only checkpoints that you wrote yourself.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlplus import agree
from rlplus.textfiles import read_text

SAVING = "saving"


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None."""
    pointer = folder / "latest"
    if not pointer.is_file():  # lost, or not yet written: what was renamed is complete
        complete = sorted(folder.glob("step-*/state.json"))
        return complete[-1].parent if complete else None
    checkpoint = folder / read_text(pointer).strip()
    if not (checkpoint / "state.json").is_file():
        raise ValueError(f"{pointer} names {checkpoint.name}, which is not there or not complete")
    return checkpoint


def save(engine: Any, folder: Path, step: int, state: dict[str, Any], keep: int, rank_state: Any = None) -> Path:
    """Write the DeepSpeed engine, every rank's random state and `state` (JSON) as step `step`; keep the newest `keep`.

    rank_state: what this rank adds of its own, pickled. Called by all ranks. Raises OSError (a full disk, say)
    with the previous checkpoint intact.
    """
    final, saving = folder / f"step-{step:06d}", folder / SAVING
    main = dist.get_rank() == 0
    if agree.largest(main and latest(folder) == final):  # one rank's view: a network file system may show others less
        return final
    whole = state | {"step": step, "world_size": dist.get_world_size(), "rank_state": rank_state is not None}
    _together(lambda: _clear(saving, final) if main else None, step, saving)
    _together(lambda: _write(engine, saving, rank_state), step, saving)
    _together(lambda: _publish(folder, final, whole, keep) if main else None, step, saving)
    return final


def _together(action: Callable[[], None], step: int, saving: Path) -> None:
    """Do it; OSError on every rank when one of them could not: the others would wait for it in the next collective."""
    failure: Exception | None = None
    try:
        action()
    except (OSError, RuntimeError) as error:
        failure = error
    if what := agree.failures(failure):
        raise OSError(f"could not write the checkpoint of step {step} under {saving}: {what}") from failure


def _clear(saving: Path, final: Path) -> None:
    saving.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (saving, final):  # `final` without a pointer: the process died between rename and pointer
        if leftover.exists():
            shutil.rmtree(leftover)


def _write(engine: Any, saving: Path, rank_state: Any) -> None:
    with _errors_kept(engine) as errors:
        engine.save_checkpoint(str(saving.parent), tag=SAVING, save_latest=False)
    if errors:
        raise errors[0]
    torch.save(random_state(), saving / f"rng-{dist.get_rank()}.pt")
    if rank_state is not None:
        torch.save(rank_state, saving / f"rank-{dist.get_rank()}.pt")


@contextmanager
def _errors_kept(engine: Any) -> Iterator[list[Exception]]:
    """What DeepSpeed could not write inside, instead of an exception: its save ends with a barrier, in which the other
    ranks would wait for a rank that left early."""
    errors: list[Exception] = []

    def kept(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                errors.append(error)

        return attempt

    writers = ((engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script"))
    for owner, name in writers:
        setattr(owner, name, kept(getattr(owner, name)))
    try:
        yield errors
    finally:
        for owner, name in writers:
            delattr(owner, name)  # the class has the real one


def _publish(folder: Path, final: Path, state: dict[str, Any], keep: int) -> None:
    """Turn the finished `saving` into `final`, name it in `latest`, delete what is too old."""
    saving = folder / SAVING
    (saving / "state.json").write_text(json.dumps(state))
    for path in (*saving.rglob("*"), saving):
        _flush(path)
    saving.rename(final)
    pointer = folder / "latest.new"
    pointer.write_text(final.name)
    _flush(pointer)
    pointer.replace(folder / "latest")
    _flush(folder)
    # A later one has no pointer, see `_clear`: it is none of the newest.
    for old in sorted(path for path in folder.glob("step-*") if path.name <= final.name)[:-keep]:
        shutil.rmtree(old)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint: `save`'s `state`, "step" and "world_size"."""
    file = checkpoint / "state.json"
    try:
        state: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged, it is not JSON: {error}") from error
    if not isinstance(state, dict) or not {"step", "world_size"} <= state.keys():
        raise ValueError(f"{file} is damaged: want an object with step and world_size; got {str(state)[:100]}")
    return state


def read_rank_state(checkpoint: Path) -> Any:
    """This rank's `rank_state`, None where there was none."""
    file = checkpoint / f"rank-{dist.get_rank()}.pt"
    if not read_state(checkpoint).get("rank_state", file.exists()):
        return None
    try:
        return torch.load(file, weights_only=False)
    except Exception as error:  # unpickling what is damaged can raise anything
        raise ValueError(f"{checkpoint} is damaged, {file.name} cannot be read: {error!r}") from error


def load(engine: Any, checkpoint: Path) -> None:
    """Restore the DeepSpeed engine and this rank's random state; ValueError for another number of ranks, or damage."""
    saved = read_state(checkpoint)["world_size"]
    if saved != dist.get_world_size():
        raise ValueError(
            f"{checkpoint} was written by {saved} ranks: want as many to resume; got {dist.get_world_size()}"
        )
    try:
        path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        generators = torch.load(checkpoint / f"rng-{dist.get_rank()}.pt", weights_only=False)
    except Exception as error:
        raise ValueError(f"{checkpoint} is damaged, a file cannot be read: {error!r}") from error
    if path is None:
        raise ValueError(f"DeepSpeed found no checkpoint in {checkpoint}")
    set_random_state(generators)


def random_state() -> dict[str, Any]:
    """Of this process's generators."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _flush(path: Path) -> None:
    """Force a file's contents, or a folder's list of names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
