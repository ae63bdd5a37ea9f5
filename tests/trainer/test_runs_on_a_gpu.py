"""The runs of test_simulated_gpu.py on a real GPU, with the kernels and deterministic updates."""

from pathlib import Path

import pytest
from device_cases import OPTIONAL, SETTINGS, check, draw_rewards, sections
from mixtures import write_mixture
from teachers import make_teacher
from trainer_runs import write_task

from rlplus.train.algorithm import ALGORITHMS

pytestmark = pytest.mark.gpu
NEEDS = {"lora": "peft", "eight bits": "bitsandbytes"}


@pytest.mark.parametrize("name", [*SETTINGS, *OPTIONAL, *ALGORITHMS])
def test_a_run_verifies_and_resumes_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package := NEEDS.get(name.split(",")[0]):
        pytest.importorskip(package)
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    teacher = make_teacher(tmp_path)
    write_mixture(tmp_path / "mixture")
    write_task(tmp_path)
    (own := tmp_path / "run").mkdir()
    check(own, sections(name, teacher), backend="triton", deterministic=True)
