"""The surroundings of a measurement: the revision of the sources, the hardware and its clocks, time by kernel."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STATE = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")  # MHz, W, degrees Celsius
KERNELS = 20  # rows at most; the other kernels are summed in one


def package_root() -> Path:
    """The folder from which this package is imported under its current name."""
    return Path(__file__).parents[str(__package__).count(".")].resolve().parent  # src/rlplus is a link


def revision(root: Path | None = None) -> str:
    """The commit of the sources, "-dirty" if files differ: RLPLUS_REVISION, else git's, else "unknown"."""
    root = root or package_root()
    if given := os.environ.get("RLPLUS_REVISION"):
        return given
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def hardware(cuda: bool) -> dict[str, Any]:
    if not cuda:
        return {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "bf16_instructions": torch.cpu._is_avx512_bf16_supported(),
            "cores": os.cpu_count(),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        }
    properties = torch.cuda.get_device_properties(0)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": properties.total_memory / 1e9,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def clocks() -> dict[str, float] | None:
    """The GPU's clocks, power and temperature by nvidia-smi, for right after a load; None where it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    uuid = torch.cuda.get_device_properties(0).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    values = done.stdout.strip().split(", ")
    if done.returncode or len(values) != len(STATE):
        return None
    return {name: float(x) for name, x in zip(STATE, values, strict=True) if x.replace(".", "", 1).isdigit()}


def kernel_times(step: Callable[[], object], cuda: bool) -> list[dict[str, Any]]:
    """Name, launches and ms of each kernel of one call, the longest first; on the CPU of PyTorch's operators."""
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        step()
        if cuda:
            torch.cuda.synchronize()
    events = found.key_averages()
    spent = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e.key, e.count) for e in events]
    rows = [{"kernel": name, "launches": n, "ms": us / 1e3} for us, name, n in sorted(spent, reverse=True) if us > 0]
    rest = rows[KERNELS:]
    if rest:
        total = {"launches": sum(row["launches"] for row in rest), "ms": sum(row["ms"] for row in rest)}
        rows[KERNELS:] = [{"kernel": f"{len(rest)} others"} | total]
    return rows
