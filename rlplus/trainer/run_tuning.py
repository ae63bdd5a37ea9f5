"""The tuning of a run: rank 0 reads it once, all ranks use it, and checkpoints keep it."""

from pathlib import Path

import torch.distributed as dist

from rlplus.common import agree
from rlplus.kernels.tiling import Tiling
from rlplus.loss import tuning
from rlplus.loss.tuning import Kind, Record

Begun = tuple[Record | None, Tiling | None, str]  # kept in checkpoints, in use, and a note for the log


def begin(wanted: str | None, kind: Kind) -> Begun:
    """The tuning of a new run. wanted: train.tuning. Collective; ValueError on all ranks for a bad file."""
    if wanted is None:
        return None, None, ""
    if len(devices := {kind.device for kind in agree.gathered(kind)}) > 1:
        raise ValueError(f"train.tuning: want GPUs of one kind; got {', '.join(sorted(devices))}")
    begun: Begun | None = None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            begun = _read(wanted, kind)
        except (OSError, ValueError) as error:
            failure = error
    if what := agree.failures(failure):
        raise ValueError(f"train.tuning: {what}")
    first: Begun = agree.gathered(begun)[0]
    return first


def resume(record: Record | None, kind: Kind) -> Begun:
    """The tuning of a resumed run: the one it started with, even if the files have changed."""
    if record is None:
        return None, None, ""
    try:
        tiling, reason = tuning.usable(record, kind, "this run's checkpoint")
    except ValueError as error:  # the run continues without it on another GPU
        return record, None, str(error)
    return record, tiling, reason or "as at the start of the run"


def _read(wanted: str, kind: Kind) -> Begun:
    path = tuning.cached_file(kind) if wanted == "auto" else Path(wanted)
    if path is None or (wanted == "auto" and not path.exists()):
        return None, None, f"none for {kind} in the cache, {tuning.MAKER} makes one"
    record = tuning.read(path)
    tiling, reason = tuning.usable(record, kind, str(path))
    return record if tiling else None, tiling, reason or str(path)
