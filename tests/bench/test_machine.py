"""The surroundings of a measurement: revision, clocks, time by kernel; and the suite of a GPU on small numbers."""

import json
import os
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch

from rlplus.bench import machine
from rlplus.bench.suites import SUITES, tiny

ROOT = Path(__file__).parents[2]


def test_the_revision_is_that_of_git_or_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPLUS_REVISION", raising=False)
    assert machine.revision(tmp_path) == "unknown"
    file = tmp_path / "file"
    file.write_text("as committed")
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


@pytest.mark.parametrize("suite", ["gpu", "gpu-sizes"])
def test_a_tiny_suite_has_the_same_methods(suite: str) -> None:
    cases = SUITES[suite][0]()
    small = tiny(cases)
    assert {name for case in small for name in case.methods} == {name for case in cases for name in case.methods}
    assert sum(case.N * case.V * case.H for case in small) < 10**7
    assert len(small) == {"gpu": 3, "gpu-sizes": 4}[suite]  # a sweep of one size is one case
    assert {case.seconds for case in small} == {inf}


@pytest.mark.slow
def test_the_suite_of_a_gpu_without_the_trainers_packages(tmp_path: Path) -> None:
    """From the source tree, with torch, triton and numpy."""
    absent = ("deepspeed", "vllm", "pydantic", "pyarrow", "datasets", "transformers", "yaml", "rich")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({absent}))")
    given = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TRITON_INTERPRET": "1", "RLPLUS_REVISION": "abc"}
    command = [sys.executable, "-m", "bench", "--suite", "gpu", "--tiny", "--output", tmp_path]
    done = processes.run(command, env=os.environ | given, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["complete"], result["revision"]) == (True, "abc")
    rows = {row["method"]: row for row in reversed(result["cases"][0]["rows"])}  # the first: every row has a gradient
    assert rows["triton"]["status"] == "ok"
    assert rows["triton"]["ratio"]["median"] > 0  # relative to the bare GEMMs
    assert {"aten::mm"} <= {kernel["kernel"] for kernel in rows["bare-3u"]["kernels"]}
    assert rows["triton"]["kernels"]
    assert "kernels of triton" in done.stdout
