"""Runs that sample from kept tokens: two steps, resumed bit for bit, with what waits in a checkpoint."""

import math
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from engine_runs import changed, engine_in_this_process, leave_out, same
from recipe_cases import demonstrations_of_steps, draw_rewards
from trainer_runs import metrics, run_config

from rlplus.train.config import Config
from rlplus.train.rollout import RunFailed
from rlplus.train.trainer import train

SAMPLED = {"top_k": 12, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8}
REPLAYED = {"preset": "exgrpo", "recipe": {"start": 0.0}}
CASES = [("rlplus", 1), (REPLAYED, 0), ("grpo", 0), ("gspo", 2)]


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such that every algorithm has a gradient; and the process's engine in this process, which takes seconds less."""
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    engine_in_this_process(monkeypatch)


def config(folder: Path, output: str, algorithm: Any, overlap: int, steps: int) -> Config:
    rollout = SAMPLED | ({"mode": "process"} if overlap else {})
    return run_config(
        folder,
        output,
        algorithm={"preset": algorithm} if isinstance(algorithm, str) else algorithm,
        rollout=rollout,
        train={"steps": steps, "overlap": overlap, "prompts_per_update": 2},
    )


@pytest.mark.parametrize(("algorithm", "overlap"), quick.first(2, CASES))
def test_a_run_resumes_bit_for_bit(tmp_path: Path, algorithm: Any, overlap: int) -> None:
    whole = train(config(tmp_path, "whole", algorithm, overlap, 4))
    parts = config(tmp_path, "parts", algorithm, overlap, 2)
    saved = train(parts) / "checkpoints/step-000002/rank-0.pt"
    text = str(torch.load(saved, weights_only=False)) if saved.exists() else ""
    assert ("KeptSets(counts=array('i', [" in text) == (algorithm != "grpo"), "want what waits to have its sets"
    train(changed(parts, "train", steps=4), resume="newest")
    assert same(whole, Path(parts.output_dir))
    rows = metrics(whole)
    assert metrics(Path(parts.output_dir)) == rows
    for row in rows:
        assert 1 < row["batch/kept_tokens"] < 12
        assert row.get("mismatch/max", 0.0) < 1e-4
        assert row["actor/entropy_internal"] <= math.log(12)


@pytest.mark.parametrize(
    ("rollout", "sections", "message"),
    [
        ({"top_p": 0.9}, {}, "top_p 0.9 and min_p 0 want top_k, .* each sampled one: 2 to 1024; got 0"),
        ({"min_p": 0.1}, {}, "top_p 1 and min_p 0.1 want top_k, .*; got 0"),
        ({"top_k": 1}, {}, "top_k 1 keeps one token, .*; want 0, or 2 or more"),
        ({"top_k": 1025}, {}, "less than or equal to 1024"),
        ({"top_k": 8, "top_p": 0.0}, {}, "greater than 0"),
        ({"top_k": 8, "min_p": 1.0}, {}, "less than 1"),
        (
            {"top_k": 8, "engine": "vllm"},
            {"evaluation": {"every": 5, "data": {"path": "v.jsonl"}}},
            "evaluation.every: evaluations sample from the whole vocabulary, .*: want rollout.engine transformers",
        ),
        (
            {"top_k": 8},
            {"algorithm": {"preset": "sft"}},
            "rollout.top_k would have no effect, .*: the preset generates nothing",
        ),
    ],
)
def test_settings_that_contradict(
    tmp_path: Path, rollout: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run_config(tmp_path, rollout=rollout, **sections)


def test_an_engine_without_sets_ends_the_run_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "kept")
    message = "want the tokens that top_k 12, top_p 0.9, min_p 0.01 kept, .* the transformers engine gave none"
    with pytest.raises(RunFailed, match=message):
        train(config(tmp_path, "run", "grpo", 0, 1))
    assert not metrics(tmp_path / "run")


def test_a_replayed_rollout_has_its_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its author is the policy renormalised over them, at the ratio r = 1 as long as the policy has not changed."""
    seen = demonstrations_of_steps(monkeypatch)
    still = config(tmp_path, "run", REPLAYED, 0, 3)
    folder = train(changed(still, "train", lr=1e-30))
    assert seen
    assert all(sample.kept is not None and sample.kept.fault(sample.response) is None for sample in seen)
    ratios = [row["actor/ratio_external_mean"] for row in metrics(folder) if "actor/ratio_external_mean" in row]
    assert ratios
    assert ratios == pytest.approx([1 / 1.1] * len(ratios), abs=1e-4)  # r / (r + .1)
