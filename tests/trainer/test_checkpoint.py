"""Checkpoints: exact resume, and never a half-written one, whenever the process is killed."""

import json
import signal
import sys
from pathlib import Path

import processes
import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import environment, metrics, on_ranks, run_config, write_state

from rlplus import __version__
from rlplus.train import checkpoint
from rlplus.train.trainer import train


def with_steps(config, steps, output=None):
    train_section = config.train.model_copy(update={"steps": steps})
    changes = {"train": train_section} | ({"output_dir": str(output)} if output else {})
    return config.model_copy(update=changes)


@pytest.mark.parametrize(
    ("stage", "preset", "dtype"),
    [
        (2, "grpo", "bfloat16"),
        *(
            pytest.param(stage, "rlplus", dtype, marks=pytest.mark.slow)
            for stage in (1, 3)
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_resume_is_bitwise_over_an_epoch_boundary(tmp_path, stage, preset, dtype):
    """6 prompts, 4 per step: steps 2, 3 and 5 cross into the next epoch."""
    sections = {"model": {"dtype": dtype}, "train": {"zero_stage": stage}, "algorithm": {"preset": preset}}
    config = run_config(tmp_path, **sections)
    whole = train(with_steps(config, 6, tmp_path / "whole"))
    train(with_steps(config, 2))
    train(with_steps(config, 4), resume="newest")
    parts = train(with_steps(config, 6), resume="newest")
    first, second = (load_file(folder / "model/model.safetensors") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert metrics(whole) == metrics(parts)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from rlplus.train import checkpoint
from rlplus.train.config import load_config
from rlplus.train.trainer import train

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

saves = 0
save = checkpoint.save
def second_save_dies(engines, folder, *rest, **options):
    global saves
    saves += 1
    if saves == 2:
        if sys.argv[3] == "shards":  # some of DeepSpeed's files are there
            engines["policy"]._save_zero_checkpoint = die
        elif sys.argv[3] == "flush":  # all files are there, not yet renamed
            checkpoint.flush = die
        else:  # renamed, not yet named in `latest`
            real = checkpoint.Path.replace
            checkpoint.Path.replace = lambda self, to: die() if to.name == "latest" else real(self, to)
    return save(engines, folder, *rest, **options)

checkpoint.save = second_save_dies
train(load_config(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "moment", ["shards", *(pytest.param(late, marks=pytest.mark.slow) for late in ("flush", "pointer"))]
)
def test_kill_in_the_middle_of_a_checkpoint_loses_only_that_one(tmp_path, moment):
    config = run_config(tmp_path, train={"steps": 3}, checkpoint={"every": 1})
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    command = [sys.executable, "-c", KILLED, str(path), str(processes.SUPPORT), moment]
    done = processes.run(command, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    checkpoints = Path(config.output_dir) / "checkpoints"
    assert checkpoint.latest(checkpoints).name == "step-000001"
    leftovers = {p.name for p in checkpoints.iterdir() if p.is_dir()} - {"step-000001"}
    assert leftovers == ({"step-000002"} if moment == "pointer" else {"saving"})
    folder = train(config, resume="newest")
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    whole = train(config.model_copy(update={"output_dir": str(tmp_path / "whole"), "checkpoint": config.checkpoint}))
    assert metrics(whole) == metrics(folder)
    assert checkpoint.latest(checkpoints).name == "step-000003"
    assert not (checkpoints / "saving").exists()


def test_a_torn_last_line_of_metrics_is_dropped_on_resume(tmp_path):
    config = run_config(tmp_path, checkpoint={"every": 1})
    folder = train(with_steps(config, 1))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "from": "a step after the checkpoint"}) + "\n" + '{"step": 3, "rew')
    train(with_steps(config, 2), resume="newest")
    assert [sorted(row)[0] for row in metrics(folder)] == ["actor/active_rows"] * 2


def test_latest_refuses_a_pointer_to_nothing(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / "latest").write_text("step-000007")
    with pytest.raises(ValueError, match=r"names step-000007, which is missing or incomplete"):
        checkpoint.latest(tmp_path)


def test_a_failing_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    config = run_config(tmp_path, checkpoint={"every": 1})
    folder = train(with_steps(config, 1))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"could not write the checkpoint of step 2 under .*No space left"):
        train(with_steps(config, 2), resume="newest")
    monkeypatch.undo()
    assert checkpoint.latest(folder / "checkpoints").name == "step-000001"
    train(with_steps(config, 2), resume="newest")
    assert [row["step"] for row in metrics(folder)] == [1, 2]


@pytest.mark.slow
def test_a_leftover_without_a_pointer_costs_no_checkpoint(tmp_path):
    """A process killed between rename and pointer leaves one that is newer than a resumed run's next checkpoint."""
    config = run_config(tmp_path, checkpoint={"every": 1, "keep": 1})
    folder = train(with_steps(config, 1))
    (folder / "checkpoints/step-000009").mkdir()
    train(with_steps(config, 2), resume="newest")
    assert checkpoint.latest(folder / "checkpoints").name == "step-000002"
    assert sorted(p.name for p in (folder / "checkpoints").glob("step-*")) == ["step-000002", "step-000009"]


def test_a_checkpoint_from_before_a_key_existed_resumes_and_one_of_a_later_version_is_refused(tmp_path):
    config = run_config(tmp_path)
    saved = train(with_steps(config, 1)) / "checkpoints/step-000001"
    state = json.loads((saved / "state.json").read_text())
    newer = {"config": state["config"] | {"telepathy": {"gain": 2}}, "surroundings": {"rlplus": "9.1.0"}}
    write_state(saved, state | newer)
    message = rf"^{saved} was written by rlplus 9.1.0, this is {__version__}, which does not read its configuration: "
    with pytest.raises(
        ValueError, match=message + r"telepathy.gain: unknown key\. Go on with that version, or a later"
    ):
        train(with_steps(config, 2), resume="newest")
    del state["config"]["train"]["backend"], state["config"]["rollout"]["mode"]
    write_state(saved, state)
    other = config.model_copy(update={"train": config.train.model_copy(update={"backend": "reference"})})
    with pytest.raises(ValueError, match=r"train.backend was 'auto', is 'reference'$"):
        train(with_steps(other, 2), resume="newest")
    train(with_steps(config, 2), resume="newest")


def test_ranks_that_see_other_checkpoints_are_refused(tmp_path, monkeypatch):
    def gathered(own):
        return [own, ("step-000007", None)] if isinstance(own, tuple) else [own]

    monkeypatch.setattr("rlplus.common.agree.gathered", gathered)
    with pytest.raises(
        ValueError, match=r"all ranks share; its newest checkpoint is rank 0: None, rank 1: step-000007"
    ):
        train(run_config(tmp_path))


def test_a_state_without_its_checksum_or_a_key_is_refused(tmp_path):
    """Such are the checkpoints of 0.1.0, too."""
    config = run_config(tmp_path)
    saved = train(with_steps(config, 1)) / "checkpoints/step-000001"
    state = json.loads((saved / "state.json").read_text())
    for key in checkpoint.WRITTEN:
        write_state(saved, {name: value for name, value in state.items() if name != key})
        with pytest.raises(ValueError, match=r"state.json is damaged: want an object with files, rank_state, step"):
            train(with_steps(config, 2), resume="newest")
    (saved / "state.crc32").unlink()
    missing = r"state.json is damaged: state.crc32 beside it is missing, which rlplus writes since version 0\.2\.0"
    with pytest.raises(ValueError, match=missing):
        train(with_steps(config, 2), resume="newest")


ONE_FULL_DISK = """
import os, sys, torch
from rlplus.train.config import load_config
from rlplus.train.trainer import train

def full(*_, **__):
    raise OSError(28, "No space left on device")

if os.environ["RANK"] == sys.argv[2]:
    torch.save = full
try:
    train(load_config(sys.argv[1]))
except OSError as error:
    sys.stdout.write(f"rank {os.environ['RANK']} says: {error}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_both(tmp_path, rank):
    """Neither waits for the other in the barrier that ends DeepSpeed's save."""
    config = run_config(tmp_path, train={"steps": 1})
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    (tmp_path / "script.py").write_text(ONE_FULL_DISK)
    said = on_ranks(tmp_path / "script.py", tmp_path / "run.yaml", rank)
    for listener in (0, 1):
        assert f"rank {listener} says: could not write the checkpoint of step 1" in said
    assert said.count(f"rank {rank}: [Errno 28] No space left on device") == 2
    assert checkpoint.latest(tmp_path / "run/checkpoints") is None


def test_only_the_newest_are_kept(tmp_path):
    folder = train(with_steps(run_config(tmp_path, checkpoint={"every": 1, "keep": 2}), 4))
    assert sorted(p.name for p in (folder / "checkpoints").glob("step-*")) == ["step-000003", "step-000004"]
