"""The numeric tests again, in processes whose libraries are held back to the instructions of older x86 processors.

A vector's end is computed by other code than its middle, and where it ends depends on the processor.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import processes
import pytest
import torch

ROOT = Path(__file__).parents[2]
# Where the last digit may decide: objectives, heads, backends, and kernels in the interpreter.
NUMERIC = [
    *("advantages", "attention", "backends", "causal_lm", "cpp", "default_dtype", "draw"),
    *("exponentials", "fused_head", "gemm_kernel", "inputs", "intervals", "kernels", "laws", "logit_transform"),
    *(
        "objective",
        "ops",
        "ops_memory",
        "own_tokens",
        "precision",
        "preset_losses",
        "presets",
        "properties",
        "registered",
    ),
    *(
        "own_tokens",
        "row_kernels",
        "scale_kernel",
        "schedules",
        "statistics",
        "temperature",
        "theory",
        "token_kernel",
        "verdicts",
        "weights",
    ),
]
# Results of tokens among more or fewer others: quick, and the first to fail on another processor.
OTHER_LENGTHS = ["tests/loss/test_objective.py", "tests/loss/test_ops.py", "-k", "micro_batches or leading_shapes"]


class Processor(NamedTuple):
    """A generation by torch's name, the compiler's and those that oneDNN and MKL have for its instructions."""

    torch: str
    compiler: str
    onednn: str
    mkl: str
    mkl_code: str  # where the processor is not Intel's

    @property
    def environment(self) -> dict[str, str]:
        found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
        newer = [name for name in found if self.torch == "DEFAULT" or "512" in name or "V4" in name]
        limits = {"ATEN_CPU_CAPABILITY": self.torch.lower(), "DNNL_MAX_CPU_ISA": self.onednn}
        limits |= {"MKL_ENABLE_INSTRUCTIONS": self.mkl, "MKL_CBWR": self.mkl_code}
        return limits | {"NPY_DISABLE_CPU_FEATURES": " ".join(newer)}


SSE = Processor("DEFAULT", "x86-64", "SSE41", "SSE4_2", "COMPATIBLE")
AVX2 = Processor("AVX2", "x86-64-v3", "AVX2", "AVX2", "AVX2")
# Older than this one; none on another architecture.
OLDER = {"AVX2": [SSE], "AVX512": [SSE, AVX2]}.get(torch.backends.cpu.get_cpu_capability(), [])
EACH = pytest.mark.parametrize("processor", OLDER, ids=lambda processor: processor.compiler)


def passes(processor: Processor, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | processor.environment | (extra or {})
    done = processes.run(command, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"instructions of torch: {processor.torch}\n" in done.stdout


@EACH
def test_tokens_among_fewer_others(processor: Processor) -> None:
    passes(processor, OTHER_LENGTHS)


@pytest.mark.slow
@EACH
def test_numbers(processor: Processor) -> None:
    passes(processor, sorted(str(path) for name in NUMERIC for path in ROOT.glob(f"tests/*/test_{name}.py")))


@pytest.mark.slow
@EACH
def test_the_native_library_compiled_for_it(processor: Processor, tmp_path: Path) -> None:
    """Its functions exist for each generation, and the loader takes this one's: here they have only one."""
    build = ["setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    compiler = f"{os.environ.get('CXX', 'c++')} -DEVERY_CPU= -march={processor.compiler}"
    done = processes.run([sys.executable, *build], env=os.environ | {"RLPLUS_EXT": "1", "CXX": compiler}, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    plugin = "from pathlib import Path\nfrom rlplus.loss.backends import native\n"
    plugin += f"native.LIBRARY = Path({str(tmp_path)!r}, 'rlplus/_C.so')\n"
    (tmp_path / "own_library.py").write_text(plugin + "assert native.load() is not None\n")
    arguments = [
        "-p",
        "own_library",
        "tests/loss/test_cpp.py",
        "tests/loss/test_laws.py",
        "tests/loss/test_properties.py",
        "-k",
        "cpp",
    ]
    passes(processor, arguments, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
