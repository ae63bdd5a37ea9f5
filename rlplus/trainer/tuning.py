"""The tuning of a run: read once by rank 0, used by all ranks, and kept by the run's checkpoints."""

from pathlib import Path

import torch.distributed as dist

from rlplus import agree
from rlplus.kernels.tiling import Tiling
from rlplus.ops import tuning
from rlplus.ops.tuning import Kind, Record

Begun = tuple[Record | None, Tiling | None, str]  # what the run keeps, what it uses, and a note; empty without either


def begin(wanted: str | None, kind: Kind) -> Begun:
    """For a new run; wanted: train.tuning. Collective; ValueError, on all ranks, for a wrong or missing file."""
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
    """For a run that goes on, which has what it began with, whatever the files say now."""
    if record is None:
        return None, None, ""
    try:
        tiling, reason = tuning.usable(record, kind, "this run's checkpoint")
    except ValueError as error:  # on another GPU the run goes on without it
        return record, None, str(error)
    return record, tiling, reason or "as this run began"


def _read(wanted: str, kind: Kind) -> Begun:
    path = tuning.cached_file(kind) if wanted == "auto" else Path(wanted)
    if path is None or (wanted == "auto" and not path.exists()):
        return None, None, f"none for {kind} in the cache, {tuning.MAKER} makes one"
    record = tuning.read(path)
    tiling, reason = tuning.usable(record, kind, str(path))
    return record if tiling else None, tiling, reason or str(path)
