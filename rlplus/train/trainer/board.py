"""TensorBoard's log of a run."""

import logging
import os
import platform
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

logger = logging.getLogger(__name__)


class Board:
    """A new file of events in `folder`, to which each call appends at once. Events of earlier files from `step` on go.

    Nothing of the run depends on it: after a failure, on a full disk say, it warns and writes no more. torch's own
    writer has a thread, which then ends with a traceback, and the run with it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._file = folder / f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{os.getpid()}"
        self._failed = False
        version = {"file_version": "brain.Event:2"}
        begun = {"session_log": SessionLog(status=SessionLog.START)}
        self._append([Event(**version), Event(step=step, **version), Event(step=step, **begun)])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics."""
        self._append([Event(step=step, summary=summary.scalar(name, value)) for name, value in metrics.items()])

    def add_text(self, name: str, text: str, step: int) -> None:
        """Markdown."""
        self._append([Event(step=step, summary=summary.text(name, text))])

    def _append(self, events: list[Event]) -> None:
        if self._failed:
            return
        records = RecordWriter(content := BytesIO())
        for event in events:
            event.wall_time = time.time()
            records.write(event.SerializeToString())
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("ab") as file:
                file.write(content.getvalue())
        except OSError as error:
            logger.warning("TensorBoard will not see the run from here on: could not write %s: %s", self._file, error)
            self._failed = True
