"""Atomic checkpoints that resume exactly.

    checkpoints/latest            the name of the newest complete checkpoint
    checkpoints/step-000050/      DeepSpeed's shards in a folder of each model, such as policy/; rng-<rank>.pt,
                                  rank-<rank>.pt, state.json and its CRC-32
    checkpoints/saving/           a checkpoint being written, possibly by a process that died

A checkpoint is written under the name `saving`, flushed to the disk, renamed, and only then named in `latest`. `verify`
compares the checksums that torch.save puts into its zip archives, and state.json's, before anything is loaded.
state.json has the step and a CRC-32 of each archive's checksums, by its name: a file of another step or rank is damage.
Loading unpickles (DeepSpeed's format does): load only checkpoints that you wrote yourself.
"""

import json
import logging
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlplus.common import agree
from rlplus.common.durable import flush, flush_all, make_folder, remove_unfinished, write_text
from rlplus.common.textfiles import read_text

logger = logging.getLogger(__name__)

SAVING = "saving"
NAME = re.compile(r"step-\d+")
UNKNOWN = "unknown"  # stands for an `_identity`, as the next does
UNLISTED = "unlisted"
WRITTEN = {"step", "world_size", "rank_state", "files"}  # added by `save` to a state; rank_state: whether there is one


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None; ValueError for a pointer to anything else."""
    pointer = folder / "latest"
    if not pointer.is_file():  # lost, or not yet written: a renamed checkpoint is complete
        complete = _complete(folder)
        return complete[-1] if complete else None
    name = read_text(pointer).strip()
    if not NAME.fullmatch(name):
        raise ValueError(f"{pointer} is damaged: want the name of a checkpoint, step-<digits>; got {name[:80]!r}")
    if not (folder / name / "state.json").is_file():
        raise ValueError(f"{pointer} names {name}, which is missing or incomplete")
    return folder / name


def named(folder: Path, name: str) -> Path:
    """The complete checkpoint of that name; ValueError where there is none."""
    complete = [path.name for path in _complete(folder)]
    if name not in complete:
        have = ", ".join(complete) or "none"
        raise ValueError(f"want a complete checkpoint in {folder}: {have}; got {name!r}")
    return folder / name


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    found = (file.parent for file in folder.glob("step-*/state.json") if NAME.fullmatch(file.parent.name))
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:06d}"


def save(
    engines: Mapping[str, Any],
    folder: Path,
    step: int,
    state: dict[str, Any],
    keep: int,
    rank_state: Any = None,
    spared: str | None = None,
    frozen: bool = True,
) -> Path:
    """Write DeepSpeed engines, every rank's random state and `state` (JSON) as step `step`; keep the newest `keep`.

    engines: by the names of their folders. rank_state: this rank's additional state, pickled. spared: the name of a
    checkpoint that is kept however old it is. frozen: whether weights that do not train are written; `load` leaves
    those that are not as they are. Collective.
    Raises OSError (a full disk, for example) with the previous checkpoint intact.
    """
    final = folder / name_of(step)
    saving = folder / SAVING
    main = dist.get_rank() == 0
    if agree.largest(main and _is_saved(final)):  # one rank's view: a network file system may show others less
        return final
    whole = state | {"step": step, "world_size": dist.get_world_size(), "rank_state": rank_state is not None}
    _together(lambda: _clear(saving, final, [*engines]) if main else None, step, saving)
    _together(lambda: _write(engines, saving, rank_state, frozen), step, saving)  # each rank flushes what it wrote
    _together(lambda: _publish(folder, final, whole, keep, spared) if main else None, step, saving)
    return final


def _is_saved(final: Path) -> bool:
    pointer = final.with_name("latest")
    return pointer.is_file() and pointer.read_text() == final.name and (final / "state.json").is_file()


def _together(action: Callable[[], None], step: int, saving: Path) -> None:
    """Call the function; OSError on every rank if it fails on one, so that the others do not wait for that one."""
    failure: Exception | None = None
    try:
        action()
    except (OSError, RuntimeError) as error:
        failure = error
        if "inline_container" in str(error):  # torch.save says where in its source, and not what the disk said
            failure = OSError(f"torch.save failed, as on a full disk: {error}")
    if what := agree.failures(failure):
        raise OSError(f"could not write the checkpoint of step {step} under {saving}: {what}") from failure


def _clear(saving: Path, final: Path, engines: Sequence[str]) -> None:
    """Remove leftovers, and make the engines' folders.

    DeepSpeed would make them, and leave its save when it cannot, before a barrier in which the other ranks wait.
    """
    make_folder(saving.parent)
    remove_unfinished(saving.parent, "latest|exported")
    for leftover in (saving, final):  # `final` without a pointer: the process died between rename and pointer
        if leftover.exists():
            shutil.rmtree(leftover)
    for name in engines:
        (saving / name).mkdir(parents=True)


def _write(engines: Mapping[str, Any], saving: Path, rank_state: Any, frozen: bool) -> None:
    failed: list[Exception] = []
    for name, engine in engines.items():
        with _errors_kept(engine) as errors, nullcontext() if frozen else _without_frozen(engine.module):
            engine.save_checkpoint(str(saving), tag=name, save_latest=False, exclude_frozen_parameters=not frozen)
        failed += errors
    if failed:
        raise failed[0]
    _save_flushed(random_state(), saving / f"rng-{dist.get_rank()}.pt")
    if rank_state is not None:
        _save_flushed(rank_state, saving / f"rank-{dist.get_rank()}.pt")


def _save_flushed(value: Any, file: Path) -> None:
    torch.save(value, file)
    flush(file)


@contextmanager
def _errors_kept(engine: Any) -> Iterator[list[Exception]]:
    """Flush the files that DeepSpeed writes inside, and collect errors instead of raising them.

    Its save ends with a barrier, in which the other ranks would wait for a rank that left early.
    """
    errors: list[Exception] = []

    def kept(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                result = write(*args, **kwargs)
                for file in (*args, *kwargs.values()):  # arguments (state, path)
                    if isinstance(file, str):
                        flush(Path(file))
                return result
            except (OSError, RuntimeError) as error:
                errors.append(error)

        return attempt

    writers = ((engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script"))  # the script on rank 0
    for owner, name in writers:
        setattr(owner, name, kept(getattr(owner, name)))
    try:
        yield errors
    finally:
        for owner, name in writers:
            delattr(owner, name)  # the class has the real one


@contextmanager
def _without_frozen(model: nn.Module) -> Iterator[None]:
    """Leave weights that do not train out of the model's state; DeepSpeed by itself keeps a tied one's second name."""

    def drop(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        frozen = _frozen(model)
        parts = tuple(f"{name}." for name in frozen)  # the scales of a quantized weight, which are named after it
        for name in [*state]:
            if name in frozen or name.startswith(parts):
                del state[name]

    hook = model.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


def _publish(folder: Path, final: Path, state: dict[str, Any], keep: int, spared: str | None) -> None:
    """Rename the finished `saving` to `final`, name it in `latest`, delete old checkpoints."""
    saving = folder / SAVING
    files = {name: _identity(saving / name) for name in _archives(saving)}
    text = json.dumps(state | {"files": files})
    write_text(saving / "state.json", text)
    write_text(saving / "state.crc32", f"{zlib.crc32(text.encode()):08x}")
    flush_all(saving)
    saving.rename(final)
    flush(folder)  # or the pointer might reach the disk without what it names
    point_to(final)
    # Later checkpoints are leftovers that nothing points to (see `_clear`); do not count them.
    steps = (path for path in folder.glob("step-*") if NAME.fullmatch(path.name))
    for old in sorted((path for path in steps if _step(path) <= _step(final)), key=_step)[:-keep]:
        if old.name != spared:
            shutil.rmtree(old)


def _archives(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.pt"))


def point_to(checkpoint: Path) -> None:
    """Name it in `latest`."""
    write_text(checkpoint.with_name("latest"), checkpoint.name)


def verify(checkpoint: Path) -> None:
    """ValueError on all ranks if a file is changed, missing or of another step; it names the newest older intact one.

    Collective. Each rank reads its share of the files once, in pieces, and compares their CRC-32.
    """
    files = _checked_files(checkpoint)
    rank = dist.get_rank()
    shares = agree.gathered(_damage(dict([*files.items()][rank :: dist.get_world_size()])))
    if damage := [text for share in shares for text in share]:
        older = _newest_whole(checkpoint) if rank == 0 else None
        raise ValueError(f"{'; '.join(damage)}. {agree.gathered(older)[0]}")


def _checked_files(checkpoint: Path) -> dict[Path, str]:
    """Each archive that is there or that state.json lists, with the `_identity` in state.json, or UNKNOWN or UNLISTED.

    Before them state.json. Versions up to 0.3 listed names only.
    """
    found = _archives(checkpoint)
    listed: Any = dict.fromkeys(found, UNKNOWN)
    with suppress(ValueError, OSError):  # damaged, which its own check reports
        listed = read_state(checkpoint)["files"]
    if isinstance(listed, list):
        if dist.get_rank() == 0:
            logger.warning("%s is of rlplus 0.3 or earlier: files of other steps in it are not noticed", checkpoint)
        listed = dict.fromkeys(listed, UNKNOWN)
    files = dict.fromkeys(found, UNLISTED) | listed
    return {checkpoint / "state.json": ""} | {checkpoint / name: files[name] for name in sorted(files)}


def _newest_whole(than: Path) -> str:
    for older in reversed(_complete(than.parent)):
        if _step(older) < _step(than) and not _damage(_checked_files(older)):
            return f"The newest older checkpoint that is whole: {older.name}; --resume={older.name} goes on from it"
    return "There is no older checkpoint that is whole"


def _damage(files: Mapping[Path, str]) -> list[str]:
    """A line for each damaged file. files: as from `_checked_files`."""
    found = []
    for file, identity in files.items():
        try:
            if file.suffix == ".json":
                if (step := _checked_state(file)["step"]) != _step(file.parent):
                    raise ValueError(f"it was saved at step {step}")
            else:
                _check_archive(file)
                if identity not in (UNKNOWN, _identity(file)):
                    what = "lacks it" if identity == UNLISTED else "was saved with another file of this name"
                    raise ValueError(f"state.json {what}")
        except Exception as error:  # a damaged archive can raise anything
            found.append(f"{file} is damaged: {error}")
    return found


def _identity(file: Path) -> str:
    """A CRC-32 of an archive's table, which has the CRC-32 of each entry: quick where the archive is long."""
    with zipfile.ZipFile(file) as archive:
        table = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    return f"{zlib.crc32(repr(table).encode()):08x}"


def _check_archive(file: Path) -> None:
    """Raise if an archive of torch.save is damaged: its CRC-32s, and the other fields that torch reads."""
    with zipfile.ZipFile(file) as archive:
        if (wrong := archive.testzip()) is not None:
            raise ValueError(f"the CRC-32 of {wrong} is wrong")
        for entry in archive.infolist():  # stored as they are, none a directory
            if entry.compress_type or entry.compress_size != entry.file_size or entry.external_attr:
                raise ValueError(f"the entry of {entry.filename} in its table is wrong")


def _checked_state(file: Path) -> dict[str, Any]:
    """The JSON in `file`; ValueError if its CRC-32 is missing or differs, or a key is missing."""
    content = file.read_bytes()
    written = file.with_suffix(".crc32")
    if not written.exists():
        raise ValueError(f"{written.name} beside it is missing, which rlplus writes since version 0.2.0")
    if written.read_bytes() != f"{zlib.crc32(content):08x}".encode():
        raise ValueError("its CRC-32 is wrong")
    state: dict[str, Any] = json.loads(content)
    if not isinstance(state, dict) or not state.keys() >= WRITTEN:
        raise ValueError(f"want an object with {', '.join(sorted(WRITTEN))}; got {str(state)[:100]}")
    return state


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint: `save`'s `state` and WRITTEN."""
    file = checkpoint / "state.json"
    try:
        return _checked_state(file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def read_rank_state(checkpoint: Path, rank: int, mapped: bool = False) -> Any:
    """A rank's `rank_state`; None if there was none. mapped: tensors stay in the file until they are read."""
    file = checkpoint / f"rank-{rank}.pt"
    if not read_state(checkpoint)["rank_state"]:
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=False, mmap=mapped)
    except Exception as error:  # unpickling damaged data can raise anything
        raise ValueError(f"{checkpoint} is damaged, {file.name} cannot be read: {error!r}") from error


def load(engines: Mapping[str, Any], checkpoint: Path, reshard: Callable[[Any, Path, int], None]) -> None:
    """Restore DeepSpeed engines and this rank's random state; ValueError for damage. Collective.

    reshard: restores an engine from the folder of another number of ranks. Such ranks take the random states in turn.
    """
    ranks = read_state(checkpoint)["world_size"]
    try:
        for name, engine in engines.items():
            place = checkpoint / name
            if ranks != dist.get_world_size():
                reshard(engine, place, ranks)
                continue
            path, _ = engine.load_checkpoint(str(place.parent), tag=place.name, custom_load_fn=load_weights)
            if path is None:
                raise ValueError(f"DeepSpeed found nothing in {place}")
        generators = torch.load(checkpoint / f"rng-{dist.get_rank() % ranks}.pt", weights_only=False)
    except torch.OutOfMemoryError:  # not the file's fault
        raise
    except Exception as error:
        raise ValueError(f"{checkpoint} is damaged, a file cannot be read: {error!r}") from error
    set_random_state(generators)


def load_weights(src: Mapping[str, Any], dst: nn.Module) -> None:
    """Weights that do not train may be missing, see `save`; ValueError for any other difference."""
    found = dst.load_state_dict(src, strict=False)
    if wrong := sorted({*found.missing_keys} - _frozen(dst)) + sorted(found.unexpected_keys):
        raise ValueError(f"want the weights of this model; {', '.join(wrong[:5])} differ")


def random_state() -> dict[str, Any]:
    """The states of this process's random generators."""
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
