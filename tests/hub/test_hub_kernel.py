"""The losses as a kernel for Hugging Face's `kernels`: built into a folder, and loaded from there by that package."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import releases
from quick import only

import rlplus

HUB, CHILD = processes.ROOT / "hub", processes.SUPPORT / "hub_kernel_child.py"
KERNELS = ("kernels", "0.17.2")


def python(*command: object, path: str = "", **variables: str) -> str:
    built = {"PYTHONDONTWRITEBYTECODE": "1"}  # a folder stays as it was built
    environment = {**os.environ, **built, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **variables}
    done = processes.run([sys.executable, *map(str, command)], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("hub") / "rlplus"
    python(HUB / "build.py", built)
    return built


@pytest.mark.parametrize("backend", only(["torch"], ["torch", "triton"]))
def test_the_kernel_is_loaded_beside_the_package_and_gives_the_same_bits(folder: Path, backend: str) -> None:
    path = os.pathsep.join((str(releases.folder(*KERNELS)), str(processes.ROOT)))
    interpreted = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
    found: dict[str, Any] = json.loads(python(CHILD, folder, backend, path=path, **interpreted).splitlines()[-1])
    variant = folder / "build" / "torch-cpu"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert found["file"] == str(variant / "__init__.py")
    assert found["name"] == metadata["id"]
    assert found["names"] == sorted(rlplus.__all__)
    assert found["same"] == [True] * 6
    assert found["apart"]
    assert found["module"] == f"{metadata['id']}.rlplus.loss.operations.linear_losses"
    assert {"linear_policy_loss", "linear_logprob", "linear_divergence"} <= set(found["ops"])
    assert found["checked"] == str(variant / "rlplus" / "__init__.py")  # a self-check is of the kernel's own files


def test_both_variants_have_the_same_files_and_ops_of_their_own(folder: Path) -> None:
    cpu, cuda = (folder / "build" / f"torch-{name}" for name in ("cpu", "cuda"))
    ids = [json.loads((variant / "metadata.json").read_text())["id"] for variant in (cpu, cuda)]
    assert [name.rpartition("_")[0] for name in ids] == ["_rlplus_cpu", "_rlplus_cuda"]
    files = [{p.relative_to(variant) for p in variant.rglob("*") if p.is_file()} for variant in (cpu, cuda)]
    assert files[0] == files[1]
    assert not any(part == "__pycache__" or part.endswith(".so") for file in files[0] for part in file.parts)
    for file in files[0] - {Path("metadata.json")}:
        one, other = (
            (variant / file).read_text().replace(name, "ID") for variant, name in zip((cpu, cuda), ids, strict=True)
        )
        assert one == other, file


@pytest.mark.parametrize("method", only(["policy_loss"], ["cross_entropy", "policy_loss"]))
def test_its_benchmarks_run_and_agree_with_plain_pytorch(folder: Path, method: str) -> None:
    """As `kernels benchmark FOLDER` does, which also needs tabulate; its tolerance is 1e-2."""
    code = (
        "import sys, torch, benchmark_head\n"
        "from pathlib import Path\n"
        "from kernels import get_local_kernel\n"
        "case = benchmark_head.HeadBenchmark()\n"
        "case.kernel = get_local_kernel(Path(sys.argv[1]))\n"
        "case.setup()\n"
        "getattr(case, 'benchmark_' + sys.argv[2])()\n"
        "want = getattr(case, 'verify_' + sys.argv[2])()\n"
        "print((case.out - want).abs().max().item(), case.out.abs().max().item())"
    )
    path = os.pathsep.join((str(releases.folder(*KERNELS)), str(folder / "benchmarks")))
    error, largest = map(float, python("-c", code, folder, method, path=path).split())
    assert error < 1e-5
    assert largest == 1


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    done = processes.run([sys.executable, str(HUB / "build.py"), str(tmp_path)])
    assert done.returncode == 2
    assert f"want a folder that does not exist; got {tmp_path}" in done.stderr


def test_an_import_that_is_not_rewritten_is_refused() -> None:
    code = "import build; build.portable('loss/a.py', 'import rlplus.common.errors', '_x')"
    done = processes.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(HUB)})
    assert "ValueError: want relative imports only; got another in loss/a.py, line 1" in done.stderr
