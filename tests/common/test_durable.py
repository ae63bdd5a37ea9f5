"""Durable files: whole or as before, on the disk before they have their name, sealed against damage, and locked."""

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest

from rlplus.common import durable
from rlplus.common.durable import UNSEALED, is_sealed, locked, make_folder, remove_unfinished, replacing, write_text

PACKAGE, EXPERIMENTS = (Path(__file__).parents[2] / name for name in ("rlplus", "experiments"))


def test_a_file_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents first, then the name, then the folder's list of names; until then the old file is there."""
    (path := tmp_path / "a.json").write_text("old")
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        events.append(f"flush {os.readlink(f'/proc/self/fd/{descriptor}')}")
        assert path.read_text() == ("old" if len(events) == 1 else "new")
        fsync(descriptor)

    def noted_replace(self: Path, target: Path) -> Path:
        assert self.read_text() == "new"
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_text(path, "new")
    assert events == [f"flush {path}.{os.getpid()}.new", "rename", f"flush {tmp_path}"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_text(path := tmp_path / "a.txt", "old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            file.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=r"could not write .*/none/a\.txt: No such file"):
        write_text(tmp_path / "none/a.txt", "")


def test_links_are_followed_and_devices_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (link := tmp_path / "link.txt").symlink_to("real/a.txt")
    write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "real/a.txt").read_text() == "text"
    (full := tmp_path / "full.txt").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"could not write .*/full\.txt: No space left on device"):
        write_text(full, "text")
    assert Path("/dev/full").is_char_device()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Leftovers of the files asked for, and nothing that a user called so."""
    killed = "import os, sys\nfrom pathlib import Path\nfrom rlplus.common.durable import replacing\n"
    killed += "with replacing(Path(sys.argv[1])) as file:\n    os.kill(os.getpid(), 9)"
    write_text(path := tmp_path / "step-1.json", "old")
    assert processes.run([sys.executable, "-c", killed, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    kept = {"step-1.json", "step-2.json.7.new", "notes.new", "step-1.json.new"}
    for name in kept - {"step-1.json"}:
        (tmp_path / name).touch()
    assert len(list(tmp_path.iterdir())) == 5
    remove_unfinished(tmp_path, r"step-1\.json")
    assert {left.name for left in tmp_path.iterdir()} == kept


def test_every_flipped_bit_of_a_sealed_file_is_told(tmp_path: Path) -> None:
    write_text(path := tmp_path / "a.json", f'{{"count": 17, "checksum": "{UNSEALED}"}}\n', sealed=True)
    whole = path.read_bytes()
    assert is_sealed(whole, path)
    assert UNSEALED.encode() not in whole
    seal = slice(place := whole.index(b"crc32 of"), place + len("crc32 of this file: "))
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        if flipped[seal] != whole[seal]:  # then it is no seal, and what it guarded is whole
            assert not is_sealed(bytes(flipped), path)
            continue
        with pytest.raises(ValueError, match=r"a\.json is damaged: its CRC-32 is wrong"):
            is_sealed(bytes(flipped), path)
    assert not is_sealed(b'{"count": 17}', path)
    with pytest.raises(ValueError, match=r"want 'crc32 of this file: 0{8}' in .*a\.json"):
        write_text(path, '{"count": 18}', sealed=True)
    assert path.read_bytes() == whole


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    script = "import sys\nfrom pathlib import Path\nfrom rlplus.common.durable import locked\n"
    script += "with locked(Path(sys.argv[1]), 'taken'):\n    print(flush=True)\n    sys.stdin.read()"
    command = [sys.executable, "-c", script, str(file := tmp_path / ".lock")]
    with processes.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        held = rf"^here\. It is held by process {holder.pid} on .+ since 20\S+: python\S* -c 'import sys .*$"
        with pytest.raises(ValueError, match=held), locked(file, "here"):
            pass
        holder.kill()
        holder.wait()
        with locked(file, "here"):
            assert file.read_text().startswith(f"process {os.getpid()} on ")


def test_errors_name_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a full or failing disk come without a name from Python."""
    (lock := tmp_path / ".lock").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"could not write .*/\.lock: "), locked(lock, "here"):
        pass

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"could not flush {tmp_path} to the disk: Input/output error"):
        make_folder(tmp_path / "new")


ALLOWED = {
    "common/durable.py": "it is the module",
    "train/reward/grading_worker.py": "a descriptor that it has been given",
    "sandbox/jail/namespaces.py": "files of /proc",
    "sandbox/jail/programs.py": "pipes and descriptors that it has been given",
    "sandbox/sandbox.py": "a pipe to the program's process",
    "train/trainer/metrics.py": "metrics.jsonl grows by a flushed line; a cut last one is dropped; "
    "TensorBoard's log grows; a lost end is only not shown",
    "train/trainer/reporter.py": "progress.json, renamed, every few seconds; a lost one is made again",
    "train/config/commented_yaml.py": "a file that must be new, and which nothing reads before a person does",
    "tools/compare/launches.py": "the output of a command, while it runs",
    "experiments/demo/demo_run.py": "the output of a command, while it runs",
    "loss/guard/verdicts.py": "a cache, renamed, whose files must be this user's alone; a lost one is made again",
    "bench/measure.py": "a file of /proc",
    "train/rollout/worker_answers.py": "a pipe",
}


def in_place(text: str) -> Iterator[int]:
    """Lines that write to a file under its own name."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [ast.unparse(each) for each in (*node.args, *(keyword.value for keyword in node.keywords))]
        modes = [each for each in texts if "'" in each and set(each.strip("'")) & set("wxa") and len(each) <= 5]
        method = isinstance(node.func, ast.Attribute)
        if "os.devnull" not in texts and (
            (method and name in ("write_text", "write_bytes"))
            or (name in ("open", "fdopen", "NamedTemporaryFile") and (modes or any("O_WRONLY" in t for t in texts)))
            or (name == "dump" and ast.unparse(node.func) == "json.dump")
        ):
            yield node.lineno


def test_files_are_written_durably() -> None:
    """Files that are read again are written by `rlplus.common.durable`, but where there is a reason."""
    roots = {PACKAGE: PACKAGE, PACKAGE / "bench": PACKAGE, EXPERIMENTS: EXPERIMENTS.parent}
    paths = {path: root for folder, root in roots.items() for path in folder.rglob("*.py")}
    found = {str(path.relative_to(root)): list(in_place(path.read_text())) for path, root in paths.items()}
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found[name]] == []


def test_every_form_of_writing_is_seen() -> None:
    forms = ["path.write_text(x)", "path.write_bytes(x)", "open(p, 'w')", "path.open('ab')", "open(p, mode='x')"]
    forms += ["os.fdopen(end, 'w')", "json.dump(x, file)", "os.open(p, os.O_WRONLY | os.O_CREAT)"]
    assert list(in_place("\n".join(forms))) == list(range(1, len(forms) + 1))
    assert not list(in_place("open(p)\nopen(p, 'rb')\nwrite_text(p, x)\njson.dumps(x)\npath.open(encoding='utf-8')"))
    assert durable.write_text is write_text
