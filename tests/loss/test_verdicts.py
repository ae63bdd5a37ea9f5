"""Verdicts on the triton backend: what becomes of the child process that checks it, and what is kept on the disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch

from rlplus.loss.guard import verdicts
from rlplus.loss.guard.verdicts import Verdict, run_check

PASSED = Verdict("passed", "")
REFUSED = Verdict("refused", "dweight is not finite")
SAY = f"import json; print({json.dumps(PASSED._asdict())!r})"
BF16 = torch.bfloat16
CHILD = processes.SUPPORT / "selfcheck_child.py"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---- the child process


def test_a_verdict_is_the_last_line() -> None:
    assert run_check(python(f"print('a banner'); {SAY}")) == PASSED


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (signal.SIGSEGV, Verdict("refused", "it died of signal 11 (Segmentation fault)")),
        (signal.SIGABRT, Verdict("refused", "it died of signal 6 (Aborted)")),
        (signal.SIGKILL, Verdict("unchecked", "it died of signal 9 (Killed)")),  # an operator, or memory
        (signal.SIGTERM, Verdict("unchecked", "it died of signal 15 (Terminated)")),
    ],
)
def test_death_by_a_signal(number: int, verdict: Verdict) -> None:
    """Even after a verdict was printed."""
    assert run_check(python(f"{SAY}; import os, sys; sys.stdout.flush(); os.kill(os.getpid(), {number})")) == verdict


def test_what_a_library_says_before_it_ends_the_process_is_told() -> None:
    said = "a banner\\nLLVM ERROR: no such instruction\\nStack dump:\\n#0 llvm::report_fatal_error"
    verdict = run_check(python(f"import os, sys; sys.stderr.write('{said}'); sys.stderr.flush(); os.abort()"))
    assert verdict == Verdict("refused", "it died of signal 6 (Aborted): LLVM ERROR: no such instruction")


def test_a_child_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, pathlib, subprocess
child = subprocess.Popen(["sleep", "100000"])
pathlib.Path({str(tmp_path / "new")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(tmp_path / "new")!r}, {str(pids)!r})
child.wait()
"""
    wait = subprocess.Popen.wait

    def impatient(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        assert timeout == 77.0
        processes.wait_until(pids.exists, process)
        raise subprocess.TimeoutExpired("it", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", impatient)
    assert run_check(python(code), 77.0) == Verdict("refused", "it had not ended after 77 s")
    for pid in map(int, pids.read_text().split()):
        processes.wait_until(lambda pid=pid: not runs(pid))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_the_child_leaves_running_is_not_waited_for() -> None:
    code = """
import json, subprocess
left = subprocess.Popen(["sleep", "100000"])
print(json.dumps({"status": "passed", "reason": str(left.pid)}))
"""
    verdict = run_check(python(code))
    os.kill(int(verdict.reason), signal.SIGKILL)
    assert verdict.status == "passed"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "it ended with status 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "it ended with status 3: nothing on stderr"),
        ("print('hello')", r"want a verdict on its last line; got 'hello\n'"),
        ("", "want a verdict on its last line; got ''"),
        (r"import os; os.write(1, b'\xff')", "want a verdict on its last line; got '\ufffd'"),
        ("print('[1]')", r"want a verdict on its last line; got '[1]\n'"),
        ('print(\'{"status": "passed"}\')', 'want a verdict on its last line; got \'{"status": "passed"}\\n\''),
    ],
)
def test_anything_but_a_verdict_is_a_refusal(code: str, reason: str) -> None:
    assert run_check(python(code)) == Verdict("refused", reason)


def test_a_process_that_cannot_be_started_is_no_refusal() -> None:
    verdict = run_check(["/nowhere/python"])
    assert verdict.status == "unchecked"
    assert verdict.reason.startswith("it could not be started: [Errno 2]")


def test_the_child_imports_what_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_check(python(f"import only_here; {SAY}")) == PASSED


@pytest.mark.slow
def test_the_real_command_answers_and_survives_a_broken_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = run_check([*verdicts.COMMAND, "no-such-device", "float32"])
    assert verdict.status == "unchecked"
    assert "want the CUDA device no-such-device visible" in verdict.reason
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise ImportError('libtriton.so: wrong ELF class')")
    monkeypatch.syspath_prepend(tmp_path)
    verdict = run_check([*verdicts.COMMAND, "cpu", "float32"])
    assert verdict == Verdict("refused", "ImportError: libtriton.so: wrong ELF class")


def test_a_store_out_of_bounds_ends_the_child_alone() -> None:
    """With a real kernel, in the interpreter."""
    assert run_check([sys.executable, str(CHILD), "right"]) == PASSED
    assert run_check([sys.executable, str(CHILD), "far"]) == Verdict(
        "refused", "it died of signal 11 (Segmentation fault)"
    )


# ---- the disk


class Checks:
    """In place of `run_check`; the last verdict is given again and again."""

    def __init__(self, *given: Verdict) -> None:
        self.given, self.commands = list(given), []

    def __call__(self, command: list[str]) -> Verdict:
        self.commands.append(command)
        return self.given.pop(0) if len(self.given) > 1 else self.given[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLPLUS_CACHE", str(tmp_path / "below/cache"))
    return tmp_path / "below/cache"


@pytest.fixture
def checks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checks]:
    """Makes them, for two devices of a kind."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))

    def make(*given: Verdict) -> Checks:
        made = Checks(*given)
        monkeypatch.setattr(verdicts, "run_check", made)
        return made

    return make


def ask(index: int = 0, dtype: torch.dtype = BF16) -> Verdict:
    return verdicts.verdict_on(torch.device("cuda", index), dtype)


def kept(folder: Path) -> Path:
    (file,) = folder.glob("*.json")
    return file


def test_a_verdict_holds_for_all_devices_of_a_kind_and_one_dtype(checks: Callable[..., Checks], folder: Path) -> None:
    made = checks(PASSED)
    assert [ask(), ask(1), ask()] == [PASSED] * 3
    assert made.commands == [[*verdicts.COMMAND, "u0", "bfloat16"]]
    assert ask(1, torch.float16) == PASSED
    assert made.commands[1:] == [[*verdicts.COMMAND, "u1", "float16"]]
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert (folder.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    assert not [path for path in folder.iterdir() if path.suffix not in (".json", ".lock")]


def test_a_refusal_is_kept_and_says_where(checks: Callable[..., Checks], folder: Path) -> None:
    made = checks(REFUSED)
    for _ in range(2):
        verdict = ask()
        assert verdict.status == "refused"
        assert verdict.reason.startswith(f"{REFUSED.reason} (kept in {kept(folder)}; ")
    assert len(made.commands) == 1
    kept(folder).unlink()
    checks(PASSED)
    assert ask() == PASSED


def test_what_was_not_checked_is_not_kept(checks: Callable[..., Checks]) -> None:
    made = checks(Verdict("unchecked", "busy"), PASSED)
    assert ask() == Verdict("unchecked", "busy")
    assert ask() == PASSED
    assert len(made.commands) == 2


def test_out_of_memory_is_raised_and_not_kept(checks: Callable[..., Checks], folder: Path) -> None:
    checks(Verdict("out of memory", "OutOfMemoryError: CUDA out of memory"), PASSED)
    with pytest.raises(torch.OutOfMemoryError, match=r"the self-check of backend 'triton': .*CUDA out of memory"):
        ask()
    assert not list(folder.glob("*.json"))
    assert ask() == PASSED


@pytest.mark.parametrize("name", ["torch", "cuda", "triton", "driver", "kernels"])
def test_other_versions_are_checked_anew(
    name: str, checks: Callable[..., Checks], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checks(PASSED)
    ask()
    other = verdicts.versions() | {name: "other"}
    monkeypatch.setattr(verdicts, "versions", lambda: other)
    ask()
    ask()
    assert len(made.commands) == 2


def test_another_device_is_checked_anew(checks: Callable[..., Checks], monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks(PASSED)
    ask()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Other")
    ask()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    ask()
    assert len(made.commands) == 3


def test_versions_follow_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(verdicts.__file__).parents[2]
    for name in ("kernels", "loss"):
        shutil.copytree(package / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(verdicts, "__file__", str(tmp_path / "loss/guard/verdicts.py"))
    measure = verdicts.versions.__wrapped__
    assert measure() == verdicts.versions()
    seen = {measure()["kernels"]}
    for file in ("kernels/linear_logprob.py", "kernels/policy_loss.py", "loss/backends/triton.py"):
        with (tmp_path / file).open("a") as stream:
            stream.write("\n")
        seen.add(measure()["kernels"])
    assert len(seen) == 4


def empty(file: Path) -> None:
    file.write_text("")


def cut(file: Path) -> None:
    file.write_text(file.read_text()[:-10])


def nested(file: Path) -> None:
    file.write_text("[" * 60_000)


def binary(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\0")


def list_of_it(file: Path) -> None:
    file.write_text(f"[{file.read_text()}]")


def unknown_status(file: Path) -> None:
    file.write_text(file.read_text().replace('"passed"', '"unchecked"'))


def of_other_versions(file: Path) -> None:
    file.write_text(file.read_text().replace(torch.__version__, "0.1"))


def writable_by_all(file: Path) -> None:
    file.chmod(0o666)


def link(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE = (
    empty,
    cut,
    nested,
    binary,
    list_of_it,
    unknown_status,
    of_other_versions,
    writable_by_all,
    link,
    pipe,
    directory,
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_untrusted_file_is_no_verdict(
    damage: Callable[[Path], None], checks: Callable[..., Checks], folder: Path
) -> None:
    made = checks(PASSED)
    ask()
    damage(kept(folder))
    assert ask() == PASSED
    assert len(made.commands) == 2
    if damage is not directory:  # nothing else hinders the next verdict
        assert ask() == PASSED
        assert len(made.commands) == 2


def test_files_of_another_user_are_neither_believed_nor_written(
    checks: Callable[..., Checks], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checks(PASSED)
    ask()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    before = kept(folder).stat()
    assert ask() == PASSED
    assert len(made.commands) == 2
    assert kept(folder).stat() == before


@pytest.mark.parametrize("place", ["/proc/rlplus", "{file}/cache", "relative/cache"])
def test_without_a_folder_every_process_checks(
    place: str, checks: Callable[..., Checks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLPLUS_CACHE", place.format(file=tmp_path / "file"))
    made = checks(REFUSED)
    assert [ask(), ask()] == [REFUSED] * 2
    assert len(made.commands) == 2
    assert not (tmp_path / "relative").exists()


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLPLUS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/one")
    assert verdicts.cache_folder() == Path("/home/one/.cache/rlplus")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert verdicts.cache_folder() == Path("/cache/rlplus")
    monkeypatch.setenv("RLPLUS_CACHE", "/elsewhere")
    assert verdicts.cache_folder() == Path("/elsewhere")


def test_those_who_ask_at_the_same_time_wait_for_one_check(
    checks: Callable[..., Checks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a machine; threads here, as the lock is on a file that each opens for itself."""
    made, second = checks(PASSED), threading.Event()

    def check(command: list[str]) -> Verdict:
        made(command)
        if len(made.commands) > 1:
            second.set()
        second.wait(0.5)  # time for others to begin a check, too
        return PASSED

    monkeypatch.setattr(verdicts, "run_check", check)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [PASSED] * 4
    assert len(made.commands) == 1
