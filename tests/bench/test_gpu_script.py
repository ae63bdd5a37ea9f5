"""bench/gpu.sh: order, budgets, calls that go on, and how it ends; its whole order once on small numbers."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch

from rlplus.bench import gpu, machine, pack
from rlplus.bench.case import Case
from rlplus.bench.gpu import Part, Session, execute, parts
from rlplus.bench.suites import SUITES, tiny
from rlplus.loss.guard.verdicts import versions

ROOT = Path(__file__).parents[2]
PARTS = ["selfcheck", "bench", "training", "distill", "test_gpu", "runs", "kernels"]
PARTS += ["sanitizer", "memcheck", "racecheck"]


class Machine:
    """A clock, and processes that take as many of its seconds as they may, or those given; `ran` has their names."""

    def __init__(self, folder: Path, **takes: float) -> None:
        self.now, self.ran, self.folder, self.takes = 1000.0, [], folder, takes
        self.status: dict[str, int | None] = {}

    def run(self, part: Part, limit: float, log: Path) -> int | None:
        self.ran.append(part.name)
        self.now += min(self.takes.get(part.name, limit), limit)
        with log.open("a") as stream:
            stream.write(f"{part.name}: a line\nthe last line of {part.name}\n\n")
        return self.status.get(part.name, 0)

    def session(self, wanted: list[Part] | None = None) -> Session:
        self.now += 60  # another machine is started
        wanted = parts(self.folder, cpu=False) if wanted is None else wanted
        return Session(self.folder, wanted, self.run, lambda: self.now)

    def summary(self) -> list[str]:
        return (self.folder / "summary.txt").read_text().splitlines()


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return lambda **takes: Machine(tmp_path, **takes)


def test_calls_of_ten_minutes_do_everything_in_a_quarter_of_an_hour(lent: Callable[..., Machine]) -> None:
    here, calls, status = lent(**dict.fromkeys(PARTS, 70.0)), [], gpu.UNFINISHED
    while status == gpu.UNFINISHED:
        session = here.session()
        start = here.now
        status = session.go_on()
        calls.append(here.now - start)
    assert status == 0, here.summary()
    assert here.ran == PARTS
    assert len(calls) == 2
    assert max(calls) + gpu.GRACE_S <= 580
    assert sum(calls) <= gpu.TOTAL_S <= 13 * 60
    assert session.state["spent"] == sum(calls)
    assert session.go_on() == 0  # there is nothing left to do
    assert here.ran == PARTS


def test_what_no_longer_fits_is_left_out_and_says_so(lent: Callable[..., Machine]) -> None:
    here = lent()
    long = [Part(name, "x", 300) for name in "abc"]
    assert [here.session(long).go_on() for _ in range(2)] == [gpu.UNFINISHED, 0]
    assert here.now - 1000 - 2 * 60 == gpu.TOTAL_S  # c had the rest
    assert here.session([*long, Part("d", "x", 300)]).go_on() == 1
    assert here.summary()[-2] == "d: FAILED: left out, the 13 minutes of all calls are spent"
    assert here.ran == list("abc")


def test_a_refused_self_check_stops_everything_with_its_reason(lent: Callable[..., Machine]) -> None:
    here = lent()
    here.status["selfcheck"] = 1
    for _ in range(2):
        assert here.session().go_on() == 1
        assert here.ran == ["selfcheck"]
    assert "selfcheck: FAILED: status 1 after 120 s" in here.summary()
    assert "    the last line of selfcheck" in here.summary()
    assert here.summary()[-1].startswith("stopped: without the self-check no result would count")


def test_a_part_that_fails_leaves_the_others_but_those_that_need_it(lent: Callable[..., Machine]) -> None:
    here = lent(**dict.fromkeys(PARTS, 10.0))
    here.status |= {"runs": 2, "test_gpu": None, "sanitizer": 1}
    assert here.session().go_on() == 1
    assert here.ran == [name for name in PARTS if name not in ("memcheck", "racecheck")]
    found = [line for line in here.summary() if not line.startswith("    ")]
    assert found[4:-1] == [
        "test_gpu: FAILED: stopped after 150 s",
        "runs: FAILED: status 2 after 10 s",
        "kernels: passed in 10 s",
        "sanitizer: skipped, it does not run here: the last line of sanitizer",
        "memcheck: skipped, sanitizer did not pass",
        "racecheck: skipped, sanitizer did not pass",
    ]


def test_an_interrupted_part_is_charged_and_begun_once_more(lent: Callable[..., Machine]) -> None:
    here = lent()
    only = [Part("bench", "bench", 300), Part("kernels", "kernels", 50)]

    class Ended(BaseException):
        pass

    def ended(part: Part, limit: float, log: Path) -> int:
        here.now += 40
        raise Ended

    for spent in (100.0, 200.0):
        with pytest.raises(Ended):
            Session(here.folder, only, ended, lambda: here.now).go_on()
        session = here.session(only)  # 60 s later
        assert session.state["spent"] == spent
    assert session.go_on() == 1
    assert here.ran == ["kernels"]
    assert "bench: FAILED: interrupted twice" in here.summary()


def test_named_steps_run_again(lent: Callable[..., Machine]) -> None:
    here = lent(**dict.fromkeys(PARTS, 10.0))
    assert here.session().go_on() == 0
    named = [part for part in parts(here.folder, cpu=False) if part.step == "tests"]
    session = here.session(named)
    session.forget([part.name for part in named])
    assert session.go_on() == 0
    assert here.ran == [*PARTS, "test_gpu"]


@pytest.mark.parametrize("cpu", [False, True])
def test_the_tests_that_it_runs_exist(cpu: bool, tmp_path: Path) -> None:
    files = [str(word) for part in parts(tmp_path, cpu) for word in part.command if str(word).startswith("tests/")]
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_without_the_sanitizer_its_parts_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reasons = {part.name: part.skip for part in parts(tmp_path, cpu=False) if part.step == "sanitize"}
    assert reasons == {"sanitizer": "compute-sanitizer is not installed", "memcheck": "", "racecheck": ""}


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; child = subprocess.Popen(['sleep', '100000']); print(child.pid, flush=True)"
    wait = [sys.executable, "-c", f"{code}; child.wait()"]
    log = tmp_path / "log"
    assert execute(Part("one", "x", 0, [sys.executable, "-c", "print('said'); raise SystemExit(3)"]), 600, log) == 3
    assert log.read_text() == "\n==== one\nsaid\n"
    assert execute(Part("two", "x", 0, wait), 1, log) is None
    for pid in map(int, re.findall(r"^(\d+)$", log.read_text(), flags=re.MULTILINE)):
        stat = Path(f"/proc/{pid}/stat")
        processes.wait_until(
            lambda stat=stat: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
        )


def test_wrong_steps(capsys: pytest.CaptureFixture) -> None:
    assert gpu.main(["somewhere", "benhc"]) == 2
    assert (
        "want steps among selfcheck, bench, training, distill, tests, runs, kernels, sanitize; got 'benhc'"
        in capsys.readouterr().err
    )


def test_the_script_finds_python_and_packages_that_travel_along(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$PYTHONPATH|$PWD|$*"\n')
    stand_in.chmod(0o755)
    environment = os.environ | {"PYTHON": str(stand_in), "PYTHONPATH": "more"}
    done = processes.run(["bash", ROOT / "bench/gpu.sh", "--cpu", "there"], env=environment, cwd=tmp_path)
    assert done.stdout == f".:gpu-pack/peers:gpu-pack/trainer:more|{ROOT}|-m bench.gpu --cpu there\n"


# ---- what the results say about the machine


def test_the_revision_is_that_of_git_or_of_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPLUS_REVISION", raising=False)
    assert machine.revision(tmp_path) == "unknown"
    (tmp_path / "gpu-pack").mkdir()
    file = tmp_path / "gpu-pack/REVISION"
    file.write_text(f"123abc {versions()['kernels']}\n")
    assert machine.revision(tmp_path) == "123abc"
    file.write_text("123abc others\n")
    assert machine.revision(tmp_path) == "123abc, with other kernels"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        assert processes.run([*git, *command]).returncode == 0
    commit = processes.run([*git, "rev-parse", "HEAD"]).stdout.strip()
    assert machine.revision(tmp_path) == commit[:12]
    file.write_text("changed")
    assert machine.revision(tmp_path) == f"{commit[:12]}-dirty"
    monkeypatch.setenv("RLPLUS_REVISION", "given")
    assert machine.revision(tmp_path) == "given"


def test_clocks_are_those_of_the_gpu_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.clocks() is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-34"))
    says = "1980, 3201, 1980, 652.31, [N/A]"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --id=GPU-12-34 ] && echo "{says}"\n')
    tool.chmod(0o755)
    assert machine.clocks() == {"clocks.sm": 1980, "clocks.mem": 3201, "clocks.max.sm": 1980, "power.draw": 652.31}
    tool.write_text("#!/bin/sh\necho no device; exit 6\n")
    assert machine.clocks() is None


def test_time_by_kernel_counts_the_launches_and_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(64, 64)

    def step() -> None:
        for _ in range(3):
            torch.mm(x, x)
        x.exp().sin().cos()

    rows = machine.kernel_times(step, cuda=False)
    launches = {row["kernel"]: row["launches"] for row in rows}
    assert {name: launches[name] for name in ("aten::mm", "aten::exp", "aten::sin")} == {
        "aten::mm": 3, "aten::exp": 1, "aten::sin": 1
    }  # fmt: skip
    assert [row["ms"] for row in rows] == sorted((row["ms"] for row in rows), reverse=True)
    monkeypatch.setattr(machine, "KERNELS", 2)
    few = machine.kernel_times(step, cuda=False)
    assert [row["kernel"] for row in few[2:]] == [f"{len(rows) - 2} others"]
    assert sum(row["launches"] for row in few) == sum(row["launches"] for row in rows)


@pytest.mark.parametrize(("size", "status"), [(1, 0), (60, 1)])
def test_a_pack_has_revision_and_peers_and_a_limit(
    size: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def pip(command: list[str], env: dict[str, str] | None = None) -> SimpleNamespace:
        made = Path(command[-2]) / "deepspeed.whl"
        if "--target" in command:
            made = Path(command[command.index("--target") + 1]) / Path(command[-1]).name
        with made.open("wb") as file:
            file.truncate(size * 10**6 if command[-1] in ("one", "two") else 0)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(pack, "package_root", lambda: tmp_path)
    monkeypatch.setattr(pack, "revision", lambda: "123abc")
    monkeypatch.setattr(pack.subprocess, "run", pip)
    assert pack.main(["one", "two"]) == status
    said = capsys.readouterr()
    assert said.out.startswith(f"one: {size}.0 MB\ntwo: {size}.0 MB\n")
    assert "deepspeed.whl: 0.0 MB\n" in said.out
    assert sorted(path.name for path in (tmp_path / "gpu-pack").iterdir()) == ["REVISION", "peers", "trainer"]
    assert ("want at most 50 MB" in said.err) == bool(status)
    assert machine.revision(tmp_path) == "123abc"


# ---- the methods that only such a session measures

HEAD = Case("main", N=16, H=64, V=300, dtype="bfloat16", methods=())


def test_a_tiny_suite_has_the_same_methods() -> None:
    cases = SUITES["gpu"][0]()
    small = tiny(cases)
    assert {name for case in small for name in case.methods} == {name for case in cases for name in case.methods}
    assert sum(case.N * case.V * case.H for case in small) < 10**7
    assert len(small) < len(cases)  # a sweep of one size is one case
    assert {case.seconds for case in small} == {inf}


# ---- the whole order


@pytest.mark.slow
def test_the_whole_order_on_small_numbers_without_what_a_gpu_machine_lacks(tmp_path: Path) -> None:
    """Neither git nor the trainer's packages, which no test there imports. A second call has nothing left to do."""
    absent = ("deepspeed", "vllm", "pydantic", "pyarrow", "datasets", "transformers", "yaml")
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({absent}))")
    out, copies = tmp_path / "results", tmp_path / "copies"
    copies.mkdir()
    environment = os.environ | {
        "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "absent"), "OUT": str(copies), "RLPLUS_REVISION": "abc",
    }  # fmt: skip
    for _ in range(2):
        done = processes.run(["bash", ROOT / "bench/gpu.sh", "--cpu", out], env=environment)
        assert done.returncode == 0, done.stdout + (out / "log.txt").read_text()[-3000:]
    lines = (out / "summary.txt").read_text().splitlines()
    assert lines[0].split()[1:3] == ["revision", "abc"]
    assert [line.split(":")[0] for line in lines[1:11]] == PARTS
    assert [line for line in lines if "skipped" in line] == [
        "training: skipped, deepspeed is not installed",
        "test_gpu: skipped, needs a GPU", "runs: skipped, needs a GPU", "sanitizer: skipped, needs a GPU",
        "memcheck: skipped, sanitizer did not pass", "racecheck: skipped, sanitizer did not pass",
    ]  # fmt: skip
    assert len(lines) == 14  # two calls: the environment, the end
    assert sorted(path.name for path in copies.iterdir()) == sorted(
        path.name for path in out.iterdir() if path.is_file() and path.suffix != ".png"
    )
    assert len(list(copies.iterdir())) <= 6
    result = json.loads((copies / "gpu.json").read_text())
    assert (result["complete"], result["revision"]) == (True, "abc")
    rows = {row["method"]: row for row in reversed(result["cases"][0]["rows"])}  # the first: every row has a gradient
    assert rows["triton"]["status"] == "ok"
    assert rows["triton"]["ratio"]["median"] > 0  # relative to the bare GEMMs
    assert {"aten::mm"} <= {kernel["kernel"] for kernel in rows["bare-3u"]["kernels"]}
    assert rows["triton"]["kernels"]
    assert "kernels of triton" in (copies / "log.txt").read_text()
