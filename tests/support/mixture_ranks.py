"""Gradients of one update of a mixture with replayed experts, on one rank or several, for `test_routing_ranks.py`.

    torchrun --nproc_per_node 2 tests/support/mixture_ranks.py FOLDER NAME ...

Rank 0 writes FOLDER/gradients.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from mixtures import with_experts
from rank_cases import ALWAYS_SHARDED, all_samples
from torch import Tensor

from rlplus.common.agree import initialize_distributed
from rlplus.train.config import Config
from rlplus.train.learner import make_micro_batches
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import prepare_model

ZERO3: dict[str, Any] = {"zero_stage": 3, "deepspeed": ALWAYS_SHARDED}
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "without replay": {},
    "one rank has almost all": {},
    "ZeRO-3": ZERO3,
    "sequences": {"sequence_parallel": 2},
    "sequences, ZeRO-3": {"sequence_parallel": 2} | ZERO3,
}


def gradients(folder: Path, name: str) -> tuple[dict[str, Tensor], int]:
    """All parameters' gradients, and the number of replayed rows of the rank's micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = Config.model_validate(
        {
            "output_dir": str(folder / "out"),
            "model": {
                "path": str(folder / "start"), "dtype": "float32", "gradient_checkpointing": "ZeRO-3" in name
            },
            "data": {"path": "-", "demonstration": "d", "max_prompt_length": 8},
            "reward": {"kind": "exact_match"},
            "rollout": {
                "engine": "transformers", "max_response_length": 40, "routing_replay": name != "without replay"
            },
            "algorithm": {"preset": "rlplus"},
            "train": {"steps": 1, "tokens_per_micro_batch": 64, "lr": 1e-3} | CASES[name],
        }
    )  # fmt: skip
    policy = Policy(config, *prepare_model(config.model, folder, 0))
    samples = with_experts(all_samples(), 3, 6, 2)
    own = samples[:2] if rank else samples[2:]
    if name != "one rank has almost all":
        own = samples[rank::world]
    algorithm = config.algorithm.resolve()
    batches = make_micro_batches(own, algorithm, config, 256, policy.device)
    found: dict[str, Tensor] = {}
    for batch in batches:
        batch.old_logprob = policy.logprob(batch)

    def keep() -> None:
        for parameter_name, parameter in policy.engine.module.named_parameters():
            found[parameter_name] = safe_get_full_grad(parameter).clone()

    policy.engine.step = keep
    policy.backward(batches, policy.loss_of(algorithm.objective))
    policy.step()
    return found, sum(int((b.experts[..., 0, 0] != 255).sum()) for b in batches if b.experts is not None)


def main() -> None:
    folder, *names = sys.argv[1:]
    initialize_distributed()
    results = {name: gradients(Path(folder), name) for name in names}
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, {name: count for name, (_, count) in results.items()})
    if dist.get_rank() == 0:
        torch.save(
            {name: (found, [row[name] for row in rows]) for name, (found, _) in results.items()},
            Path(folder) / "gradients.pt",
        )
    dist.barrier()


if __name__ == "__main__":
    main()
