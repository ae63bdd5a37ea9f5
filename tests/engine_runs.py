"""Runs whose engine breaks or runs ahead: what their tests share."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlplus.config import Config
from rlplus.rollout.transformers import TransformersEngine


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def same(first: Path, second: Path) -> bool:
    one, other = model(first), model(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def changed(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def fail(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[int]:
    """The engine breaks in these calls of generate that ask for a batch, half-way and for good; returns the calls."""
    original, count = TransformersEngine._generate_batch, [0]

    def breaking(engine: Any, prompts: Any, temperature: float, max_tokens: int) -> Any:
        if max_tokens > 2:  # not the probe
            count[0] += 1
            if count[0] in calls:
                engine._model = None
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return original(engine, prompts, temperature, max_tokens)

    monkeypatch.setattr(TransformersEngine, "_generate_batch", breaking)
    return count


def torchrun(config: Config, *options: str) -> None:
    path = Path(f"{config.output_dir}.yaml")
    path.write_text(config.to_yaml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "rlplus", "train"]
    done = subprocess.run([*command, str(path), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
