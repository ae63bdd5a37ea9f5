"""Tunings that `rlplus-bench tune` measured on a GPU: their files, and the ones that this process uses.

Opt-in, by `use_tuning`, or train.tuning in a run. A tuning is valid for one GPU model, dtype and size of head, and for
the versions of everything that its kernels depend on.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.kernels import tiling as table
from rlplus.kernels.tiling import DEFAULT, Block, First, Rows, Tile, Tiling
from rlplus.loss.head import Head
from rlplus.loss.verdicts import cache_folder, versions

MAKER = "`rlplus-bench tune`"
Record = dict[str, Any]  # the content of a file

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """The key of a tuning: the names of device and dtype, vocabulary size, columns of hidden."""

    device: str
    dtype: str
    V: int
    H: int

    def __str__(self) -> str:
        return f"{self.device}, {self.dtype}, a weight ({self.V}, {self.H})"


_in_use: dict[Kind, Tiling] = {}


def kind_of(device: torch.device, dtype: torch.dtype, V: int, H: int) -> Kind:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Kind(name, str(dtype).removeprefix("torch."), V, H)


def tiling_of(head: Head) -> Tiling:
    """The tiling of the head's operations; DEFAULT with a bias, softcap or per-token temperatures, all untimed."""
    if not _in_use or any(x is not None for x in (head.bias, head.softcap, head.row_temperature)):
        return DEFAULT
    return _in_use.get(kind_of(head.hidden.device, head.hidden.dtype, *head.weight.shape), DEFAULT)


@contextmanager
def using(kind: Kind, tiling: Tiling) -> Iterator[None]:
    """Use the tiling for heads of that kind in this process, until the end of the block."""
    before = dict(_in_use)
    _in_use[kind] = tiling
    try:
        yield
    finally:
        _in_use.clear()
        _in_use.update(before)


def use_tuning(path: str | Path) -> None:
    """Use a file of `rlplus-bench tune` from now on in this process, for heads of the size that it is for.

    The last bits of their results change. A file made with other versions of torch, triton, the driver or the kernels
    is ignored with a warning. Raises ValueError if there is no such file, or it is damaged or for another GPU than the
    current one; OSError if it cannot be read.
    """
    path = Path(path)
    record = read(path)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with _damage_in(str(path)):
        kind = Kind(**record["for"])._replace(device=kind_of(device, torch.float32, 0, 0).device)
    tiling, reason = usable(record, kind, str(path))
    if tiling is None:
        logger.warning("%s", reason)
    else:
        _in_use[kind] = tiling


# ---- records and their files


def record_of(kind: Kind, tiling: Tiling, measured: list[Record]) -> Record:
    """The content of a tuning's file. measured: a row per candidate, for human readers only."""
    return {"for": kind._asdict(), "versions": versions(), "tiling": plain(tiling), "measured": measured}


def plain(value: Any) -> Any:
    """A named tuple as a dictionary, nested ones included."""
    return {name: plain(x) for name, x in value._asdict().items()} if hasattr(value, "_asdict") else value


def usable(record: Any, kind: Kind, source: str) -> tuple[Tiling | None, str]:
    """The tiling; or None, and why, if other versions made it. ValueError if it is damaged or not for `kind`."""
    with _damage_in(source):
        found, made_with = Kind(**record["for"]), dict(record["versions"])
    if found != kind:
        raise ValueError(f"want a tuning for {kind}; {source} has one for {found}")
    now = versions()
    if others := [name for name in now if made_with.get(name) != now[name]]:
        changed = "; ".join(f"{name} {made_with.get(name)}, now {now[name]}" for name in others)
        return None, f"the tuning in {source} is not used, it was made with {changed}: run {MAKER} again"
    with _damage_in(source):
        return _parsed(**record["tiling"]), ""


@contextmanager
def _damage_in(source: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"want a tuning by {MAKER} in {source}; got {got}") from None


def _parsed(*, statistics: Any, gradient: Any, programs: Any, forward: Any, loss: Any, rows: Any) -> Tiling:
    """The inverse of `plain`; every part must be a candidate of the table."""
    return Tiling(
        _one_of(table.STATISTICS, Block(**statistics)),
        _one_of(table.GRADIENT, Block(**gradient)),
        _one_of(table.PROGRAMS, programs),
        _first(forward),
        _first(loss),
        None if rows is None else _rows(Rows(**rows)),
    )


def _first(value: Any) -> First:
    if value is None or value == "vendor":
        return value
    if not isinstance(value, dict):
        raise ValueError(f"want a tile, 'vendor' or null; got {value!r}")
    tile: Tile = _one_of((*chain.from_iterable(table.TILES.values()), table.FP32_TILE), Tile(**value))
    return tile


def _one_of(known: tuple[Any, ...], value: Any) -> Any:
    if value not in known:
        raise ValueError(f"{value}, which is none of the candidates")
    return known[known.index(value)]  # int, even if the file has 512.0


def _rows(value: Rows) -> Rows:
    if not all(type(x) is int and x > 0 for x in value):
        raise ValueError(f"{value}: want whole numbers > 0")
    return value


def cached_file(kind: Kind) -> Path | None:
    """Default output of `rlplus-bench tune`; None without a cache folder."""
    device, folder = re.sub(r"[^A-Za-z0-9.]+", "-", kind.device), cache_folder()
    return folder and folder / f"tuning-{device}-{kind.dtype}-{kind.V}x{kind.H}.json"


def read(path: Path) -> Record:
    if not path.is_file():
        raise ValueError(f"want a tuning by {MAKER}; got {path}: no such file (current directory: {Path.cwd()})")
    with _damage_in(str(path)):
        record: Record = json.loads(read_text(path))
    return record


def write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")
