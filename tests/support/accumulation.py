"""Gradients accumulated by DeepSpeed, and the sum in float64 of those that autograd gives for each micro-batch.

    torchrun --nproc_per_node 2 tests/support/accumulation.py FOLDER

writes FOLDER/two.pt: the results of all cases.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from rank_cases import all_samples, make_model
from torch import Tensor

from rlplus.common.agree import initialize_distributed
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch
from rlplus.train.learner import make_micro_batches
from rlplus.train.learner.packed_model import PackedModel
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import load_model, prepare_model

CASES: dict[str, dict[str, Any]] = {
    f"ZeRO-{stage}{offload}{untied}": {"zero_stage": stage, "offload_optimizer": "cpu" if offload else "none"}
    for stage in (1, 2, 3)
    for offload in ("", ", offload")
    for untied in ("", ", untied")
} | {"ZeRO-3, shard_head, untied": {"zero_stage": 3, "shard_head": True}}
ZERO = {
    "stage3_param_persistence_threshold": 0,  # all weights in shards
    "memory_efficient_linear": False,  # ZeRO-3's rounds a product before it adds the bias
}
Gradients = dict[str, Tensor]


class Accumulated(NamedTuple):
    """gradients: by number of micro-batches, DeepSpeed's and the float64 sum; norms: DeepSpeed's norm of each.

    moved: change of the fp32 weights.
    """

    gradients: dict[int, tuple[Gradients, Gradients]]
    norms: dict[int, float | None]
    moved: Gradients


def make_models(folder: Path) -> None:
    for tied in (True, False):
        make_model(folder, tied)


def accumulate(
    folder: Path, name: str, alike: Sequence[int] = (), deepspeed: dict[str, Any] | None = None
) -> Accumulated:
    """One update of all micro-batches of some samples; or updates of so many copies of the first one.

    On several ranks each has micro-batches of its own.
    """
    config = Config.model_validate(
        {
            "output_dir": str(folder / "out"),
            "model": {"path": str(make_model(folder, "untied" not in name)), "dtype": "bfloat16"},
            "data": {"path": "-", "demonstration": "d", "max_prompt_length": 8},
            "reward": {"kind": "exact_match"},
            "rollout": {"max_response_length": 40},
            "algorithm": {"preset": "rlplus"},
            "train": {"steps": 1, "tokens_per_micro_batch": 64, "weight_decay": 0, "grad_clip": 1e9}
            | {"lr": 1e-30 if alike else 1e-3}  # then the next update is of the same weights
            | {"deepspeed": {"zero_optimization": ZERO} | (deepspeed or {})}
            | CASES[name],
        }
    )
    path, model_config = prepare_model(config.model, folder, 0)
    policy = Policy(config, path, model_config)
    algorithm = config.algorithm.resolve()
    own = all_samples()[dist.get_rank() :: dist.get_world_size()]
    batches = make_micro_batches(own, algorithm, config, 256, policy.device)
    plain = PackedModel(load_model(config.model, path, model_config), None).train()
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    found, norms = {}, {}
    for count in alike or (len(batches),):
        used = [next(batch for batch in batches if not batch.forward_only)] * count if alike else batches
        with mock.patch.multiple(policy, gradients_in_fp32=False, _sharded=None):
            each = (_gradients(policy, plain, batch, algorithm.objective) for batch in used[: 1 if alike else None])
            want = _summed(each)
        policy.backward(used, policy.loss_of(algorithm.objective))
        named = list(policy.engine.module.named_parameters())
        got = {name: safe_get_full_grad(p).double().clone() for name, p in named}
        scale = count if alike else 1
        found[count] = got, {name: gradient * scale for name, gradient in want.items()}
        before = {name: safe_get_full_fp32_param(p).double().clone() for name, p in named}
        assert policy.step()
        norms[count] = policy.grad_norm
        moved = {name: safe_get_full_fp32_param(p).double() - before[name] for name, p in named}
    policy.close()
    return Accumulated(found, norms, moved)


def _gradients(policy: Policy, plain: PackedModel, batch: MicroBatch, objective: Any) -> Gradients:
    """A micro-batch's gradients by plain autograd."""
    plain(batch, policy._loss_op(objective, batch)).loss.backward()
    gradients = {name: p.grad.double() for name, p in plain.named_parameters() if p.grad is not None}
    plain.zero_grad(set_to_none=True)
    return gradients


def _summed(gradients: Iterable[Gradients]) -> Gradients:
    """Over micro-batches and, as averages since each loss has the factor of DeepSpeed's mean, over ranks."""
    total: Gradients = {}
    for one in gradients:
        for name, gradient in one.items():
            total[name] = total.get(name, 0.0) + gradient
    for gradient in total.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return total


if __name__ == "__main__":
    initialize_distributed()
    results = {name: tuple(accumulate(Path(sys.argv[1]), name)) for name in CASES}
    if dist.get_rank() == 0:
        torch.save(results, Path(sys.argv[1]) / "two.pt")
    dist.barrier()
