"""TensorBoard's log: what its own reader finds, and a run that cannot write it."""

import logging
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlplus.train.trainer.metrics import Board


def test_steps_that_are_done_again_replace_the_earlier_ones(tmp_path: Path) -> None:
    first = Board(tmp_path / "tensorboard", 1)
    for step in (1, 2, 3):
        first.add(step, {"a/b": step / 8, "c": 1.0})
    first._file.rename(first._file.with_name("events.out.tfevents.1"))
    again = Board(tmp_path / "tensorboard", 3)
    again.add(3, {"a/b": 9.0})
    again.add_text("samples", "*text*", 3)
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [(event.step, event.value) for event in read.Scalars("a/b")] == [(1, 0.125), (2, 0.25), (3, 9.0)]
    assert read.Tensors("samples/text_summary")[0].tensor_proto.string_val == [b"*text*"]


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        board = Board(tmp_path / "tensorboard", 1)
        board.add(1, {"a": 1.0})
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("TensorBoard will not see the run from here on: could not write")
    assert str(tmp_path / "tensorboard/events.out.tfevents.") in message
