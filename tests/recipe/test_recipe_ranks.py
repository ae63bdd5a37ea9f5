"""Two ranks compute the same as one: the same demonstrations at the same time, with the same loss and gradient."""

from pathlib import Path

import processes
import pytest
from recipe_ranks import CASES, train_all
from trainer_runs import metrics, on_ranks

OWN = {
    "relift": "sft/updates",
    "hpt": "gate/demonstrated",
    "uft": "prefix/share",
    "prefix-rft": "prefix/share",
    "bread": "prefix/share",
    "srft": "weights/supervised",
    "exgrpo": "replay/share",
    "prime": "process/score",
    "distill": "distill/divergence",
    "sampled": "distill/divergence",
    "self": "distill/divergence",
    "sdpo": "distill/divergence",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(processes.SUPPORT / "recipe_ranks.py", folder, "two")
    train_all(folder, "one")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one(folder: Path, name: str) -> None:
    one, two = (metrics(folder / f"{output}-{name}") for output in ("one", "two"))
    assert [row.keys() for row in two] == [row.keys() for row in one]
    for row, other in zip(one, two, strict=True):
        for metric, value in row.items():
            assert other[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
    assert len({row[OWN[name]] for row in one}) > 1
    assert all(row["actor/grad_norm"] > 0 for row in one)
