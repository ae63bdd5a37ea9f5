"""Twenty steps of the presets whose step needs nothing but the objective; test_refill.py has dapo's."""

from pathlib import Path

import pytest
from engine_runs import same
from recipe_cases import draw_rewards
from trainer_runs import metrics, run_config

from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.trainer import train


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["rlplus-official", "rlplus-official-no-mis", "luffy", "grpo-official", "grpo-sft", "dr-grpo", "simplerl"]
)
def test_each_part_of_a_presets_loss_is_there_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    algorithm = ALGORITHMS[preset]

    def run(name: str, steps: int, resume: str | None = None) -> Path:
        section = {"steps": steps, "prompts_per_update": 2, "lr": 1e-2}
        return train(run_config(tmp_path, name, algorithm={"preset": preset}, train=section), resume=resume)

    rows = metrics(whole := run("whole", 20))
    assert len(rows) == 20
    parts = {
        "loss_internal": True,
        "loss_external": algorithm.demonstrates,
        "loss_entropy": algorithm.objective.entropy_coef,
        "loss_kl": algorithm.objective.kl_coef,
        "clip_fraction_high": algorithm.objective.internal == "clip",
    }
    for name, wanted in parts.items():
        assert any(row.get(f"actor/{name}") for row in rows) == bool(wanted), name
    assert not algorithm.demonstrates or all(row["reward/external"] == 1 for row in rows)
    run("parts", 10)
    resumed = run("parts", 20, resume="newest")
    assert same(whole, resumed)
    assert metrics(resumed) == rows
