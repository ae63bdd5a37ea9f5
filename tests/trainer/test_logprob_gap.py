"""The judgement of a gap between engine and trainer: over ranks, with what is no number, and what measuring changes."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engine_runs import same
from trainer_runs import run_config

from rlplus.train.trainer import train
from rlplus.train.trainer.engine import Compared, LogprobGap, SyncedEngine

BF16 = {"scratch": {"hidden_size": 32, "layers": 2, "heads": 1, "intermediate_size": 64}, "dtype": "bfloat16"}
NAN = float("nan")


class Rounded:
    """A policy whose logprobs change by these numbers."""

    def __init__(self, *changes: float) -> None:
        self.changes, self.calls = torch.tensor(changes), 0

    def rounding(self, _: Any) -> torch.Tensor:
        self.calls += 1
        return self.changes


def judged(
    tmp_path: Path, gaps: list[tuple[float, float]], policy: Any, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> str:
    """The fault of ranks with these sums and counts, of which this one has the first; all round alike."""
    monkeypatch.setattr("rlplus.train.trainer.engine.agree.gathered", lambda own: [own, *gaps[1:]])
    config = run_config(tmp_path, model=BF16, **sections)
    compared = cast("list[Compared]", [(None, torch.tensor([-1.0, NAN, -1.0]))])
    return LogprobGap(config, policy).fault(*gaps[0], compared, "some", "step 3")


def test_each_rank_counts_and_not_the_mean_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Rounded(0.01, 5.0, 0.03)  # the second was not sampled
    assert judged(tmp_path, [(0.1, 10.0), (0.1, 10.0)], policy, monkeypatch) == ""
    assert policy.calls == 0
    one_of_two = [(0.1, 10.0), (4.0, 10.0)]
    monkeypatch.setattr(LogprobGap, "_rounding", lambda *_: [0.02, 0.02])
    fault = judged(tmp_path, one_of_two, policy, monkeypatch)
    assert "step 3: the mean gap between the logprobs of the some engine and of the trainer is 4.00e-01" in fault
    assert "Rounding does not explain it, the engine runs another model: " in fault
    monkeypatch.setattr(LogprobGap, "_rounding", lambda *_: [1.0, 0.02])  # another rank's excuses nothing
    assert "Rounding does not explain it" in judged(tmp_path, one_of_two, policy, monkeypatch)


def test_the_shards_of_a_sequence_are_judged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of a shard may be far off."""
    shards = [(0.1, 99.0), (0.4, 1.0)]
    parallel = {"sequence_parallel": 2}
    assert judged(tmp_path, shards, Rounded(), monkeypatch, train=parallel) == ""
    monkeypatch.setattr(LogprobGap, "_rounding", lambda *_: [0.0, 0.0])
    assert judged(tmp_path, shards, Rounded(), monkeypatch)


@pytest.mark.parametrize("changes", [(NAN, 0.0, 0.02), (float("inf"), 0.0, 0.02)])
def test_what_is_not_a_number_does_not_switch_the_judgement_off(
    changes: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean change is that of the others, .02; a gap that is no number is no rounding."""
    assert judged(tmp_path, [(0.59, 10.0)], Rounded(*changes), monkeypatch) == ""
    assert "Rounding does not explain it" in judged(tmp_path, [(0.61, 10.0)], Rounded(*changes), monkeypatch)
    policy = Rounded(*changes)
    for total in (NAN, float("inf")):
        assert "is inf; want at most 0.05. Not all of these" in judged(tmp_path, [(total, 1.0)], policy, monkeypatch)
    assert policy.calls == 0


def test_no_memory_for_the_measurement_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Rounded()

    def fails(_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy, "rounding", fails)
    with pytest.raises(torch.OutOfMemoryError):
        judged(tmp_path, [(1.0, 1.0)], policy, monkeypatch)


@pytest.mark.parametrize("stage", [1, 3])
def test_measuring_changes_no_bit_of_a_run(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections: Any = {"model": BF16, "train": {"steps": 2, "zero_stage": stage}, "rollout": {"max_logprob_gap": 1.0}}
    without = train(run_config(tmp_path, "without", **sections))
    measured = []

    def measuring(engine: SyncedEngine, total: float, count: float, compared: Any, when: str) -> None:
        measured.extend(engine.policy.rounding(batch) for batch, _ in compared)

    monkeypatch.setattr(SyncedEngine, "check", measuring)
    assert same(without, train(run_config(tmp_path, "with", **sections)))
    assert len(measured) >= 3
    assert all(0 < float(change.max()) < 1 for change in measured)
