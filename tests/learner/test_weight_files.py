"""Files of weights in a folder that many may share: their size, who removes them, and what others plant there."""

import fcntl
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from rlplus.rollout import push
from rlplus.rollout.push import WeightFiles


def test_files_are_cut_at_the_budget(tmp_path: Path) -> None:
    files = WeightFiles(str(tmp_path), 1, per_node=True)
    weights = {f"w{i}": torch.randn(size) for i, size in enumerate((200_000, 50_000, 12_144, 1, 400_000, 5))}
    files.write(weights.items())
    sizes = [path.stat().st_size for path in sorted(files.folder.glob("*.safetensors"))]
    assert len(sizes) == 4  # 250,000 floats fill a MiB but for 12,144; the 1 starts a second one; then one too large
    assert sum(size > 2**20 + 4096 for size in sizes) == 1
    got = dict(files)
    assert list(got) == list(weights)
    assert all(torch.equal(got[name], weights[name]) for name in weights)
    files.write([("w0", torch.zeros(3))])
    assert list(dict(files)) == ["w0"]
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    first, second = (WeightFiles(str(tmp_path), 1, per_node=True) for _ in range(2))
    assert first.folder.exists()
    os.close(push._locks.pop(str(first.folder)))  # the death of its process does the same
    third = WeightFiles(str(tmp_path), 1, per_node=True)
    assert not first.folder.exists()
    assert second.folder.exists()
    second.close()
    third.close()
    assert not list(tmp_path.iterdir())


def killed(base: Path) -> Path:
    """A folder with weights, as a killed run leaves it."""
    files = WeightFiles(str(base), 1, per_node=True)
    files.write([("w0", torch.zeros(3))])
    os.close(push._locks.pop(str(files.folder)))
    return files.folder


def test_planted_names_neither_hang_nor_fail_a_run_nor_cost_a_file(tmp_path: Path) -> None:
    """Anyone can create a name in /dev/shm, and swap what it stands for."""
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in (".lock", "thesis"):
        (precious / name).write_text("mine")

    def fifo(name: Path) -> None:
        os.mkfifo(name)

    def fifo_as_lock(name: Path) -> None:
        name.mkdir()
        os.mkfifo(name / ".lock")

    def link(name: Path) -> None:
        name.symlink_to(precious)

    def link_as_lock(name: Path) -> None:
        name.mkdir()
        (name / ".lock").symlink_to(precious / ".lock")

    def closed(name: Path) -> None:
        name.mkdir(mode=0)

    def file(name: Path) -> None:
        name.write_text("")

    for plant in (fifo, fifo_as_lock, link, link_as_lock, closed, file):
        base = tmp_path / plant.__name__
        base.mkdir()
        planted = base / f"{push._prefix()}planted"
        plant(planted)
        killed(base)
        WeightFiles(str(base), 1, per_node=True).close()
        assert list(base.iterdir()) == [planted], "a run's own goes, whatever is beside it"
    assert sorted(path.name for path in precious.iterdir()) == [".lock", "thesis"]


def test_what_is_swapped_while_it_is_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder without a sticky bit another user can rename a folder between the check and the removal."""
    base, precious = tmp_path / "shared", tmp_path / "precious"
    base.mkdir()
    precious.mkdir()
    (precious / "thesis").write_text("mine")
    left = killed(base)
    flock = fcntl.flock

    def swap(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if precious.exists():
            left.rename(tmp_path / "moved")
            precious.rename(left)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", swap)
        push._remove_abandoned(base)
    assert (left / "thesis").read_text() == "mine"
    assert list((tmp_path / "moved").iterdir()) == [], "what was checked is what was emptied"


def test_two_users_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second user's run starts beside a living run's folder and a dead run's; neither user loses a folder."""
    with TemporaryDirectory(prefix="rlplus-test-") as name:
        base = Path(name)
        base.chmod(0o1777)  # the mode of /dev/shm
        living, dead = WeightFiles(str(base), 1, per_node=True), killed(base)
        user = os.geteuid()
        other = 12345 if user == 0 else user + 1
        try:
            if user == 0:
                os.seteuid(other)
            else:  # the kernel lets only root be another user: this one's files then look like another's
                monkeypatch.setattr(os, "geteuid", lambda: other)
            (base / f"rlplus-weights-{user}-planted").mkdir()
            theirs = WeightFiles(str(base), 1, per_node=True)
            mine = killed(base)
        finally:
            if user == 0:
                os.seteuid(user)
            monkeypatch.undo()
        assert (dead / ".lock").exists()
        # A name of this user's, planted by the other one.
        lure = base / f"{push._prefix()}lure"
        if user == 0:
            mine.rename(lure)
        WeightFiles(str(base), 1, per_node=True).close()
        assert not dead.exists()
        assert living.folder.exists()
        assert theirs.folder.exists()
        assert user != 0 or (lure / ".lock").exists()
        living.close()
        theirs.close()
