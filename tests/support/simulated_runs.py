"""python simulated_runs.py FOLDER CASE...: train on ptxcheck's simulated GPU, verify, resume; test_simulated_gpu.py.

CASE: a preset, a name of SETTINGS or OPTIONAL, or "settings" for all of SETTINGS.

Tensors claim to be on cuda:0, DeepSpeed's accelerator is CUDA's, and the kernels are those compiled for sm_90, so a
tensor in the wrong place is an error, as on a GPU.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cuda"
os.environ.pop("TRITON_INTERPRET", None)

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # imported before anything of torch is replaced
import deepspeed.runtime.zero.partition_parameters as partitions
import peft  # noqa: F401
import torch
from device_cases import SETTINGS, check, draw_rewards, sections
from mixtures import write_mixture
from ptxcheck.device import Device
from ptxcheck.simulate import simulated
from teachers import make_teacher
from trainer_runs import write_task
from transformers import AutoModelForCausalLM

import rlplus.train.trainer.loop


def main(folder: Path, cases: Sequence[str]) -> None:
    rlplus.train.trainer.loop.score = draw_rewards  # type: ignore[attr-defined]
    teacher = make_teacher(folder)
    write_mixture(folder / "mixture")
    write_task(folder)
    AutoModelForCausalLM.from_pretrained(teacher)  # transformers finds functions of torch at its first load
    with gpu() as device:
        for name in cases:
            (own := folder / name.replace(" ", "-")).mkdir()
            check(own, sections(name, teacher), backend="torch")
            device.flush()
            if device.findings:
                raise AssertionError(f"{name}: {dict(device.findings)}")
            if bool(device.launches) != ("triton" in str(SETTINGS.get(name))):
                raise AssertionError(f"{name}: kernels ran {dict(device.launches)}")
            device.reset()
            print(f"{name}: as on a GPU", flush=True)


@contextmanager
def gpu() -> Iterator[Device]:
    """The simulated device, also for DeepSpeed, which puts back the `torch.tensor` that it saw first."""
    with simulated(90) as device, patch.object(partitions, "_orig_torch_tensor", torch.tensor):
        yield device


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*SETTINGS] if sys.argv[2:] == ["settings"] else sys.argv[2:])
