"""The product's kernels as Triton compiles them, executed by ptxcheck: values, findings and bits, without a GPU.

Each test starts pytest in a process in which Triton compiles; its tests are in compiled_kernels.py,
compiled_invariance.py and compiled_divergence.py. The slow ones run also every test of the kernels that is written for
Triton's interpreter.
"""

from pathlib import Path
from subprocess import CompletedProcess

import processes
import pytest
import tritons
from compiled_launches import launched
from kernel_names import KERNELS as NAMES
from ptxcheck import nested

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNELS, BITS, PAIRS = (HERE / f"compiled_{name}.py" for name in ("kernels", "invariance", "divergence"))
INTERPRETED = [
    HERE / f"test_{name}.py" for name in ("kernels", "gemm_kernel", "token_kernel", "scale_kernel", "own_tokens")
]
INTERPRETED += [HERE.parent / "loss" / f"test_{name}.py" for name in ("exponentials", "logit_transform")]


def start(
    cache: Path, *arguments: str | Path, triton: str | None = None, plugin: str = "ptxcheck", **more: str
) -> CompletedProcess[str]:
    """triton: one of `tritons.PINNED`; None = the installed one."""
    first = [tritons.folder(triton)] if triton else []
    environment = nested.environment(cache, *first, HERE.parent, ROOT, **more)
    return processes.run(nested.command(*arguments, plugin=plugin), processes.LONG_S, env=environment)


def run(cache: Path, *arguments: str | Path, **options: str) -> int:
    """How many tests passed; none may fail."""
    return nested.passed(start(cache, *arguments, **options))


def check_quick(cache: Path, triton: str | None = None) -> None:
    """The quick tests pass, and launch every kernel for each GPU."""
    done = start(cache, KERNELS, BITS, PAIRS, "-m", "not slow", "-p", "support.compiled_launches", triton=triton)
    assert nested.passed(done)
    assert launched(done.stdout) == {f"{name} sm_{arch}" for name in NAMES for arch in (80, 90)}


def test_every_kernel_computes_what_float64_does_and_nothing_is_found(tmp_path: Path) -> None:
    check_quick(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("path", "least"), [(KERNELS, 15), (BITS, 15), (PAIRS, 11)], ids=lambda x: getattr(x, "stem", "")
)
def test_every_shape_option_and_tile(path: Path, least: int, arch: int, tmp_path: Path) -> None:
    assert run(tmp_path, path, "-m", "slow", "-k", str(arch)) >= least


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "gemms"), [("100", False), ("120", True)])
def test_the_kernels_of_blackwell(arch: str, gemms: bool, tmp_path: Path) -> None:
    """One shape of each; GEMMs of sm_100 are tcgen05, which is refused."""
    words = arch if gemms else f"{arch} and not epilogue_of_the_gemm"
    assert run(tmp_path, KERNELS, "-m", "not slow", "-k", words, PTX_ARCHES=arch) == (5 if gemms else 3)


@pytest.mark.slow
@pytest.mark.parametrize("triton", tritons.PINNED)
def test_the_kernels_of_the_tritons_of_every_torch(triton: str, tmp_path: Path) -> None:
    """One shape of each, and every tile and block."""
    assert run(tmp_path, ROOT / "packages/ptxcheck/tests/compiled.py", triton=triton) > 25
    check_quick(tmp_path, triton)
    assert run(tmp_path, KERNELS, "-m", "slow", "-k", "every_tile or every_block", triton=triton) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_what_holds_in_the_interpreter_holds_of_the_compiled_code(path: Path, arch: str, tmp_path: Path) -> None:
    """Without whole runs, which load weights by the meta device: beside the simulated one it cannot be used. Without
    rows 2^31 elements apart: of each element between it is noted whether it was written."""
    words = ("-m", "not slow", "-k", "not (a_run_trains or sdpa or far_apart or lie_apart)")
    assert run(tmp_path, path, *words, plugin="ptxcheck.everywhere", PTX_ARCH=arch) >= 5
