"""Two ranks replay what one does: samples that move between them, ZeRO-3 with checkpointing, sequence parallelism."""

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from mixture_ranks import CASES, gradients
from mixtures import write_mixture
from rank_cases import all_samples
from trainer_runs import on_ranks

from rlplus.common.agree import initialize_distributed

PARALLEL = [name for name in CASES if name not in ("alone", "without replay")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_mixture(path / "start")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    initialize_distributed()
    return gradients(folder, "alone")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    on_ranks(processes.SUPPORT / "mixture_ranks.py", folder, *PARALLEL)
    results: dict[str, Any] = torch.load(folder / "gradients.pt")
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
def test_two_ranks_are_one(name: str, two: dict[str, Any], alone: Any) -> None:
    """`test_routing_replay.py` compares one rank's passes with float64."""
    want, rows = alone
    got, rows_of_ranks = two[name]
    known = sum(len(s.prompt) + len(s.response) - 1 for s in all_samples() if not s.external)
    assert rows == known == sum(rows_of_ranks)
    assert min(rows_of_ranks) > known / 4, "both ranks replay"
    assert got.keys() == want.keys()
    whole = float(torch.stack([g.norm() for g in want.values()]).norm())
    for key, gradient in want.items():
        assert float((got[key] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-7 * whole, key


def test_the_comparison_can_fail(folder: Path, alone: Any) -> None:
    without, _ = gradients(folder, "without replay")
    for key, gradient in alone[0].items():
        if "gate.weight" in key:
            assert float((without[key] - gradient).norm()) > 0.1 * float(gradient.norm()), key
