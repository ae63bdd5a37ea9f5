"""Two ranks compute the same as one: the same demonstrations at the same time, with the same loss and gradient."""

import sys
from pathlib import Path

import processes
import pytest
from recipe_ranks import CASES, train_all
from trainer_runs import environment, metrics

OWN = {
    "relift": "sft/updates",
    "hpt": "gate/demonstrated",
    "uft": "prefix/share",
    "prefix-rft": "prefix/share",
    "srft": "weights/supervised",
    "exgrpo": "replay/share",
    "prime": "process/score",
    "distill": "distill/divergence",
    "sampled": "distill/divergence",
    "self": "distill/divergence",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    script = processes.SUPPORT / "recipe_ranks.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = processes.run([*launch, str(script), str(folder), "two"], env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
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
