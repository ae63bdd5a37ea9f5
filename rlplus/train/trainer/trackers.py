"""Live trackers: services outside the run, wandb and trackio, that are sent its metrics while it goes on."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from rlplus.common import agree
from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.train.config import TRACKERS, Config

Track = Callable[[int, dict[str, float]], None]

logger = logging.getLogger(__name__)


def open_trackers(config: Config, folder: Path, *, resumed: bool, stack: ExitStack) -> list[Track]:
    """A function of step and metrics per key of `log` that is set, on rank 0; `stack` closes the trackers.

    A resumed run goes on in the trackers' runs of its folder. ValueError on all ranks for what no later try could mend,
    such as a missing login; any other failure of a tracker is said once, and never ends the run. Collective.
    """
    projects = {name: project for name in TRACKERS if (project := getattr(config.log, name)) is not None}
    trackers: list[_Tracker] = []
    failure: Exception | None = None
    if projects and dist.get_rank() == 0:
        identity = _identity(folder / "tracker_id", resumed)
        try:
            for name, project in projects.items():
                trackers.append(_Tracker(name, partial(STARTS[name], project, identity, config, folder)))
                stack.callback(trackers[-1].close)
        except ValueError as error:
            failure = error
    if what := agree.failures(failure):
        raise ValueError(what) from failure
    return [tracker.log for tracker in trackers]


def _identity(file: Path, resumed: bool) -> str:
    """The name of the folder's run among all runs of a project."""
    if not (resumed and file.exists()):
        write_text(file, token_hex(4))
    return read_text(file).strip()


class _Tracker:
    """A run of a tracker, None where it could not be started."""

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self.run = None
        self._failed = False
        with self._never_fatal(but=ValueError):
            self.run = start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.run is not None:
            with self._never_fatal():
                self.run.log(metrics, step=step)

    def close(self) -> None:
        if self.run is not None:
            with self._never_fatal():
                self.run.finish()

    @contextmanager
    def _never_fatal(self, but: tuple[type[Exception], ...] | type[Exception] = ()) -> Iterator[None]:
        try:
            yield
        except but:
            raise
        except Exception as error:  # a network or a foreign package failed
            if not self._failed:
                logger.warning("%s failed, and may miss steps that metrics.jsonl has: %r", self.name, error)
            self._failed = True


def _start_wandb(project: str, identity: str, config: Config, folder: Path) -> Any:
    import wandb

    values = config.model_dump(mode="json")
    try:
        return wandb.init(
            project=project, id=identity, name=config.output_dir, dir=str(folder), resume="allow", config=values
        )
    except wandb.errors.UsageError as error:
        raise ValueError(f"log.wandb: {error}") from error


def _start_trackio(project: str, identity: str, config: Config, folder: Path) -> Any:
    import trackio

    name = f"{folder.resolve().name}-{identity}"  # trackio finds a run by it
    return trackio.init(project=project, name=name, resume="allow", config=config.model_dump(mode="json"))


STARTS = {"wandb": _start_wandb, "trackio": _start_trackio}
