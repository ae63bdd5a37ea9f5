"""train.backward sampled: the same bits in a repeated and in a resumed run, near the exact ones, and its metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import metrics, run_config

from rlplus.train.config import TrainConfig
from rlplus.train.learner import policy
from rlplus.train.trainer import train

SAMPLED = {"backward": "sampled", "prompts_per_update": 2}


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model/model.safetensors")


def test_runs_repeat_resume_and_stay_near_the_exact_one(tmp_path: Path) -> None:
    """With a threshold that is large for the few hundred tokens of the model: nearly all are drawn."""
    sampled = SAMPLED | {"backward_threshold": 2.0**-6}
    one, again = (train(run_config(tmp_path, name, train=sampled | {"steps": 3})) for name in ("one", "again"))
    resumed = train(run_config(tmp_path, "resumed", train=sampled | {"steps": 2}))
    resumed = train(run_config(tmp_path, "resumed", train=sampled | {"steps": 3}), resume="newest")
    exact = train(run_config(tmp_path, "exact", train=SAMPLED | {"steps": 3, "backward": "exact"}))
    usual = train(run_config(tmp_path, "usual", train=SAMPLED | {"steps": 1}))  # 2^-12
    start = load_file(one / "scratch/model.safetensors")
    for name, weight in weights(one).items():
        assert torch.equal(weights(again)[name], weight), name
        assert torch.equal(weights(resumed)[name], weight), name
    moved, off = (
        sum((weights(one)[name] - other[name]).square().sum() for name in start) for other in (start, weights(exact))
    )
    assert 0 < off < 0.5 * moved  # Adam's first steps have the size of the rate, whatever the gradient's
    for row in metrics(one):
        assert 0.003 < row["actor/backward_noise"] < 0.2
        assert row["actor/backward_elements"] > 1
        assert row["actor/backward_flat_rows"] == 0
    assert "actor/backward_noise" not in metrics(exact)[0]
    assert all(row["actor/backward_noise"] < 0.003 for row in metrics(usual))


def test_every_micro_batch_and_update_has_random_numbers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, original = [], policy.linear_policy_loss

    def recorded(*args: Any, **options: Any) -> Any:
        seeds.append(options["seed"])
        return original(*args, **options)

    monkeypatch.setattr(policy, "linear_policy_loss", recorded)
    train(run_config(tmp_path, train=SAMPLED | {"steps": 2}))
    assert len(seeds) == len(set(seeds)) >= 4


def test_the_full_logits_have_no_sampled_backward_pass() -> None:
    with pytest.raises(ValueError, match="backward sampled: want another backend than reference"):
        TrainConfig(steps=1, backward="sampled", backend="reference")
