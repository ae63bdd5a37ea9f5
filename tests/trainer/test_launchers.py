"""Plain python, torchrun and the `deepspeed` launcher, on one node and on two: the same step, one set of metrics."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import processes
import pytest
from trainer_runs import metrics, run_config

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master_addr", "127.0.0.1"]
DEEPSPEED = [sys.executable, str(BIN / "deepspeed"), "--master_addr", "127.0.0.1"]


def run_together(*commands: list[str]) -> None:
    """Start all, wait for all."""
    here = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.getcwd()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        ranks = [stack.enter_context(processes.started(command, env=here, **pipes)) for command in commands]
        outputs = [rank.communicate(timeout=processes.PATIENCE_S)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launchers")


def one_step(folder: Path, name: str) -> str:
    """The configuration file of a step without chance: on demonstrations only."""
    config = run_config(
        folder, name, train={"steps": 1}, rollout={"group_size": 2}, algorithm={"preset": "sft"},
        evaluation={"data": {"path": str(folder / "task.jsonl"), "max_prompt_length": 8}, "every": 1, "samples": 2},
    )  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(config.to_yaml())
    return str(path)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, float]:
    run_together([sys.executable, "-m", "rlplus", "train", one_step(folder, "alone")])
    return metrics(folder / "alone")[0]


def check(folder: Path, name: str, alone: dict[str, float]) -> None:
    (row,) = metrics(folder / name)
    assert row.keys() == alone.keys()
    assert "val/task/pass@1" in row
    for key in ("actor/grad_norm", "actor/loss", "actor/entropy", "actor/prob_external"):
        assert row[key] == pytest.approx(alone[key], rel=1e-5), key
    assert (folder / name / "checkpoints/step-000001/rng-1.pt").is_file()  # there were two ranks
    assert (folder / name / "model/model.safetensors").is_file()


def test_torchrun(folder: Path, alone: dict[str, float]) -> None:
    train = ["-m", "rlplus", "train", one_step(folder, "torchrun")]
    run_together([*TORCHRUN, "--master_port", str(processes.free_port()), "--nproc_per_node", "2", *train])
    check(folder, "torchrun", alone)


def test_deepspeed(folder: Path, alone: dict[str, float]) -> None:
    train = ["--module", "rlplus", "train", one_step(folder, "deepspeed")]
    run_together([*DEEPSPEED, "--master_port", str(processes.free_port()), "--num_gpus", "2", *train])
    check(folder, "deepspeed", alone)


def test_two_nodes_with_torchrun(folder: Path, alone: dict[str, float]) -> None:
    port, train = str(processes.free_port()), ["-m", "rlplus", "train", one_step(folder, "nodes-torchrun")]
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", "--master_port", port]
    run_together(*[[*TORCHRUN, *nodes, "--node_rank", str(k), *train] for k in range(2)])
    check(folder, "nodes-torchrun", alone)


def test_two_nodes_with_deepspeed(folder: Path, alone: dict[str, float]) -> None:
    hosts = folder / "hostfile"
    hosts.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    port, train = str(processes.free_port()), ["--module", "rlplus", "train", one_step(folder, "nodes-deepspeed")]
    nodes = ["--hostfile", str(hosts), "--no_ssh", "--master_port", port]
    run_together(*[[*DEEPSPEED, *nodes, "--node_rank", str(k), *train] for k in range(2)])
    check(folder, "nodes-deepspeed", alone)


def test_sequence_parallel_run_with_rollouts_and_resume(folder: Path) -> None:
    """The engine in the same process keeps its own attention: it and the trainer agree about the logprobs."""
    model = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    config = run_config(
        folder, "sequences", model={"scratch": model}, checkpoint={"every": 1},
        train={"steps": 2, "sequence_parallel": 2, "zero_stage": 3, "prompts_per_update": 2},
    )  # fmt: skip
    path = folder / "sequences.yaml"
    path.write_text(config.to_yaml())
    command = ["--nproc_per_node", "2", "-m", "rlplus", "train", str(path)]
    run_together([*TORCHRUN, "--master_port", str(processes.free_port()), *command])
    run_together([*TORCHRUN, "--master_port", str(processes.free_port()), *command, "train.steps=3", "--resume"])
    rows = metrics(folder / "sequences")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/mean"] < 1e-5 for row in rows)
    assert all(row["reward/external"] == 1 for row in rows)
