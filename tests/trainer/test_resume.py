"""Resuming: nothing to resume, finished runs, damage, other inputs, other software."""

import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from engine_runs import changed, same
from trainer_runs import metrics, on_ranks, run_config, write_state

from rlplus.tools.cli import main
from rlplus.train import checkpoint
from rlplus.train.config import Config, surroundings
from rlplus.train.learner.pretrained import weights_fingerprint
from rlplus.train.trainer import Interrupted, Run, train
from rlplus.train.trainer.loop import Step


def stamps(place: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in place.rglob("*") if p.name != ".lock"}


def test_resume_begins_and_ends_where_it_says(tmp_path, capsys):
    config = run_config(tmp_path, train={"steps": 2}, checkpoint={"every": 1, "keep": 9})
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    assert main(["train", "--resume", str(path)]) == 2
    assert f"there is nothing to resume in {config.output_dir}, which has no checkpoint" in capsys.readouterr().err
    assert main(["train", "--resume=step-000001", str(path)]) == 2
    assert f"want a complete checkpoint in {config.output_dir}/checkpoints: none; got" in capsys.readouterr().err
    assert not Path(config.output_dir).exists(), "a mistyped folder is not made"
    assert main(["train", "--resume=auto", str(path)]) == 0
    assert "resumed" not in capsys.readouterr().err
    place = Path(config.output_dir)
    before = stamps(place)
    assert main(["train", str(path), "--resume"]) == 0
    said = capsys.readouterr().err.replace("\n", "")
    assert f"nothing to do: this run is finished, 2 steps; model in {place / 'model'}" in said
    assert stamps(place) == before
    assert main(["train", "--resume", str(path), "train.steps=3"]) == 0
    assert f"resumed at step 2, from {place}/checkpoints/step-000002" in capsys.readouterr().err.replace("\n", "")
    whole = {p.name: p.read_bytes() for p in (place / "model").iterdir()}
    rows = metrics(place)
    # Back to an older one, which is then the newest: the steps behind it are done again.
    assert main(["train", str(path), "train.steps=3", "--resume=step-000001"]) == 0
    assert {p.name: p.read_bytes() for p in (place / "model").iterdir()} == whole
    assert metrics(place) == rows
    assert main(["train", str(path), "--resume=step-000009"]) == 2
    said = capsys.readouterr().err.replace("\n", "")
    assert "step-000001, step-000002, step-000003; got 'step-000009'" in said
    assert main(["train", str(path), "--resume=../run"]) == 2
    assert "got '../run'" in capsys.readouterr().err


def test_a_model_that_was_not_written_is_written_on_resume(tmp_path, monkeypatch):
    """A run that ended between its last checkpoint and its export is not finished."""
    config = run_config(tmp_path, train={"steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.learner.policy.write_model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    assert (train(config, resume="newest") / "model/model.safetensors").is_file()


def test_a_model_that_was_removed_is_written_again_on_resume(tmp_path):
    config = run_config(tmp_path, train={"steps": 1})
    model = train(config) / "model"
    model.rename(tmp_path / "whole")
    train(config, resume="newest")
    assert {p.name: p.read_bytes() for p in model.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }


@pytest.mark.parametrize("earlier", [False, True])
def test_a_model_of_another_step_is_written_again_on_resume(tmp_path, earlier):
    """In the folder of an earlier version, which noted no hash, it stays."""
    folder = train(config := run_config(tmp_path, train={"steps": 2}))
    other = train(run_config(tmp_path, "other", train={"steps": 1}))
    whole = (folder / "model/model.safetensors").read_bytes()
    first = (other / "model/model.safetensors").read_bytes()
    assert whole != first
    (folder / "model/model.safetensors").write_bytes(first)
    if earlier:
        (folder / "checkpoints/exported").write_text("step-000002")
    train(config, resume="newest")
    assert (folder / "model/model.safetensors").read_bytes() == (first if earlier else whole)


def damaged(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 16
    file.write_bytes(content)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return bool(one == other)


def test_a_flipped_bit_is_found_or_has_no_effect(tmp_path):
    """Anywhere in an archive of torch.save: names, sizes and padding too."""
    file, value = tmp_path / "shard.pt", {"a": torch.arange(20), "b": torch.ones(3), "c": 7}
    torch.save(value, file)
    whole = file.read_bytes()
    found = 0
    for place in range(len(whole)):
        damaged(file, place)
        if checkpoint._damage({file: checkpoint.UNKNOWN}):
            found += 1
        else:
            with suppress(RuntimeError):  # torch finds it
                assert equal(torch.load(file), value), place
        file.write_bytes(whole)
    assert not checkpoint._damage({file: checkpoint.UNKNOWN})
    assert found >= 20 * 8 + 3 * 4  # the bytes of the numbers at least
    for entry in re.finditer(rb"PK\x01\x02", whole):
        for place in range(entry.start() + 20, entry.start() + 28):  # both sizes, found before torch raises
            damaged(file, place)
            assert checkpoint._damage({file: checkpoint.UNKNOWN}), place
            file.write_bytes(whole)


@pytest.mark.parametrize(
    "name", quick.first(2, ["optim_states", "missing", "model_states", "rng-0.pt", "state.json", "latest"])
)
def test_damage_is_named_and_resumed_before_it_when_told(tmp_path, name):
    config = run_config(tmp_path, train={"steps": 3}, checkpoint={"every": 1, "keep": 9})
    place = train(config)
    whole = shutil.copytree(place / "model", tmp_path / "whole/model").parent
    checkpoints = place / "checkpoints"
    for step in ("step-000003", "step-000002"):
        if name == "latest":
            (checkpoints / "latest").write_bytes(b"../run/step-000001")
        elif name == "missing":
            (checkpoints / step / "rng-0.pt").unlink()
        else:
            (file,) = (checkpoints / step).rglob(f"*{name}*")
            damaged(file, len(file.read_bytes()) // 2)
    with pytest.raises(ValueError, match="is damaged: ") as error:
        train(config, resume="newest")
    said = str(error.value)
    if name == "latest":
        assert "latest is damaged: want the name of a checkpoint, step-<digits>; got '../run/step-000001'" in said
    else:
        assert "step-000003/" in said
        assert ("No such file" if name == "missing" else "CRC-32") in said
        assert "The newest older checkpoint that is whole: step-000001; --resume=step-000001 goes on" in said
    train(config, resume="step-000001")
    assert same(whole, place)
    assert checkpoint.latest(checkpoints) == checkpoints / "step-000003"
    checkpoint.verify(checkpoints / "step-000003")


def mixed(checkpoints: Path, kind: str) -> None:
    """Change the set of files of step 3: each of them is whole."""
    last, other = checkpoints / "step-000003", checkpoints / "step-000002"
    if kind == "state.json":
        for name in ("state.json", "state.crc32"):
            shutil.copy(other / name, last / name)
    elif kind == "a further file":
        shutil.copy(last / "rng-0.pt", last / "rng-1.pt")
    elif kind == "a renamed folder":
        shutil.rmtree(last)
        shutil.copytree(other, last)
    else:
        (file,) = other.rglob(f"*{kind}*")
        shutil.copy(file, last / file.relative_to(other))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("optim_states", "optim_states.pt is damaged: state.json was saved with another file of this name"),
        ("model_states", "model_states.pt is damaged: state.json was saved with another file of this name"),
        ("rank-0.pt", "rank-0.pt is damaged: state.json was saved with another file of this name"),
        ("state.json", "state.json is damaged: it was saved at step 2"),
        ("a further file", "rng-1.pt is damaged: state.json lacks it"),
        ("a renamed folder", "state.json is damaged: it was saved at step 2"),
    ],
)
def test_a_file_of_another_step_is_damage(mixable: Path, tmp_path: Path, kind: str, message: str) -> None:
    """Although the file itself is whole; an older checkpoint stays the way out."""
    checkpoints = shutil.copytree(mixable / "checkpoints", tmp_path / "checkpoints")
    checkpoint.verify(checkpoints / "step-000003")
    mixed(checkpoints, kind)
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.verify(checkpoints / "step-000003")
    assert "The newest older checkpoint that is whole: step-000002" in str(error.value)


@pytest.fixture(scope="module")
def mixable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, each with the state of a rank."""
    folder = tmp_path_factory.mktemp("mixable")
    rollout = {"segment": 3}  # batches that wait are a rank's
    return train(run_config(folder, train={"steps": 3}, checkpoint={"every": 1, "keep": 9}, rollout=rollout))


def test_the_same_bytes_of_another_rank_are_damage(mixable: Path, tmp_path: Path) -> None:
    """torch.save puts the file's name into its entries: the random state of rank 0 is none of rank 1."""
    saved = tmp_path / "step-000003"
    shutil.copytree(mixable / "checkpoints/step-000003", saved)
    torch.save(torch.load(saved / "rng-0.pt", weights_only=False), saved / "rng-1.pt")
    state = checkpoint.read_state(saved)
    state["files"]["rng-1.pt"] = checkpoint._identity(saved / "rng-1.pt")
    write_state(saved, state)
    checkpoint.verify(saved)
    shutil.copy(saved / "rng-0.pt", saved / "rng-1.pt")
    with pytest.raises(ValueError, match=r"rng-1.pt is damaged: state.json was saved with another file of this name"):
        checkpoint.verify(saved)


def test_a_checkpoint_of_an_earlier_version_resumes_with_a_warning(tmp_path, caplog):
    """Its state.json has names only."""
    config = run_config(tmp_path, train={"steps": 1})
    saved = train(config) / "checkpoints/step-000001"
    state = checkpoint.read_state(saved)
    write_state(saved, state | {"files": sorted(state["files"])})
    caplog.clear()
    folder = train(changed(config, "train", steps=2), resume="newest")
    assert "is of rlplus 0.3 or earlier: files of other steps in it are not noticed" in caplog.text
    assert len(metrics(folder)) == 2
    (saved / "rng-0.pt").unlink()
    with pytest.raises(ValueError, match=r"rng-0.pt is damaged: .*No such file"):
        train(changed(config, "train", steps=3), resume="step-000001")


def test_files_are_on_the_disk_before_the_checkpoint_is_named(tmp_path, monkeypatch):
    flushed: list[Path] = []
    flush, publish = checkpoint.flush, checkpoint._publish

    def check(*arguments: Any) -> None:
        saving = tmp_path / "run/checkpoints/saving"
        assert {path for path in flushed if path.suffix == ".pt"} == set(saving.rglob("*.pt"))
        publish(*arguments)

    monkeypatch.setattr(checkpoint, "flush", lambda path: (flushed.append(path), flush(path)))
    monkeypatch.setattr(checkpoint, "_publish", check)
    train(run_config(tmp_path, train={"steps": 1}))
    assert len({path.name for path in flushed if path.suffix == ".pt"}) >= 3


def test_data_and_model_may_move_but_not_change(tmp_path):
    """Changed answers are noticed, and weights that differ in their values only."""
    start = train(run_config(tmp_path, "start", train={"steps": 1})) / "model"
    config = run_config(tmp_path, train={"steps": 1}, model={"path": str(start), "scratch": None})
    train(config)
    moved = shutil.copytree(start, tmp_path / "moved model")
    data = tmp_path / "moved.jsonl"
    (tmp_path / "task.jsonl").rename(data)
    config = changed(changed(config, "train", steps=2), "model", path=str(moved))
    config = changed(config, "data", path=str(data))
    rows = data.read_text()
    data.write_text(rows.replace('"answer": "2"', '"answer": "9"'))
    with pytest.raises(ValueError, match=r"step-000001 was written by a run on other data than .*moved.jsonl: it has"):
        train(config, resume="newest")
    data.write_text(rows)
    weights = bytearray((moved / "model.safetensors").read_bytes())
    first = 8 + int.from_bytes(weights[:8], "little")
    weights[first] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"step-000001 was written by a run on other model than .*moved model: it has"):
        train(config, resume="newest")
    weights[first] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert [row["step"] for row in metrics(train(config, resume="newest"))] == [1, 2]


def test_a_model_without_safetensors_has_no_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert weights_fingerprint(str(tmp_path)) is None


def test_other_software_is_said(tmp_path, monkeypatch, capsys):
    """Versions, and the file of a reward function; a run goes on with them."""
    grader = tmp_path / "own_grader.py"
    grader.write_text("def reward(text, answer):\n    return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = {"kind": None, "pattern": None, "function": "own_grader:reward"}
    evaluation = {"data": {"path": "-", "max_prompt_length": 8}, "every": 1}
    config = run_config(tmp_path, train={"steps": 1}, reward=reward, evaluation=evaluation)

    def edit(_: Run) -> dict[str, float]:
        """Edit the file while the run uses the version that it has read."""
        grader.write_text("def reward(text, answer):\n    return 2.0\n")
        return {}

    train(config, evaluate=edit)
    version = surroundings.version
    monkeypatch.setattr(surroundings, "version", lambda name: "99.0" if name == "deepspeed" else version(name))
    capsys.readouterr()
    train(changed(config, "train", steps=2), resume="newest")
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"since that checkpoint deepspeed has changed: {version('deepspeed')} -> 99.0" in said
    assert "since that checkpoint the code of reward.function has changed" in said
    assert "transformers has changed" not in said


@pytest.mark.parametrize(
    ("number", "ignored"),
    quick.first(2, [(signal.SIGUSR1, False), (signal.SIGHUP, True), (signal.SIGUSR1, True), (signal.SIGHUP, False)]),
)
def test_announcements_of_the_end_stop_a_run_unless_they_are_ignored(tmp_path, monkeypatch, number, ignored):
    """SIGHUP and SIGUSR1 may be ignored, as under nohup."""
    config = run_config(tmp_path, train={"steps": 2})
    end = Step.end

    def signalled(step: Step, *arguments: Any) -> None:
        if not step.run.progress.step:
            os.kill(os.getpid(), number)
        end(step, *arguments)

    monkeypatch.setattr(Step, "end", signalled)
    before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        if ignored:
            train(config)
        else:
            with pytest.raises(Interrupted) as stop:
                train(config)
            assert stop.value.signal == number
    finally:
        signal.signal(number, before)
    assert len(metrics(Path(config.output_dir))) == (2 if ignored else 1)


DIES_ONCE = """
import os, signal, sys
from pathlib import Path
from rlplus.tools.cli import main
from rlplus.train.trainer.loop import Step
end, died = Step.end, Path(sys.argv[1])
def dying(step, *arguments):
    if step.run.progress.step == 2 and step.run.rank == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    end(step, *arguments)
Step.end = dying
sys.exit(main(["train", "--resume=auto", sys.argv[2]]))
"""


def launched(config: Config, folder: Path, *options: str) -> None:
    path, script = Path(f"{config.output_dir}.yaml"), folder / "dies.py"
    path.write_text(config.to_yaml())
    script.write_text(DIES_ONCE)
    on_ranks(*options, script, folder / "died", path)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path):
    """It ends bit for bit as a run that was left alone."""
    sections = {"train": {"steps": 4}, "checkpoint": {"every": 1}}
    broken, whole = run_config(tmp_path, "broken", **sections), run_config(tmp_path, "whole", **sections)
    launched(broken, tmp_path, "--max-restarts", "1")
    assert (tmp_path / "died").exists()
    launched(whole, tmp_path)
    assert same(Path(whole.output_dir), Path(broken.output_dir))
    assert metrics(Path(whole.output_dir)) == metrics(Path(broken.output_dir))
